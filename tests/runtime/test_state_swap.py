"""Optimizer state that is swapped in for an update on the device."""

import copy

import pytest
import torch
from runtime.budget_loops import CPU, loop_of
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, assert_same_state, plain_steps

from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload import state_swap
from hocket.runtime.offload.copy_streams import CopyEvent, CopyStreams
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.offload.state_swap import NUM_BUFFERS


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
    monkeypatch.setattr(state_swap, "CHUNK_BYTES", 1 << 11)
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
    chunks = [chunk for each in train._strategy._state_swap._chunks.values() for chunk in each]
    assert any(part.slice.elements is not None for chunk in chunks for part in chunk.parts)
    train.state_dict()
    assert_same_state(model, twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in plain.state[q].items():
            assert torch.equal(optimizer.state[p][key], value)


def visiting():
    """A loop whose state all hooks, and its batch."""
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    section = uniform(model, 0, parameters="streamed", update="device")
    return loop_of(model, adamw(model), section, batches[0], forward), batches[0]


class Noting(CopyStreams):
    """Tells each mark from the others, and what copies to the device waited for."""

    def __init__(self):
        super().__init__(CPU, is_real=False)
        self.waited = []

    def record_event(self):
        return CopyEvent(None)

    def fetch(self, pairs, *after):
        self.waited.append(after)
        return super().fetch(pairs, *after)


def test_state_is_fetched_only_after_the_last_update_has_come_home():
    train, batch = visiting()
    train.step(batch)
    streams = train._strategy._state_swap._streams = Noting()
    train.step(batch)
    written_back = {block.written_back for block in train._strategy.blocks}
    streams.waited.clear()
    train.step(batch)
    assert streams.waited
    assert all(written_back.intersection(after) for after in streams.waited)


def test_a_new_berth_is_written_after_what_the_computation_was_told_before_it():
    # Its memory is what the computation gave back and may still be at work in.
    train, batch = visiting()
    train.step(batch)
    swap, marks = train._strategy._state_swap, []

    class Marking(Noting):
        def record_event(self):
            marks.append(CopyEvent(None))
            return marks[-1]

    streams = swap._streams = Marking()
    swap._staging = []
    train.step(batch)
    assert all(set(marks).intersection(after) for after in streams.waited)
    assert len(streams.waited) >= NUM_BUFFERS


def test_pieces_of_state_take_turns_in_berths_that_the_one_before_has_left(monkeypatch):
    train, batch = visiting()
    for _ in range(2):
        train.step(batch)
    swap, log = train._strategy._state_swap, []

    class Logging(Noting):
        def fetch(self, pairs, *after):
            log.append((pairs[0][0].untyped_storage().data_ptr(), after))
            return super().fetch(pairs, *after)

    swap._streams = Logging()
    write_back = swap._write_back

    def noted(chunk, staging):
        write_back(chunk, staging)
        log.append((staging.buffer.data_ptr(), staging.last_use))

    monkeypatch.setattr(swap, "_write_back", noted)
    for _ in range(3):
        train.step(batch)
    left, came = {}, []
    for place, what in log:
        if isinstance(what, CopyEvent):
            left[place] = what
            continue
        came.append(place)
        assert left.get(place) is None or left[place] in what
    assert len(left) == NUM_BUFFERS < len(came)
    assert came == [came[number % NUM_BUFFERS] for number in range(len(came))]


def test_what_the_host_has_changed_comes_a_block_ahead_and_after_the_last_use():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    section = uniform(model, 0, update="host")
    train = loop_of(model, adamw(model), section, batches[0], forward)
    hooks, log = train._strategy._hooks, []

    class Logging(Noting):
        def fetch(self, pairs, *after):
            log.append(("fetched", by_place[pairs[0][0].data_ptr()], after))
            return super().fetch(pairs, *after)

    fetch_parameters = hooks._fetch_parameters

    def brought(block):
        log.append(("brought", block, ()))
        fetch_parameters(block)

    # What no block has alone comes when the step begins.
    own = [block for block in train._strategy.blocks[:-1] if block.resident is not None]
    assert len(own) > 2
    by_place = {block.resident.data_ptr(): block for block in own}
    hooks.streams, hooks._fetch_parameters = Logging(), brought
    for _ in range(2):
        train.step(batches[0])
    last_used = {block: block.last_use for block in own}
    log.clear()
    train.step(batches[0])
    events = [(what, block) for what, block, _ in log]
    for number, block in enumerate(own):
        fetched, used = events.index(("fetched", block)), events.index(("brought", block))
        assert log[fetched][2] == (last_used[block],)
        # The first has nobody before it.
        assert fetched < used or number == 0
