"""One process per device: the same numbers, measured; and how it ends when a rank fails."""

import json
import os
import re
import signal
import tempfile
import threading
import time
import weakref
from multiprocessing import forkserver

import numpy as np
import psutil
import pytest
import torch
from forked_worker_group import forked_worker_groups
from runtime.models import shared_storages
from runtime.plain_reference import reference_steps
from runtime.small_zoo import SMALL_ZOO
from runtime.test_single import NUM_DEVICES, assert_same, place
from torch import nn

from hocket.base.errors import RunError
from hocket.capture import named_tensors
from hocket.capture.program import Call
from hocket.capture.recording import Constant, Cost, Ref, same_leaves
from hocket.graph import Phase
from hocket.processes.heartbeat import Position
from hocket.processes.worker import Worker
from hocket.runtime.connect import MeetingStore
from hocket.runtime.ranks import Outbox
from hocket.runtime.record import measured_timeline
from hocket.runtime.spawn import RankOptions, _describer, run_ranks
from hocket.runtime.wire import decode_call, decode_spec, encode_call, encode_spec

NAMES = ("gpu0", "gpu1", "gpu2")
FOREVER = 10**6
SILENT = r"rank 1 \(gpu1\) has stopped answering for ([{}]|\d\d) s while "
"""The time that is allowed, and what a busy machine takes to look."""


@pytest.fixture(scope="module")
def warm():
    """What packages open once, when they are first used, is open."""
    place(*SMALL_ZOO["gpt2"](), seed=0)
    MeetingStore().close()
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def nothing_left(warm, tmp_path, monkeypatch):
    """No process, file, descriptor or listening port may outlive a run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    me = psutil.Process()
    before, children = me.num_fds(), me.children(recursive=True)
    yield
    assert [child for child in me.children(recursive=True) if child not in children] == []
    # PyTorch makes a folder for its compiler when that is imported.
    assert [p for p in tmp_path.iterdir() if not p.name.startswith("torchinductor")] == []
    assert me.num_fds() <= before
    assert [c for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN] == []


@forked_worker_groups()
def test_ranks_share_storages_as_the_model_does():
    torch.manual_seed(1)
    model, batch = shared_storages()["overlapping buffers"]
    setup = place(model, batch, seed=2, num_devices=2)
    records = []
    options = RankOptions(steps=2, seed=5, wants_results=True)
    results = run_ranks(setup, named_tensors(model, batch), NAMES, options,
                        on_step=lambda number, record: records.append(record))  # fmt: skip
    reference = reference_steps(model, batch, steps=2, seed=5)
    assert_same(setup, results, [record.loss for record in records], reference)


@forked_worker_groups()
def test_ranks_compute_what_the_unsplit_model_computes():
    torch.manual_seed(1)
    model, batch = SMALL_ZOO["gpt2"]()
    model.train()
    setup = place(model, batch, seed=2)
    records = []
    options = RankOptions(steps=3, seed=5, wants_results=True, slowdown={1: 3.0})
    results = run_ranks(setup, named_tensors(model, batch), NAMES, options,
                        on_step=lambda number, record: records.append(record))  # fmt: skip
    reference = reference_steps(model, batch, steps=3, seed=5)
    assert_same(setup, results, [record.loss for record in records], reference)
    device_of = np.array(setup.device_of, dtype=np.int32)
    timeline = measured_timeline(records[-1], device_of, setup.split.transfers, NUM_DEVICES)
    reads_s = {}
    for op in range(setup.graph.num_ops):
        for tensor in setup.graph.reads_of(op).tolist():
            key = tensor, setup.device_of[op]
            reads_s[key] = min(reads_s.get(key, np.inf), timeline.op_start_s[op])
    for index in range(len(timeline.transfer_tensor)):
        key = int(timeline.transfer_tensor[index]), int(timeline.transfer_dst[index])
        assert timeline.transfer_end_s[index] <= reads_s[key]
        assert timeline.transfer_ready_s[index] <= timeline.transfer_start_s[index]
    assert np.all(timeline.peak_bytes > 0)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, ids):
        return self.layers(self.table(ids)).square().mean()


def run_and_hurt(signal_number, rank, step, **options):
    """Run without end and send a signal to a rank after a step; the error and when it came."""
    model, batch = Lookup(), torch.tensor([0, 1, 2])
    setup = place(model, batch, seed=1, num_devices=2)
    pids, sent_s = [], []

    def begin(process_ids):
        pids.extend(process_ids)
        hurt(0, None)

    def hurt(number, record):
        if number == step:
            time.sleep(0.5)  # Steps pile up meanwhile, and their number has a limit.
            os.kill(pids[rank], signal_number)
            sent_s.append(time.monotonic())

    with pytest.raises(RunError) as caught:
        run_ranks(
            setup,
            named_tensors(model, batch),
            NAMES,
            RankOptions(steps=FOREVER, **options),
            on_start=begin,
            on_step=hurt,
        )
    took_s = time.monotonic() - sent_s[0]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    return caught.value, took_s


def test_a_rank_that_is_stopped_before_its_first_step_is_named_and_all_is_gone():
    error, took_s = run_and_hurt(signal.SIGSTOP, 1, step=0)
    assert re.fullmatch(SILENT.format("2-9") + "starting", error.message), error.message
    assert took_s < 60


@forked_worker_groups()
def test_a_rank_that_gives_no_sign_of_life_is_named_and_all_is_gone(monkeypatch):
    monkeypatch.setattr(Worker, "is_stopped", False)
    error, took_s = run_and_hurt(signal.SIGSTOP, 1, step=2, silence_s=3.0)
    assert re.match(SILENT.format("3-9"), error.message), error.message
    assert took_s < 60


@forked_worker_groups()
def test_the_error_of_an_op_is_told_with_its_rank_and_op():
    model, batch = Lookup(), torch.tensor([0, 1, 99])
    setup = place(model, batch, seed=1, num_devices=2)
    with pytest.raises(RunError, match="index out of range in self") as caught:
        run_ranks(setup, named_tensors(model, batch), NAMES, RankOptions(steps=3))
    device = setup.device_of[next(op for op, name in enumerate(setup.graph.op_names)
                                  if name == "table/embedding")]  # fmt: skip
    rank = setup.split.used_devices.index(device)
    expected = f"rank {rank} ({NAMES[device]}) failed while running op 'table/embedding' in step 1"
    assert caught.value.message.startswith(expected)


class Send:
    """A send that is over when it is told, as gloo's are when they are waited for."""

    def __init__(self, error=None):
        self.over, self.error = threading.Event(), error

    def wait(self):
        self.over.wait()
        if self.error is not None:
            raise self.error


def test_what_is_sent_is_held_until_it_has_left_and_no_longer():
    outbox, sends = Outbox(), [Send(), Send()]
    left = []
    for send in sends:
        data = torch.zeros(4)
        left.append(threading.Event())
        weakref.finalize(data, left[-1].set)
        outbox.put(send, data)
        del data
    assert not left[0].wait(0.05)
    sends[0].over.set()
    assert left[0].wait(60)
    assert not left[1].is_set()
    sends[1].over.set()
    outbox.flush()
    assert left[1].wait(60)
    failed = Send(RuntimeError("closed"))
    failed.over.set()
    outbox.put(failed, torch.zeros(1))
    with pytest.raises(RuntimeError, match="closed"):
        outbox.flush()


def test_position_is_told_in_words():
    model, batch = SMALL_ZOO["mlp"]()
    setup = place(model, batch, seed=2)
    texts = set()
    for device in range(NUM_DEVICES):
        instructions = setup.split.of_device(device)
        describe = _describer(setup, instructions, NAMES)
        texts |= {describe(Position(1.0, 3, i)).split(" ")[0] for i in range(len(instructions))}
        assert describe(Position(0.0, 0, 0)) == "starting"
    assert texts == {"running", "sending", "waiting", "freeing"}


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["gpt2", "t5-base", "lstm"])
def test_calls_and_tensors_survive_as_json(name):
    model, batch = SMALL_ZOO[name]()
    setup = place(model, batch, seed=0)
    for call in setup.program.calls:
        constants = []
        data = json.loads(json.dumps(encode_call(call, constants)))
        back = decode_call(data, constants)
        assert back.function == call.function
        assert (back.outputs, back.targets, back.written) == (
            call.outputs, call.targets, call.written)  # fmt: skip
        assert same_leaves(list(back.args), list(call.args), int.__eq__)
        assert back.kwargs.keys() == call.kwargs.keys()
    for spec in setup.program.tensors:
        assert decode_spec(json.loads(json.dumps(encode_spec(spec)))) == spec


def test_constants_travel_by_value_and_strange_arguments_are_refused():
    kept = torch.arange(3)
    args = (Ref(4), Constant(kept), [1, 2.5, None, True], torch.float16, 1 + 2j,
            torch.device("cpu"), torch.channels_last, torch.strided)  # fmt: skip
    call = Call(torch.ops.aten.mm.default, args, {"x": float("inf")}, (5, None), (), (), (),
                Phase.FORWARD, "", -1, False, False, Cost("aten.mm", "", 0, 0.0, 0))  # fmt: skip
    constants = []
    back = decode_call(encode_call(call, constants), constants)
    assert back.args[0] == Ref(4)
    assert torch.equal(back.args[1].tensor, kept)
    assert back.args[2:] == list(args[2:])
    assert back.kwargs == {"x": float("inf")}
    assert back.cost.kind == "aten.mm"
    with pytest.raises(RunError, match="argument of type 'object'"):
        encode_call(call._replace(args=(object(),)), [])
    with pytest.raises(RunError, match=r"does not know the op 'aten\.nonsense\.default'"):
        decode_call(encode_call(call, []) | {"function": "aten.nonsense.default"}, [kept])
