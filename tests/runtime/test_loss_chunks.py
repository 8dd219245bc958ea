"""A loss in chunks is carried out or refused: shallow models, last layers inside of others."""

import copy
from dataclasses import replace

import pytest
import torch
from planners.memory.steps import placed
from runtime.train_loops import adamw, plain_steps
from torch import nn
from torch.nn import functional

import hocket
from hocket.base.errors import UsageError
from hocket.plan.files import SavedPlan
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.frontier import find_frontier
from hocket.runtime.offload.chunked_loss import LazyLogits, supports_chunked_loss
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.trace_options import TraceOptions
from hocket.simulate.verify import violations

WORDS, WIDTH = 400, 16


class Shallow(nn.Module):
    """A language model of two layers; the last layer may be the end of a sequence."""

    def __init__(self, is_inside=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        head = nn.Linear(WIDTH, WORDS)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Sequential(head)) if is_inside else head

    def forward(self, words, labels):
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Twice(Shallow):
    """Uses its last layer before the last block, too."""

    def forward(self, words, labels):
        guessed = self.head(self.embed(words)).square().mean()
        return super().forward(words, labels) + guessed


def batches(count=3):
    draws = torch.Generator().manual_seed(1)
    drawn = lambda: torch.randint(WORDS, (4, 16), generator=draws)  # noqa: E731
    return [(drawn(), drawn()) for _ in range(count)]


def frontier_of(model, batch):
    recipe = TraceOptions(update=planned_update(adamw(model), model), device="cpu")
    graph, _ = recipe.trace(model, batch, "train")
    return find_frontier(*placed(graph), in_chunks=supports_chunked_loss(model, graph))


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_shallow_model_has_its_loss_in_chunks(monkeypatch, is_inside):
    torch.manual_seed(0)
    model, given = Shallow(is_inside), batches()
    twin = copy.deepcopy(model)
    least = frontier_of(model, given[0]).smallest.memory
    assert least.loss_chunks > 1
    made = []
    monkeypatch.setattr(LazyLogits, "materialize", lambda logits: made.append(logits))
    saved = frontier_of(model, given[0])
    ample = saved.plan.having(replace(least, budget_bytes=(2**30,)))
    train = hocket.prepare(model, adamw(model), given[0], plan=SavedPlan(saved.problem, ample))
    ours = [train.step(batch).item() for batch in given]
    assert ours == pytest.approx(plain_steps(twin, adamw(twin), given), rel=1e-5)
    assert not made, "all logits never exist together"
    # Scores and their gradients of all words would be more than everything else.
    in_one = replace(ample[Memory], loss_chunks=1)
    plain = hocket.prepare(twin, adamw(twin), given[0],
                           plan=SavedPlan(saved.problem, ample.having(in_one)))  # fmt: skip
    assert train.memory.peak_bytes < plain.memory.peak_bytes - given[0][0].numel() * WORDS * 4


def test_chunks_that_no_block_can_make_are_refused():
    model, batch = Shallow(), batches()[0]
    frontier = frontier_of(model, batch)
    graph = frontier.problem.graph
    head = [op for op in range(graph.num_ops) if graph.module_of(op) == "head"]
    inner, last = head[2], frontier.smallest.memory.blocks[-1]
    edges = {"embed": (0, inner), "head": (inner, last.stop - 1),
             "nll_loss_forward": (last.stop - 1, last.stop)}  # fmt: skip
    blocks = tuple(MemoryBlock(name=n, start=a, stop=b) for n, (a, b) in edges.items())
    section = Memory(budget_bytes=(2**30,), blocks=blocks, loss_chunks=4)
    plan = frontier.plan.having(section)
    told = [each.message for each in violations(plan, frontier.problem)]
    assert any("in 4 chunks, but the last block ('nll_loss_forward')" in each for each in told)
    with pytest.raises(UsageError, match=r"no block of the memory plan has head whole"):
        hocket.prepare(model, adamw(model), batch, plan=SavedPlan(frontier.problem, plan))
    whole = frontier.plan.having(replace(section, loss_chunks=1))
    train = hocket.prepare(model, adamw(model), batch, plan=SavedPlan(frontier.problem, whole))
    assert train.step(batch).isfinite()


def test_a_last_layer_that_is_called_twice_is_not_planned_in_chunks():
    model, batch = Twice(), batches()[0]
    assert all(p.memory is None or p.memory.loss_chunks == 1
               for p in frontier_of(model, batch).plans)  # fmt: skip
    assert hocket.prepare(model, adamw(model), batch, memory="1MiB").step(batch).isfinite()
