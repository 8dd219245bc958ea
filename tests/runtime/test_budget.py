"""Training within a budget of bytes equals plain training, and holds what was rehearsed."""

import copy
import gc
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from planners.memory.steps import placed
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, assert_same_state, plain_loss, plain_steps
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hocket
from hocket.api import run_plan
from hocket.api.memory import budget_of
from hocket.api.runs import RunOptions
from hocket.base.errors import InputFileError, NoFeasiblePlanError, UsageError
from hocket.capture import CaptureWarning, capture
from hocket.graph import Phase
from hocket.plan.files import SavedPlan
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.frontier import find_frontier
from hocket.runtime.memory import travel
from hocket.runtime.memory.blocks import Block
from hocket.runtime.memory.copies import CopyEngines, Ticket
from hocket.runtime.memory.ledger import Ledger
from hocket.runtime.memory.parts import blocks_of
from hocket.runtime.memory.pieces import summed_cross_entropy
from hocket.runtime.memory.uniform import block_names, uniform
from hocket.runtime.memory.updates import HostUpdates
from hocket.runtime.rebuild import ModelSource
from hocket.runtime.train.batches import settled
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.fitting import KeptBudget
from hocket.runtime.train.loop import LoopOptions, TrainingLoop
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.rehearsal import rehearsed_peak_bytes
from hocket.runtime.train.update import planned_update
from hocket.simulate.rewriting.homes import NUM_BERTHS
from hocket.view.measured import placement_run_data

CPU = torch.device("cpu")
WAYS = [
    {"activations": a, "checkpoint": c, "parameters": p, "update": u}
    for a, c in (("kept", "kept"), ("offloaded", "kept"), ("recomputed", "kept"),
                 ("recomputed", "offloaded"))
    for p, u in (("resident", "device"), ("resident", "host"), ("streamed", "host"),
                 ("streamed", "device"))
]  # fmt: skip


def mixed(model, seed, **options):
    """A memory plan with a policy of its own for each block."""
    draws = torch.Generator().manual_seed(seed)
    blocks = [
        MemoryBlock(name=name, **WAYS[int(torch.randint(len(WAYS), (), generator=draws))])
        for name in block_names(model)
    ]
    return Memory(budget_bytes=(0,), blocks=tuple(blocks), **options)


def loop_of(model, optimizer, section, batch, forward=None, rounded=None, **options):
    recipe = Recipe(update=planned_update(optimizer, model), device="cpu", forward=forward)
    carrier = Budgeted(model, batch, recipe, KeptBudget(section, 0), CPU, rounded=rounded)
    return TrainingLoop(model, optimizer, carrier, LoopOptions(**options))


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


class Replacing(torch.optim.Optimizer):
    """Puts another tensor in place of its state at each step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p].get("mean", torch.zeros_like(p))
                    self.state[p]["mean"] = 0.9 * old + p.grad
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.sub_(self.state[p]["mean"], alpha=group["lr"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_visiting_state_is_that_of_the_optimizer_whatever_it_does_with_it(accumulate):
    """Gradients that wait for others at home, a checkpoint in between, state that is replaced."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    twin, batches = copy.deepcopy(model), [torch.randn(5, 4) for _ in range(8)]
    blocks = [MemoryBlock(name=str(n), parameters="streamed", update="device") for n in range(2)]

    def forward(model, rows):
        return model(rows).square().mean()

    optimizer, plain = Replacing(model.parameters()), Replacing(twin.parameters())
    section = Memory(budget_bytes=(0,), blocks=tuple(blocks))
    train = loop_of(model, optimizer, section, batches[0], forward, accumulate=accumulate)
    ours = []
    for number, batch in enumerate(batches):
        if number == 6:  # other tensors with what these have
            train.load_state_dict(copy.deepcopy(train.state_dict()))
        ours.append(train.step(batch).item())
    assert ours == plain_steps(twin, plain, batches, forward=forward, accumulate=accumulate)
    train.state_dict()
    assert_same_state(model, twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["mean"], plain.state[q]["mean"])
        assert optimizer.state[p]["count"] == plain.state[q]["count"] == 8 // accumulate


def test_state_of_large_parameters_visits_in_parts(monkeypatch):
    monkeypatch.setattr(travel, "PIECE_BYTES", 1 << 11)
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    twin, optimizer = copy.deepcopy(model), adamw(model)
    section = uniform(model, 0, parameters="streamed", update="device")
    train = loop_of(model, optimizer, section, batches[0], forward)
    plain = adamw(twin)
    torch.manual_seed(1)
    ours = [train.step(batch).item() for batch in batches * 2]
    torch.manual_seed(1)
    assert ours == plain_steps(twin, plain, batches * 2, forward=forward)
    pieces = [piece for each in train._carrier._visitors._pieces.values() for piece in each]
    assert any(part.elements is not None for piece in pieces for part in piece.parts)
    train.state_dict()
    assert_same_state(model, twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in plain.state[q].items():
            assert torch.equal(optimizer.state[p][key], value)


class Noting(CopyEngines):
    """Tells each mark from the others, and what copies to the device waited for."""

    def __init__(self):
        super().__init__(CPU, is_real=False)
        self.waited = []

    def mark(self):
        return Ticket(None)

    def fetch(self, pairs, *after):
        self.waited.append(after)
        return super().fetch(pairs, *after)


def test_state_is_fetched_only_after_the_last_update_has_come_home():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    section = uniform(model, 0, parameters="streamed", update="device")
    train = loop_of(model, adamw(model), section, batches[0], forward)
    train.step(batches[0])
    engines = train._carrier._visitors._engines = Noting()
    train.step(batches[0])
    returned = {block.returned for block in train._carrier.blocks}
    engines.waited.clear()
    train.step(batches[0])
    assert engines.waited
    assert all(returned.intersection(after) for after in engines.waited)


def test_a_new_berth_is_written_after_what_the_computation_was_told_before_it():
    # Its memory is what the computation gave back and may still be at work in.
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    section = uniform(model, 0, parameters="streamed", update="device")
    train = loop_of(model, adamw(model), section, batches[0], forward)
    train.step(batches[0])
    visitors, marks = train._carrier._visitors, []

    class Marking(Noting):
        def mark(self):
            marks.append(Ticket(None))
            return marks[-1]

    engines = visitors._engines = Marking()
    visitors._berths = []
    train.step(batches[0])
    assert all(set(marks).intersection(after) for after in engines.waited)
    assert len(engines.waited) >= NUM_BERTHS


def test_pieces_of_state_take_turns_in_berths_that_the_one_before_has_left(monkeypatch):
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    section = uniform(model, 0, parameters="streamed", update="device")
    train = loop_of(model, adamw(model), section, batches[0], forward)
    for _ in range(2):
        train.step(batches[0])
    visitors, log = train._carrier._visitors, []

    class Logging(Noting):
        def fetch(self, pairs, *after):
            log.append((pairs[0][0].untyped_storage().data_ptr(), after))
            return super().fetch(pairs, *after)

    visitors._engines = Logging()
    send = visitors._send

    def noted(piece, berth):
        send(piece, berth)
        log.append((berth.buffer.data_ptr(), berth.left))

    monkeypatch.setattr(visitors, "_send", noted)
    for _ in range(3):
        train.step(batches[0])
    left, came = {}, []
    for place, what in log:
        if isinstance(what, Ticket):
            left[place] = what
            continue
        came.append(place)
        assert left.get(place) is None or left[place] in what
    assert len(left) == NUM_BERTHS < len(came)
    assert came == [came[number % NUM_BERTHS] for number in range(len(came))]


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


@pytest.mark.parametrize("num_pieces", [1, 4, 50])
def test_gradients_of_a_loss_in_pieces_are_rounded_once(num_pieces):
    """Those of 16-bit weights are added up in 32 bits: as near to the exact ones as one piece."""
    torch.manual_seed(0)
    rows, weight = torch.randn(50, 8).bfloat16(), torch.randn(30, 8).bfloat16()
    bias, target = torch.randn(30).bfloat16(), torch.randint(30, (50,))
    target[7] = -100
    own = [t.clone().requires_grad_() for t in (rows, weight, bias)]
    exact = [t.double().requires_grad_() for t in (rows, weight, bias)]
    loss = summed_cross_entropy(
        *own, target, num_pieces=num_pieces, dtype=torch.float32, ignore_index=-100
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


def test_loss_of_convolutions_stays_whole_and_the_section_says_its_budget():
    """There is no last linear layer that logits could be made of in pieces."""
    torch.manual_seed(0)
    net = [torch.nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1) for n in range(4)]
    model = torch.nn.Sequential(*net)
    batch = torch.randn(2, 3, 32, 32), torch.randint(8, (2, 32, 32))

    def forward(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    train = hocket.prepare(model, adamw(model), batch, forward=forward, memory=400_000, on="1xh200")
    assert train.memory.section.loss_chunks == 1
    assert train.memory.section.budget_bytes == (400_000,)
    assert train.memory.peak_bytes <= 400_000
    assert train.step(batch).isfinite()


@pytest.mark.parametrize("name", ["convolutions", "tied"])
def test_prepare_carries_out_what_fit_offers(name):
    torch.manual_seed(0)
    if name == "tied":
        model, batches, forward = MODELS["tied"]()
        batch = settled(batches[0])
    else:
        model = nn.Sequential(*[nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1) for n in range(4)])
        batch = torch.randn(2, 3, 32, 32), torch.randint(8, (2, 32, 32))

        def forward(model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = adamw(model)
    how = {"optimizer": planned_update(optimizer, model), "device": "cpu", "forward": forward}
    frontier = find_frontier(*placed(capture(model, batch, **how)), num_levels=4)
    sections = [plan.memory for plan in frontier.plans if plan.memory is not None]
    # Logits of a language model go in chunks, the scores of pixels do not.
    assert (max(section.loss_chunks for section in sections) > 1) is (name == "tied")
    for section in (sections[-1], max(sections, key=lambda each: each.loss_chunks)):
        ample = frontier.plan.having(replace(section, budget_bytes=(2**30,)))
        saved = SavedPlan(frontier.problem, ample)
        train = hocket.prepare(model, optimizer, batch, plan=saved, forward=forward)
        assert train.step(batch).isfinite()


def test_budget_that_is_large_enough_changes_nothing():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    twin = copy.deepcopy(model)
    train = hocket.prepare(model, adamw(model), batches[0], forward=forward, memory="1GiB")
    torch.manual_seed(1)
    ours = [train.step(batch).item() for batch in batches]
    torch.manual_seed(1)
    assert ours == plain_steps(twin, adamw(twin), batches, forward=forward)


def test_own_loop_and_plain_evaluation_work():
    torch.manual_seed(0)
    model, batches, forward = MODELS["tied"]()
    twin = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(twin)
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
    with pytest.warns(CaptureWarning, match="cannot be rehearsed"):
        train = hocket.prepare(model, adamw(model), batches[0], memory="1MiB")
    ours = [train.step(batch).item() for batch in batches]
    assert ours == plain_steps(twin, adamw(twin), batches)
    loop = loop_of(twin, adamw(twin), mixed(twin, 0), batches[0])
    # A smaller one holds no more than what was rehearsed.
    loop.step(batches[0][:3])
    assert not loop.lost
    with pytest.warns(CaptureWarning, match="other shapes"):
        loop.step(batches[2])
    assert "may hold more than was foreseen" in loop.lost


class Labelled(torch.nn.Linear):
    def forward(self, x, y=None):
        predicted = super().forward(x)
        return {"y": predicted} if y is None else {"loss": (predicted - y).square().mean()}


def test_a_batch_that_differs_is_refused_and_trains_nothing():
    model = Labelled(3, 2)
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    train = hocket.prepare(model, adamw(model), batch, memory="1MiB")
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match="the batch has no 'y'; planned: x"):
        train.step({"x": batch["x"]})
    with pytest.raises(UsageError, match="the batch has 'z', which was not planned"):
        train.step({**batch, "z": batch["x"]})
    assert torch.equal(model.weight, before)
    assert train.predict({"x": batch["x"]})["y"].shape == (4, 2)


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
    ledger = Ledger()
    with ledger:
        train = loop_of(model, optimizer, section, batch, forward)
        ledger.hold(train._carrier.lasting)
        ledger.hold(t for t in batch if isinstance(t, torch.Tensor))
        for _ in range(steps):
            train.step(batch)
    return ledger.peak_bytes


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
    recipe = Recipe(update=planned_update(optimizer, model), device="cpu", forward=forward)
    rehearsed = rehearsed_peak_bytes(model, optimizer, batches[0], recipe, section, CPU)
    assert held(model, optimizer, section, batches[0], forward) == rehearsed


class AtHome(TorchDispatchMode):
    """Notes ops of a training that compute with what is at home: a GPU could not reach it."""

    def __init__(self, blocks):
        super().__init__()
        self.homes = {b.home.untyped_storage()._cdata for b in blocks if b.home is not None}
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
    recipe = Recipe(update=planned_update(optimizer, model), device="cpu", forward=forward)
    graph, _ = recipe.trace(model, batches[0], "train")
    num_forward = int((graph.op_phase == Phase.FORWARD).sum())
    policy = {"activations": "recomputed", "parameters": "streamed", "update": update}
    block = MemoryBlock(name="embed", start=0, stop=num_forward - 8, **policy)
    section = Memory(budget_bytes=(0,), blocks=(block,))
    carrier = Budgeted(model, batches[0], recipe, KeptBudget(section, 0), CPU, graph=graph)
    assert "layers" not in carrier.blocks[0].modules
    assert set(carrier.blocks[0].modules) > {"layers.0", "layers.3"}
    train = TrainingLoop(model, optimizer, carrier, LoopOptions())
    train.step(batches[0])
    train.state_dict()
    with AtHome(carrier.blocks) as home:
        train.step(batches[1])
    assert home.wrong == []


def test_a_training_that_nobody_holds_leaves_no_memory_and_no_thread():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    optimizer = adamw(model)
    policy = {"activations": "kept", "parameters": "streamed", "update": "host"}
    blocks = tuple(MemoryBlock(name=name, **policy) for name in block_names(model))
    section = Memory(budget_bytes=(0,), blocks=blocks)
    train = loop_of(model, optimizer, section, batches[0], forward)
    before = {thread for thread in threading.enumerate() if thread.name == "hocket-updates"}
    train.step(batches[0])
    train.state_dict()
    (worker,) = {t for t in threading.enumerate() if t.name == "hocket-updates"} - before
    held = weakref.ref(model)
    del train, model, optimizer
    gc.collect()
    assert held() is None
    worker.join(60)
    assert not worker.is_alive()


def test_what_all_blocks_share_is_updated_before_them():
    model, _, _ = MODELS["tied"]()
    *blocks, shared = blocks_of(model, mixed(model, 0), None)
    assert shared.parameters
    assert all(shared.index < block.index for block in blocks)


class Coming(Ticket):
    """A copy that comes when it is told to."""

    def __init__(self):
        self.come = threading.Event()

    @property
    def is_done(self):
        return self.come.is_set()

    def synchronize(self):
        assert self.come.wait(60)


def test_host_updates_the_lowest_block_that_has_come_and_waits_for_none_that_has_not():
    policy = MemoryBlock(name="", activations="kept", parameters="streamed", update="host")
    blocks = [Block(policy, index, {}) for index in range(5)]
    updates, done, gate, late = HostUpdates(is_idle=False), [], threading.Event(), Coming()
    updates.ask(blocks[4], gate.wait)
    for index in (3, 2):
        updates.ask(blocks[index], partial(done.append, index))
    updates.ask(blocks[0], partial(done.append, 0), late)
    gate.set()
    for block in blocks[1:]:
        updates.wait(block)
    assert done == [2, 3]
    late.come.set()
    updates.wait(blocks[0])
    assert done == [2, 3, 0]


def test_offloading_does_not_ask_which_number_a_device_has():
    peaks = []
    for device in (CPU, torch.device("cpu", 0)):
        model, batches, forward = MODELS["blocks"]()
        optimizer = adamw(model)
        recipe = Recipe(update=planned_update(optimizer, model), device="cpu", forward=forward)
        section = uniform(model, 0, activations="offloaded")
        peaks.append(rehearsed_peak_bytes(model, optimizer, batches[0], recipe, section, device))
    assert peaks[0] == peaks[1]


def test_run_carries_out_a_plan_of_fit():
    torch.manual_seed(0)
    model, batches, _ = MODELS["tied"]()
    model.eval()  # a run draws its masks from a seed of its own
    graph = capture(model, batches[0], device="cpu")
    plain = hocket.fit(graph, "1xh200", 2**40).chosen
    fitted = hocket.fit(graph, "1xh200", int(plain.peak_bytes * 0.6))
    source = ModelSource(copy.deepcopy(model), batches[0])
    # The simulator may be a little beside what a step really holds.
    budget = int(plain.peak_bytes * 0.7)
    plan, seen = fitted.plan(), []
    plan = plan.having(replace(plan[Memory], budget_bytes=(budget,)))
    result = run_plan(fitted.frontier.problem, plan, RunOptions(steps=3), source=source,
                      on_step=lambda number, record: seen.append(number))  # fmt: skip
    assert seen == [1, 2, 3]
    assert 0 < result.peak_bytes["gpu0"] <= budget
    assert result.backend == "single"
    told = placement_run_data(fitted.frontier.problem, plan, result)["devices"][0]
    assert told["peak_bytes"]["measured"] == result.peak_bytes["gpu0"]
    with pytest.raises(UsageError, match="does not carry out a budget"):
        run_plan(fitted.frontier.problem, plan, RunOptions(backend="gloo"), source=source)
    assert len(result.losses) == 3


def test_prepare_keeps_a_budget_or_refuses():
    build = MODELS["blocks"]
    model, batches, forward = build()
    plain = hocket.prepare(model, adamw(model), batches[0], forward=forward, memory="1GiB").memory
    kept = []
    for share in (0.8, 0.5):
        model, batches, forward = build()
        budget = int(plain.peak_bytes * share)
        optimizer = adamw(model)
        ledger = Ledger()
        with ledger:
            train = hocket.prepare(model, optimizer, batches[0], forward=forward, memory=budget)
            ledger.held_bytes = ledger.peak_bytes = 0
            ledger.hold(train._carrier.lasting)
            ledger.hold(batches[0])
            for _ in range(3):
                train.step(batches[0])
        assert ledger.peak_bytes <= budget
        kept.append(train.memory.peak_bytes)
    assert max(kept) < plain.peak_bytes
    model, batches, forward = build()
    with pytest.raises(NoFeasiblePlanError, match="the leanest plan holds"):
        hocket.prepare(model, adamw(model), batches[0], forward=forward, memory="10KiB")
    with pytest.raises(UsageError, match="has 2 devices; a memory plan is for one"):
        hocket.prepare(
            model, adamw(model), batches[0], forward=forward, memory="1MiB", on="2xv100-16g"
        )
    with pytest.raises(UsageError, match="memory: 'lots' is not a number with a unit"):
        hocket.prepare(model, adamw(model), batches[0], forward=forward, memory="lots")


@pytest.mark.parametrize("memory", [-1, 2**80, 1.5, True, float("nan"), float("inf")])
def test_a_budget_is_a_number_of_bytes(memory):
    with pytest.raises(UsageError, match="is not a number of bytes"):
        budget_of(memory)
    assert budget_of(8e9) == 8 * 10**9


def in_one_tensor(layer, start=None):
    """A layer whose parameters are views of one tensor, the bias from ``start`` on."""
    flat = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
    size = layer.weight.numel()
    start = size if start is None else start
    layer.weight = nn.Parameter(flat[:size].view_as(layer.weight))
    layer.bias = nn.Parameter(flat[start : start + layer.bias.numel()])


def deep():
    torch.manual_seed(4)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)])


def test_parameters_that_lie_in_one_tensor_keep_a_budget():
    how = {"forward": lambda model, rows: model(rows).square().mean()}
    model, twin, rows = deep(), deep(), torch.randn(8, 32)
    for number in (1, 2):
        in_one_tensor(model[number][0])
    train = hocket.prepare(model, adamw(model), rows, memory=38_000, **how)
    ours = [train.step(rows).item() for _ in range(3)]
    assert ours == plain_steps(twin, adamw(twin), [rows] * 3, **how)
    assert train.memory.section.blocks[0].update == "host"
    train.state_dict()
    assert_same_state(model, twin)


def test_parameters_that_travel_rounded_are_those_that_the_host_has_changed():
    def forward(model, rows):
        with torch.autocast("cpu", torch.bfloat16):
            return model(rows).float().square().mean()

    model, twin, rows = deep(), deep(), torch.randn(8, 32)
    section = uniform(model, 0, parameters="streamed", update="host")
    optimizer = adamw(model)
    rounded = {name: torch.bfloat16 for name, _ in model.named_parameters()}
    train = loop_of(model, optimizer, section, rows, forward, rounded=rounded)
    ours = [train.step(rows).item() for _ in range(4)]
    assert ours == plain_steps(twin, adamw(twin), [rows] * 4, forward=forward)


def test_parameters_in_the_same_bytes_are_refused():
    model, rows = deep(), torch.randn(8, 32)
    in_one_tensor(model[1][0], start=1000)
    with pytest.raises(UsageError, match=r"1\.0\.weight and 1\.0\.bias are two parameters in"):
        hocket.prepare(
            model, adamw(model), rows, memory="1MiB", forward=lambda model, x: model(x).mean()
        )


def test_a_model_is_carried_by_the_last_that_prepared_it():
    model, batches, forward = MODELS["blocks"]()
    twin, optimizer = copy.deepcopy(model), adamw(model)
    lean = partial(hocket.prepare, model, optimizer, batches[0], forward=forward, memory=70_000)
    first = lean()
    torch.manual_seed(5)
    ours = [first.step(batches[0]).item(), (train := lean()).step(batches[1]).item()]
    with pytest.raises(InputFileError):
        lean(plan="no-such-plan.json")  # a call that is refused ends nothing
    ours += [train.step(batches[0]).item()]
    plain = [batches[0], batches[1], batches[0]]
    torch.manual_seed(5)
    assert ours == plain_steps(twin, adamw(twin), plain, forward=forward)
    train.state_dict()
    assert_same_state(model, twin)
    with pytest.raises(UsageError, match=r"a later hocket\.prepare carries this model"):
        first.step(batches[0])
