"""Updates on the host: in which order they are done, and how their threads end."""

import gc
import os
import signal
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE_S
from runtime.budget_loops import loop_of, mixed
from runtime.budget_models import MODELS
from runtime.train_loops import adamw

from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload import host_optimizer as host
from hocket.runtime.offload.copy_streams import CopyEvent
from hocket.runtime.offload.host_optimizer import HostOptimizerThread, end_all
from hocket.runtime.offload.model_blocks import block_names, model_blocks
from hocket.runtime.offload.parameter_blocks import Block


def test_what_is_under_way_is_ended_before_python_ends(monkeypatch):
    # Threads of other tests go on.
    monkeypatch.setattr(host, "_running", weakref.WeakKeyDictionary())
    updates, done = HostOptimizerThread(is_dry_run=False), []
    begun, gate = threading.Event(), threading.Event()
    block = SimpleNamespace(update_done=threading.Event(), index=0)
    block.update_done.set()

    def job():
        begun.set()
        gate.wait(PATIENCE_S)
        done.append(block)

    updates.submit(block, job)
    assert begun.wait(PATIENCE_S)
    ending = threading.Thread(target=end_all)
    ending.start()
    assert ending.is_alive(), "the end waits for the job"
    gate.set()
    ending.join(PATIENCE_S)
    assert done == [block]
    assert not updates._thread.is_alive()


def test_a_failure_is_told_where_its_own_block_is_waited_for():
    """Else it is a matter of chance whether the step that asked for it goes on."""
    updates = HostOptimizerThread(is_dry_run=False)
    failing, other = (SimpleNamespace(update_done=threading.Event(), index=at) for at in range(2))
    for block in (failing, other):
        block.update_done.set()

    def job():
        raise OSError("the disk is full")

    updates.submit(failing, job)
    assert failing.update_done.wait(PATIENCE_S)
    updates.submit(other, lambda: None)
    updates.wait(other)
    with pytest.raises(OSError, match="is full"):
        updates.wait(failing)
    updates.wait(failing)


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
    *blocks, shared = model_blocks(model, mixed(model, 0), None)
    assert shared.parameters
    assert all(shared.index < block.index for block in blocks)


class Coming(CopyEvent):
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
    updates, done, gate, late = (
        HostOptimizerThread(is_dry_run=False),
        [],
        threading.Event(),
        Coming(),
    )
    updates.submit(blocks[4], gate.wait)
    for index in (3, 2):
        updates.submit(blocks[index], partial(done.append, index))
    updates.submit(blocks[0], partial(done.append, 0), late)
    gate.set()
    for block in blocks[1:]:
        updates.wait(block)
    assert done == [2, 3]
    late.come.set()
    updates.wait(blocks[0])
    assert done == [2, 3, 0]


def test_host_updates_a_large_block_in_parts_between_which_lower_ones_go_first():
    policy = MemoryBlock(name="", activations="kept", parameters="streamed", update="host")
    blocks = [Block(policy, index, {}) for index in range(3)]
    updates, done, begun, gate = (
        HostOptimizerThread(is_dry_run=False),
        [],
        threading.Event(),
        Coming(),
    )

    def parts(index):
        for part in range(3):
            if part:
                yield
            done.append((index, part))
            if (index, part) == (2, 0):
                begun.set()
                gate.synchronize()

    def fails():
        yield
        raise ValueError("of the second part")

    updates.submit(blocks[2], partial(parts, 2))
    assert begun.wait(60)
    updates.submit(blocks[0], partial(parts, 0))
    gate.come.set()
    for block in blocks:
        updates.wait(block)
    assert done == [(2, 0), (0, 0), (0, 1), (0, 2), (2, 1), (2, 2)]
    updates.submit(blocks[1], fails)
    with pytest.raises(ValueError, match="second part"):
        updates.wait(blocks[1])


def test_where_no_thread_can_be_started_nobody_waits_for_one(monkeypatch):
    policy = MemoryBlock(name="", activations="kept", parameters="streamed", update="host")
    block, updates, done = Block(policy, 0, {}), HostOptimizerThread(is_dry_run=False), []

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            updates.submit(block, partial(done.append, 1))
    assert block.update_done.is_set()
    updates.submit(block, partial(done.append, 2))
    updates.wait(block)
    assert done == [2]


def told_in_a_fork(what):
    """What a function gives in a forked process, which is not waited for longer than one would."""
    read, write = os.pipe()
    if not (child := os.fork()):
        signal.alarm(int(PATIENCE_S))
        try:
            told = what()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_forked_process_updates_by_a_thread_of_its_own_and_waits_for_none_that_is_gone():
    policy = MemoryBlock(name="layers.1", parameters="streamed", update="host")
    block, updates, gate = (
        Block(policy, 0, {}),
        HostOptimizerThread(is_dry_run=False),
        threading.Event(),
    )
    updates.submit(block, lambda: None)
    updates.wait(block)

    def update():
        done = []
        updates.submit(block, partial(done.append, "updated"))
        updates.wait(block)
        return done[0]

    assert told_in_a_fork(update) == "updated"
    updates.submit(block, gate.wait)
    told = told_in_a_fork(partial(updates.wait, block))
    gate.set()
    updates.wait(block)
    assert told.startswith("RunError: an update of 'layers.1' was under way on the host when")
