"""A mixture of experts within a budget that not even the experts of one layer fit into."""

import copy
import re

import pytest
import torch
from runtime.budget_loops import task_of
from runtime.expert_models import EXPERTS, HIDDEN, MODELS, WIDTH, Batched, Mixture, words
from runtime.train_loops import adamw, assert_same_state, plain_steps
from torch import nn

import hocket
from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import parse_bytes
from hocket.capture import CaptureWarning
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_step
from hocket.runtime.offload.budgeted_model import BudgetedModel, BudgetSetup
from hocket.runtime.offload.dry_run import dry_run_peak
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.train.planned_optimizer import planned_update
from hocket.runtime.train.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop
from hocket.runtime.training_task import LoopOptions

CPU = torch.device("cpu")
LAYER_BYTES = 2 * EXPERTS * WIDTH * HIDDEN * 4
AWAY = {"parameters": "streamed", "update": "host"}


def recorded(model, optimizer, batch):
    recipe = TraceOptions(update=planned_update(optimizer, model), device="cpu")
    return recipe, recipe.trace(model, batch, "train")[0]


def section_of(graph, groups, **policy):
    """All blocks streamed, those of layers in groups of experts."""
    cut = cut_step(graph)
    starts = cut.start.tolist()
    return Memory(budget_bytes=(0,), blocks=tuple(
        MemoryBlock(
            name=name, start=starts[n], stop=starts[n + 1], **AWAY,
            **(policy if n + 1 < cut.num_blocks else {}),
            expert_groups=groups if name.startswith("layers.") else 1,
        )
        for n, name in enumerate(cut.names)
    ))  # fmt: skip


def carried(model, groups, batch, **policy):
    """A loop that carries out a section, and what it should hold."""
    optimizer = adamw(model)
    recipe, graph = recorded(model, optimizer, batch)
    section = section_of(graph, groups, **policy)
    setup = BudgetSetup(graph=graph)
    peak = dry_run_peak(task_of(model, optimizer, batch, recipe), section, setup).num_bytes
    strategy = BudgetedModel(model, batch, recipe, BudgetPlan(section, peak), CPU, setup)
    return strategy, optimizer, peak


def drawn(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name](), words(4)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "listed"])
@pytest.mark.parametrize("policy", [
    {}, {"activations": "recomputed"}, {"activations": "offloaded"},
    {"activations": "recomputed", "checkpoint": "offloaded"},
])  # fmt: skip
def test_experts_in_groups_train_as_plain_pytorch_does(name, policy):
    model, batches = drawn(name)
    twin = copy.deepcopy(model)
    strategy, optimizer, _ = carried(model, 3, batches[0], **policy)
    assert [len(block.expert_groups) for block in strategy.blocks] == [0, 2, 2, 2, 0, 0]
    train = TrainingLoop(model, optimizer, strategy, LoopOptions())
    ours = [train.step(batch).item() for batch in batches]
    theirs = plain_steps(twin, adamw(twin), batches)
    train.state_dict()
    if name == "sorted":
        # Every row is multiplied by itself, whatever the others are.
        assert ours == theirs
        return
    # Kernels may sum up in another order for fewer matrices, or for turned ones.
    assert ours == pytest.approx(theirs, rel=1e-6)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_does_not_ask_how_many_gives_the_same_bits():
    model, batches = drawn("bmm")
    twin = copy.deepcopy(model)
    strategy, optimizer, _ = carried(model, 2, batches[0])
    train = TrainingLoop(model, optimizer, strategy, LoopOptions(accumulate=2, clip_norm=0.1))
    ours = [train.step(batch).item() for batch in batches]
    theirs = plain_steps(twin, adamw(twin), batches, accumulate=2, clip_norm=0.1)
    assert ours == theirs
    train.state_dict()
    assert_same_state(model, twin)


@pytest.mark.parametrize("groups", [1, 2, 4, EXPERTS])
@pytest.mark.parametrize(
    ("name", "policy"), [("bmm", {}), ("bmm", {"activations": "recomputed"}), ("sorted", {})]
)
def test_rehearsed_peak_is_what_steps_of_groups_hold(groups, name, policy):
    model, batches = drawn(name)
    tracker = MemoryTracker()
    with tracker:
        strategy, optimizer, peak = carried(model, groups, batches[0], **policy)
        tracker.held_bytes = tracker.peak_bytes = 0
        tracker._refs.clear()
        tracker.track(strategy.lasting)
        tracker.track(batches[0])
        train = TrainingLoop(model, optimizer, strategy, LoopOptions())
        for _ in range(3):
            train.step(batches[0])
    # The loss of the step before is foreseen in 32 bits.
    assert tracker.peak_bytes == peak - (2 if name == "sorted" else 0)


def test_more_groups_hold_less():
    model, batches = drawn("bmm")
    peaks = [carried(copy.deepcopy(model), n, batches[0])[2] for n in (1, 2, 3, EXPERTS)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    # Both buffers that a layer's parameters take turns in, and its gradients twice, in full.
    assert peaks[0] > 3 * LAYER_BYTES > 0.4 * peaks[0] > peaks[-1]


@pytest.mark.parametrize("name", ["listed", "bmm", "sorted"])
def test_prepare_keeps_a_budget_below_one_layer_of_experts(name):
    model, batches = drawn(name)
    twin = copy.deepcopy(model)
    with pytest.raises(NoFeasiblePlanError, match="the minimum-memory plan needs") as caught:
        hocket.prepare(model, adamw(model), batches[0], memory=1000)
    least = parse_bytes(re.search(r'memory="([^"]+)"', caught.value.hint).group(1))
    assert least < LAYER_BYTES
    train = hocket.prepare(model, adamw(model), batches[0], memory=least)
    assert train.memory.peak_bytes <= least
    if name == "listed":
        assert "layers.0.experts.1" in {block.name for block in train.memory.section.blocks}
    else:
        assert max(block.expert_groups for block in train.memory.section.blocks) == EXPERTS
    ours = [train.step(batch).item() for batch in batches]
    assert ours == pytest.approx(plain_steps(twin, adamw(twin), batches), rel=1e-6)
    held = train.evaluate(batches[0]).item()
    assert held == pytest.approx(twin.eval()(*batches[0]).item(), rel=1e-5)


class Frozen(Batched):
    """Of whose matrices one is not trained, and the other is looked at as a whole, too."""

    def __init__(self):
        super().__init__(torch.bmm)
        self.up.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + self.down.square().mean()


def test_frozen_experts_and_those_that_are_read_whole_train_the_same():
    torch.manual_seed(3)
    model, batches = Mixture(Frozen), words(3)
    twin = copy.deepcopy(model)
    strategy, optimizer, _ = carried(model, 3, batches[0])
    # What else reads them is no product: the plan does not have them in groups.
    assert [len(block.expert_groups) for block in strategy.blocks] == [0, 1, 1, 1, 0, 0]
    train = TrainingLoop(model, optimizer, strategy, LoopOptions())
    ours = [train.step(batch).item() for batch in batches]
    assert ours == pytest.approx(plain_steps(twin, adamw(twin), batches), rel=1e-6)


class Sometimes(Batched):
    """Looks at its matrices as a whole where it is not recorded, and multiplies them twice."""

    def forward(self, x):
        made = super().forward(x)
        if self.looks:
            made = super().forward(made) + self.down[1].sum() + self.up.abs().amax()
        return made

    looks = False


def test_what_was_not_recorded_is_brought_whole_and_gradients_are_added():
    torch.manual_seed(4)
    model, batches = Mixture(lambda: Sometimes(torch.bmm)), words(3)
    twin = copy.deepcopy(model)
    strategy, optimizer, _ = carried(model, 3, batches[0])
    for layer in (*model.layers, *twin.layers):
        layer.looks = True
    train = TrainingLoop(model, optimizer, strategy, LoopOptions())
    ours = [train.step(batch).item() for batch in batches]
    assert ours == pytest.approx(plain_steps(twin, adamw(twin), batches), rel=1e-6)


def test_experts_under_autocast_travel_rounded():
    torch.manual_seed(0)
    model, batches = MODELS["bmm"](), words(3)
    twin = copy.deepcopy(model)

    def forward(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(*batch)

    train = hocket.prepare(
        model, adamw(model), batches[0], forward=forward, memory=int(0.8 * LAYER_BYTES)
    )
    blocks = [block for block in train._strategy.blocks if block.expert_groups]
    assert len(blocks) == 3
    assert {
        p.dtype for b in blocks for p in b.upload_layout.places if p.parameter in b.expert_groups
    } == {torch.bfloat16}
    ours = [train.step(batch).item() for batch in batches]
    theirs = plain_steps(twin, adamw(twin), batches, forward=forward)
    assert ours == pytest.approx(theirs, rel=5e-3)
    assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in model.parameters())


class Routed(nn.Module):
    """Experts that take the rows which choose them: which ones do depends on the data."""

    def __init__(self):
        super().__init__()
        self.norm, self.route = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        rows = self.norm(x).flatten(0, 1)
        weight, chosen = self.route(rows).softmax(-1).max(-1)
        made = torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            own = (chosen == number).nonzero().flatten()
            made = made.index_add(0, own, self.experts[number](rows[own]) * weight[own, None])
        return x + made.view_as(x)


def test_experts_that_data_choose_are_fetched_when_they_are_chosen():
    torch.manual_seed(1)
    model, batches = Mixture(Routed), words(6)
    twin = copy.deepcopy(model)
    with pytest.warns(CaptureWarning, match="cannot be traced"):
        train = hocket.prepare(model, adamw(model), batches[0], memory="1MiB")
    blocks = {block.name for block in train.memory.section.blocks}
    assert {"layers.0.norm", "layers.0.experts.0", f"layers.2.experts.{EXPERTS - 1}"} <= blocks
    assert "layers.0" not in blocks
    largest = max(buffer.numel() for buffer in train._strategy._staging.buffers)
    assert largest < LAYER_BYTES / EXPERTS * 1.2
    ours = [train.step(batch).item() for batch in batches]
    assert ours == plain_steps(twin, adamw(twin), batches)
    train.state_dict()
    assert_same_state(model, twin)
