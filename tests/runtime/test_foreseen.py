"""What a plan is simulated to hold is what its training holds."""

from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from runtime.budget_loops import CPU, task_of
from runtime.foreseen_models import FORESEEN
from torch import nn

from hocket.graph.graph import Graph, Role
from hocket.plan.make import make_problem
from hocket.planners.memory.frontier import Frontier, find_frontier
from hocket.planners.memory.maker import (
    FULL_RECOMPUTE,
    OFFLOADED_ACTIVATIONS,
    RECOMPUTED_FROM_HOST,
)
from hocket.planners.placement.baselines import on_one_device
from hocket.runtime.offload.budgeted_model import BudgetedModel, BudgetSetup
from hocket.runtime.offload.chunked_loss import supports_chunked_loss
from hocket.runtime.offload.dry_run import dry_run_peak_bytes, low_precision_parameters
from hocket.runtime.offload.model_blocks import model_blocks
from hocket.runtime.offload.parameter_blocks import blocks_by_module
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.strategy import LoopOptions
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.casts import CAST
from hocket.simulate.rewriting.module_calls import find_module_calls
from hocket.simulate.rewriting.step import budgeted
from hocket.simulate.rewriting.uses import held_by_calls

NAMES = (
    "sums outside", "called twice", "activations outside", "parts outside", "skips", "saves more",
    "hf gpt2", "own tied", "tied", "residual", "residual in place", "changed rows",
    "seen otherwise", "rounded",
)  # fmt: skip
NUM_REHEARSED = 10
"""Plans of each model, from the leanest on; ``benchmarks/memory/foreseen.py`` has all."""
USUAL = (FULL_RECOMPUTE, OFFLOADED_ACTIVATIONS, RECOMPUTED_FROM_HOST)
"""Plans that are rehearsed in any case."""


class Planned(NamedTuple):
    recipe: TraceOptions
    graph: Graph
    frontier: Frontier
    rounded: dict[str, torch.dtype]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _planned(model, batch, forward):
    recipe = TraceOptions(update=planned_update(adamw(model), model), device="cpu", forward=forward)
    graph, program = recipe.trace(model, batch, "train")
    # A measured processor gives other plans on a busy machine.
    problem = make_problem(graph, "1xcpu-core")
    alone = on_one_device(problem)
    frontier = find_frontier(
        problem, alone, num_levels=6, in_chunks=supports_chunked_loss(model, graph)
    )
    return Planned(recipe, graph, frontier, low_precision_parameters(program))


@pytest.mark.parametrize("name", NAMES)
def test_peaks_of_plans_are_foreseen(name):
    torch.manual_seed(0)
    model, batch, forward = FORESEEN[name]()
    recipe, graph, frontier, rounded = _planned(model, batch, forward)
    planned = sorted(
        (p for p in frontier.plans if p.memory is not None), key=lambda p: p.peak_bytes
    )
    step = -(-len(planned) // NUM_REHEARSED)
    chosen = {p.name: p for p in planned if p.name in USUAL} | {p.name: p for p in planned[::step]}
    kinds = set()
    for foreseen_bytes, memory in ((p.peak_bytes, p.memory) for p in chosen.values()):
        held_bytes = dry_run_peak_bytes(
            task_of(model, adamw(model), batch, recipe),
            memory,
            BudgetSetup(graph=graph, low_precision=rounded),
        )
        assert 0.98 * held_bytes <= foreseen_bytes <= 1.03 * held_bytes, memory
        kinds |= {block.activations for block in memory.blocks}
    assert kinds == {"kept", "offloaded", "recomputed"}


class PlacesOutside(nn.Module):
    """Its own code alone reads a parameter that is larger than all layers."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(256, 64))
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    def forward(self, x):
        return self.layers(x + self.places)


def test_a_parameter_of_no_block_has_its_state_where_all_blocks_have_theirs():
    torch.manual_seed(0)
    model, batch = PlacesOutside(), torch.randn(2, 256, 64)
    planned = _planned(model, batch, lambda model, batch: model(batch).square().mean())
    frontier, peaks = planned.frontier, {}
    full = frontier.find(FULL_RECOMPUTE).memory
    for update in ("device", "host"):
        memory = replace(full, blocks=tuple(replace(b, update=update) for b in full.blocks))
        peaks[update] = dry_run_peak_bytes(
            task_of(model, adamw(model), batch, planned.recipe),
            memory,
            BudgetSetup(graph=planned.graph),
        )
        step = budgeted(frontier.problem, frontier.plan, memory)
        foreseen_bytes = int(simulate(step.problem, step.plan).peak_bytes.max())
        assert foreseen_bytes == pytest.approx(peaks[update], rel=0.02)
    assert peaks["device"] - peaks["host"] > 2 * model.places.nbytes


def _rewritten(name, **policy):
    """A model's graph, and its step with all blocks but the last under one policy."""
    torch.manual_seed(0)
    planned = _planned(*FORESEEN[name]())
    frontier = planned.frontier
    full = frontier.find(FULL_RECOMPUTE).memory
    blocks = [replace(block, **policy) for block in full.blocks[:-1]]
    memory = replace(full, blocks=(*blocks, full.blocks[-1]))
    return planned.graph, budgeted(frontier.problem, frontier.plan, memory).rewritten


def test_parameters_that_come_rounded_are_neither_rounded_nor_sent_again():
    away = {"parameters": "streamed", "update": "host"}
    graph, done = _rewritten("rounded", activations="offloaded", checkpoint="kept", **away)
    known = {graph.tensor_names[t]: t for t in range(graph.num_tensors)}
    rounding = {
        user
        for tensor in np.flatnonzero(graph.tensor_role == Role.PARAMETER).tolist()
        for user in graph.users_of(tensor).tolist()
        if graph.kind_of(user) == CAST and graph.module_of(user).startswith("layers.")
    }
    assert len(rounding) == 4 * 4
    # Their ops are written, and take no time.
    assert not done.share[np.isin(done.origin, sorted(rounding))].any()
    sent = [name.removesuffix("@offload") for name in done.graph.op_names if "@offload" in name]
    assert len(sent) > 4
    makers = {int(graph.tensor_producer[known[name]]) for name in sent}
    assert makers.isdisjoint(rounding)


def test_what_runs_again_does_not_read_what_was_sent_away():
    """A call that is over holds nothing of what it was given."""
    _, done = _rewritten("residual", activations="recomputed", checkpoint="offloaded")
    graph = done.graph
    sent = {name.removesuffix("@offload") for name in graph.op_names if "@offload" in name}
    assert sent
    again = [op for op, name in enumerate(graph.op_names) if name.endswith("@recompute")]
    assert again
    read = {graph.tensor_names[t] for op in again for t in graph.reads_of(op).tolist()}
    assert read.isdisjoint(sent)


def _visited(name):
    """A model, its graph and frontier, and the calls that its plans are carried out by."""
    torch.manual_seed(0)
    model, batch, forward = FORESEEN[name]()
    _, graph, frontier, _ = _planned(model, batch, forward)
    cut = frontier.uses.blocks
    return model, graph, frontier, find_module_calls(graph, cut.start, cut.block_of).calls


def test_layers_that_are_called_twice_are_recomputed_call_by_call():
    """A layer whose one call is interrupted by a module of others is not taken for two calls."""
    _, _, frontier, visits = _visited("called twice")
    calls = [visit.module for visit in visits]
    assert calls.count("layers.0") == calls.count("layers.1") == 2
    assert "layers.2" not in calls
    assert calls.count("layers.2.enter") == 2
    plans = {plan.name: plan.peak_bytes for plan in frontier.plans}
    assert plans[FULL_RECOMPUTE] < 0.7 * max(plans.values())


def test_one_layer_many_times_is_recomputed_call_by_call():
    """Its first call has views of weights that the others share."""
    _, graph, frontier, visits = _visited("tied")
    calls = [(visit.start, visit.stop) for visit in visits if visit.module == "layer"]
    assert [graph.op_names[first] for first, _ in calls] == [
        "layer.norm/native_layer_norm", *(f"layer.norm/native_layer_norm:{i}" for i in range(1, 6))
    ]  # fmt: skip
    assert [graph.op_names[stop - 1] for _, stop in calls] == [
        "layer/add",
        *(f"layer/add:{i}" for i in range(1, 6)),
    ]
    plans = {plan.name: plan.peak_bytes for plan in frontier.plans}
    assert plans[FULL_RECOMPUTE] < 0.5 * max(plans.values())


def test_each_call_of_a_layer_goes_the_way_of_the_block_that_it_is_in():
    """A block may have several calls in a row."""
    model, graph, frontier, visits = _visited("unrolled")
    calls = [visit.block for visit in visits if visit.module == "cell"]
    assert len(calls) == 40 > 2 * len(set(calls))
    memory = next(plan.memory for plan in frontier.plans if plan.name == FULL_RECOMPUTE)
    carried = blocks_by_module(model_blocks(model, memory, graph))["cell"]
    assert [block.index for block in carried] == calls


def test_calls_hold_what_they_were_given_and_lists_of_modules_are_not_called():
    _, _, frontier, visits = _visited("rounded")
    uses = frontier.uses
    graph, num_forward = uses.graph, int(uses.blocks.start[-1])
    given = held_by_calls(graph, uses.module_calls, num_forward, uses.is_forward).tolist()
    last = next(visit for visit in visits if visit.module == "layers.3")
    held = {graph.tensor_names[graph.root_of[t]] for op, t in given if op == last.stop - 1}
    assert held == {"layers.2/add"}


def _ways_by_turns(frontier):
    """Calls of a layer have ways of their own."""
    ways = cycle(({"activations": "recomputed"}, {"activations": "offloaded"}, {}))
    full = frontier.find(FULL_RECOMPUTE).memory
    blocks = [replace(each, activations="kept") for each in full.blocks]
    return replace(full, blocks=tuple(replace(each, **next(ways)) for each in blocks))


def _from_the_host(frontier):
    """Inputs of modules are sent, and what is written into them in place."""
    memory = frontier.find(RECOMPUTED_FROM_HOST).memory
    assert any(block.checkpoint == "offloaded" for block in memory.blocks)
    return memory


@pytest.mark.parametrize(
    ("name", "memory_of"),
    [
        ("called twice", _ways_by_turns),
        ("tied", _ways_by_turns),
        ("unrolled", _ways_by_turns),
        ("residual in place", _ways_by_turns),
        ("residual in place", _from_the_host),
        ("changed rows", _from_the_host),
        ("seen otherwise", _ways_by_turns),
        ("changed ends", _ways_by_turns),
        ("changed ends", _from_the_host),
    ],
)
def test_layers_that_are_called_again_or_write_in_place_train_to_the_same_bits(name, memory_of):
    losses = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model, batch, forward = FORESEEN[name]()
        optimizer = adamw(model)
        planned = _planned(model, batch, forward)
        torch.manual_seed(1)
        if is_plain:
            losses.append([_plain_loss(model, batch, forward, optimizer) for _ in range(4)])
            continue
        losses.append(_losses_within(memory_of(planned.frontier), planned, model, batch, optimizer))
    assert losses[0] == losses[1]


def _losses_within(memory, planned, model, batch, optimizer):
    kept = BudgetPlan(memory, 0)
    strategy = BudgetedModel(
        model, batch, planned.recipe, kept, CPU, BudgetSetup(graph=planned.graph)
    )
    train = TrainingLoop(model, optimizer, strategy, LoopOptions())
    return [train.step(batch).item() for _ in range(4)]


def _plain_loss(model, batch, forward, optimizer):
    loss = forward(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
