"""Training within a budget of bytes equals plain training, and holds what was rehearsed."""

import copy
from dataclasses import replace

import pytest
import torch
from runtime.budget_loops import CPU, loop_of, mixed, task_of
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, assert_same_state, plain_loss, plain_steps
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hocket
from hocket.capture import CaptureWarning
from hocket.graph import Phase
from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.budgeted_model import BudgetedModel, BudgetSetup
from hocket.runtime.offload.chunked_loss import summed_cross_entropy
from hocket.runtime.offload.dry_run import dry_run_peak_bytes
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.offload.saved_tensors import OffloadedStorages
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.strategy import LoopOptions
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop


def compare(build, seed, *, steps=6, accumulate=1, clip_norm=None, **plan):
    """Losses of both loops, whose weights are the same after them."""
    torch.manual_seed(seed)
    model, batches, forward = build()
    twin = copy.deepcopy(model)
    batches = [batches[number % len(batches)] for number in range(steps)]
    optimizer, plain = adamw(model), adamw(twin)
    section = mixed(model, seed, **plan)
    train = loop_of(
        model, optimizer, section, batches[0], forward, accumulate=accumulate, clip_norm=clip_norm
    )
    schedules = [lr_scheduler.StepLR(each, 2, 0.7) for each in (optimizer, plain)]
    torch.manual_seed(seed)
    ours = []
    for number, batch in enumerate(batches, 1):
        ours.append(train.step(batch).item())
        if number % accumulate == 0:
            schedules[0].step()
    torch.manual_seed(seed)
    theirs = []
    for number in range(0, steps, accumulate):
        theirs += plain_steps(twin, plain, batches[number : number + accumulate], forward=forward,
                              clip_norm=clip_norm, accumulate=accumulate)  # fmt: skip
        schedules[1].step()
    return train, twin, plain, ours, theirs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_policies_train_as_plain_pytorch_does(name, seed):
    train, twin, plain, ours, theirs = compare(MODELS[name], seed)
    assert ours == theirs
    state = train.state_dict()
    assert_same_state(train.model, twin)
    states = plain.state_dict()["state"]
    assert state["optimizer"]["state"].keys() == states.keys()
    for number, slots in states.items():
        for key, value in slots.items():
            assert torch.equal(state["optimizer"]["state"][number][key], value)


@pytest.mark.parametrize("parameters", ["resident", "streamed"])
def test_optimizers_of_parameters_that_are_frozen_or_unused_keep_the_same_states(parameters):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    model[1].weight.requires_grad_(False)
    model.add_module("unused", torch.nn.Linear(4, 4))
    twin, batch = copy.deepcopy(model), torch.randn(5, 4)
    blocks = [MemoryBlock(name=str(n), parameters=parameters, update="host") for n in range(3)]

    def forward(model, rows):
        return model[2](model[1](model[0](rows)).tanh()).square().mean()

    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, twin))
    section = Memory(budget_bytes=(0,), blocks=tuple(blocks))
    train = loop_of(model, optimizer, section, batch, forward)
    ours = [train.step(batch).item() for _ in range(3)]
    assert ours == plain_steps(twin, plain, [batch] * 3, forward=forward)
    state = train.state_dict()["optimizer"]["state"]
    assert state.keys() == plain.state_dict()["state"].keys()
    assert_same_state(model, twin)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_and_accumulation_are_as_in_plain_pytorch(accumulate):
    for seed in (3, 4):
        train, twin, _, ours, theirs = compare(
            MODELS["tied"], seed, accumulate=accumulate, clip_norm=0.3
        )
        assert ours == theirs
        train.state_dict()
        assert_same_state(train.model, twin)


def test_loss_in_chunks_differs_by_rounding_only():
    _, _, _, ours, theirs = compare(MODELS["tied"], 5, steps=12, loss_chunks=3)
    assert ours == pytest.approx(theirs, rel=2e-6)


@pytest.mark.parametrize("num_chunks", [1, 4, 50])
def test_gradients_of_a_loss_in_chunks_are_rounded_once(num_chunks):
    """Those of 16-bit weights are added up in 32 bits: as near to the exact ones as one piece."""
    torch.manual_seed(0)
    rows, weight = torch.randn(50, 8).bfloat16(), torch.randn(30, 8).bfloat16()
    bias, target = torch.randn(30).bfloat16(), torch.randint(30, (50,))
    target[7] = -100
    own = [t.clone().requires_grad_() for t in (rows, weight, bias)]
    exact = [t.double().requires_grad_() for t in (rows, weight, bias)]
    loss = summed_cross_entropy(
        *own, target, num_chunks=num_chunks, dtype=torch.float32, ignore_index=-100
    )
    whole = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(*exact), target, reduction="sum"
    )
    assert loss.item() == pytest.approx(whole.item(), rel=1e-2)
    loss.backward()
    whole.backward()
    for mine, theirs in zip(own, exact, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        error = (mine.grad.double() - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < 2**-7


@pytest.mark.parametrize("fused", [False, True])
def test_own_loop_and_plain_evaluation_work(fused):
    """Fused kernels change parameters without moving their version counters."""
    torch.manual_seed(0)
    model, batches, forward = MODELS["tied"]()
    twin = copy.deepcopy(model)
    optimizer, plain = (
        torch.optim.AdamW(m.parameters(), lr=1e-2, fused=fused) for m in (model, twin)
    )
    train = loop_of(model, optimizer, mixed(model, 7), batches[0], forward)
    for batch in batches:
        torch.manual_seed(1)
        loss = train(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(1)
        other = plain_loss(twin, batch, forward)
        other.backward()
        plain.step()
        plain.zero_grad()
        assert loss.item() == other.item()
    twin.eval()
    with torch.no_grad():
        expected = plain_loss(twin, batches[0], forward)
    assert torch.equal(train.evaluate(batches[0]), expected)
    assert_same_state(model, twin)


class Choosing(torch.nn.Module):
    """Takes a way that depends on data."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers[: 3 if x.mean() > 0 else 2]:
            x = layer(x).relu()
        return x.square().mean()


def test_dynamic_models_and_shapes_train_and_say_what_is_not_known():
    torch.manual_seed(0)
    model = Choosing()
    twin = copy.deepcopy(model)
    batches = [sign * torch.rand(rows, 6) for sign, rows in ((1, 4), (-1, 4), (1, 6))]
    with pytest.warns(CaptureWarning, match="cannot be traced"):
        train = hocket.prepare(model, adamw(model), batches[0], memory="1MiB")
    ours = [train.step(batch).item() for batch in batches]
    assert ours == plain_steps(twin, adamw(twin), batches)
    loop = loop_of(twin, adamw(twin), mixed(twin, 0), batches[0])
    # A smaller one holds no more than what was rehearsed.
    loop.step(batches[0][:3])
    assert not loop.lost
    with pytest.warns(CaptureWarning, match="larger than the planned one"):
        loop.step(batches[2])
    assert "may need more memory than predicted" in loop.lost


def test_training_goes_on_from_a_checkpoint_under_another_plan():
    torch.manual_seed(0)
    model, batches, forward = MODELS["tied"]()
    other = copy.deepcopy(model)
    first = loop_of(model, adamw(model), mixed(model, 8), batches[0], forward, accumulate=2)
    for batch in batches[:3]:
        first.step(batch)
    second = loop_of(other, adamw(other), mixed(other, 9), batches[0], forward, accumulate=2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.manual_seed(2)
    expected = [first.step(batch).item() for batch in batches]
    torch.manual_seed(2)
    assert [second.step(batch).item() for batch in batches] == expected


def held(model, optimizer, section, batch, forward, steps=3):
    """The most that steps hold, counted."""
    tracker = MemoryTracker()
    with tracker:
        train = loop_of(model, optimizer, section, batch, forward)
        tracker.track(train._strategy.lasting)
        tracker.track(t for t in batch if isinstance(t, torch.Tensor))
        for _ in range(steps):
            train.step(batch)
    return tracker.peak_bytes


@pytest.mark.parametrize("name", [*MODELS, "picture in shares"])
def test_rehearsed_peak_is_what_steps_hold(name):
    model, batches, forward = MODELS[name.partition(" ")[0]]()
    section = mixed(model, 1)
    if name not in MODELS:
        # Shares are learned by a first step, of which nothing may be left.
        ways = ({"activations": "offloaded", "share": 0.5}, {"activations": "kept"})
        blocks = (replace(b, **ways[n % 2]) for n, b in enumerate(section.blocks))
        section = replace(section, blocks=tuple(blocks))
    optimizer = adamw(model)
    recipe = TraceOptions(update=planned_update(optimizer, model), device="cpu", forward=forward)
    rehearsed = dry_run_peak_bytes(task_of(model, optimizer, batches[0], recipe), section)
    assert held(model, optimizer, section, batches[0], forward) == rehearsed


class Shortcuts(nn.Module):
    """What each layer is given is made outside of all layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = (x + layer(x)).relu()
        return x.square().mean()


def test_what_is_made_outside_of_blocks_stays_whatever_lay_in_its_place_before(monkeypatch):
    sent = []
    monkeypatch.setattr(
        OffloadedStorages, "_offload", lambda self, tensor: sent.append(tensor.shape)
    )
    model, batch = Shortcuts(), (torch.randn(64, 32),)
    way = {"activations": "recomputed", "checkpoint": "offloaded"}
    train = loop_of(model, adamw(model), uniform(model, 0, **way), batch)
    for _ in range(20):
        train.step(batch)
    assert not sent


class Gated(nn.Module):
    """Cells whose gates are parts of one storage, each of which is changed in place by itself."""

    def __init__(self, width=32):
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(3))

    def forward(self, x):
        state = None
        for cell in self.cells:
            state = cell(x, state)
        return state[0].square().mean()


def test_what_is_changed_in_place_while_parts_of_it_are_saved_comes_back_as_it_was_saved():
    torch.manual_seed(0)
    model, batch = Gated(), (torch.randn(16, 32),)
    twin = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(twin)
    train = loop_of(model, optimizer, uniform(model, 0, activations="offloaded"), batch)
    losses = [train.step(batch).item() for _ in range(4)]
    assert losses == plain_steps(twin, plain, [batch] * 4)
    assert_same_state(model, twin)


class AtHome(TorchDispatchMode):
    """Notes ops of a training that compute with what is at home: a GPU could not reach it."""

    def __init__(self, blocks):
        super().__init__()
        self.homes = {b.master.untyped_storage()._cdata for b in blocks if b.master is not None}
        self.wrong = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        reads_home = any(leaf.untyped_storage()._cdata in self.homes for leaf in leaves)
        if reads_home and not func.is_view and "copy" not in str(func):
            self.wrong.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("update", ["host", "device"])
def test_a_list_of_layers_in_one_block_is_brought_layer_by_layer(update):
    torch.manual_seed(0)
    model, batches, forward = MODELS["tied"]()
    optimizer = adamw(model)
    recipe = TraceOptions(update=planned_update(optimizer, model), device="cpu", forward=forward)
    graph, _ = recipe.trace(model, batches[0], "train")
    num_forward = int((graph.op_phase == Phase.FORWARD).sum())
    policy = {"activations": "recomputed", "parameters": "streamed", "update": update}
    block = MemoryBlock(name="embed", start=0, stop=num_forward - 8, **policy)
    section = Memory(budget_bytes=(0,), blocks=(block,))
    strategy = BudgetedModel(
        model, batches[0], recipe, BudgetPlan(section, 0), CPU, BudgetSetup(graph=graph)
    )
    assert "layers" not in strategy.blocks[0].modules
    assert set(strategy.blocks[0].modules) > {"layers.0", "layers.3"}
    train = TrainingLoop(model, optimizer, strategy, LoopOptions())
    train.step(batches[0])
    train.state_dict()
    with AtHome(strategy.blocks) as home:
        train.step(batches[1])
    assert home.wrong == []


def test_offloading_does_not_ask_which_number_a_device_has():
    peaks = []
    for device in (CPU, torch.device("cpu", 0)):
        model, batches, forward = MODELS["blocks"]()
        optimizer = adamw(model)
        recipe = TraceOptions(
            update=planned_update(optimizer, model), device="cpu", forward=forward
        )
        section = uniform(model, 0, activations="offloaded")
        peaks.append(
            dry_run_peak_bytes(task_of(model, optimizer, batches[0], recipe, device), section)
        )
    assert peaks[0] == peaks[1]
