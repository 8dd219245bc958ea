"""Dry runs on a GPU count memory outside of the training, as its allocator reports it."""

import copy
import gc
import threading
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from patience import PATIENCE_S
from runtime.budget_loops import loop_of, task_of
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, plain_steps

import hocket
from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.make import find_cluster
from hocket.planners.memory.given_budget import BudgetWarning
from hocket.runtime.offload.dry_run import _overhead_bytes, _small_bytes
from hocket.runtime.offload.model_blocks import uniform

GPU = torch.device("cuda:0")
WORKSPACE, LT_WORKSPACE = 32 * 2**20, 2**20


def _empty_task():
    """A training on a GPU that holds nothing itself."""
    model = torch.nn.Sequential()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    return task_of(model, optimizer, (), None, GPU)


@pytest.mark.parametrize("made", [(), (WORKSPACE,), 2 * (WORKSPACE, LT_WORKSPACE)])
def test_what_others_hold_is_counted_before_and_after_workspaces_are_made(monkeypatch, made):
    others = 301_568
    blocks = [
        {"state": "active_allocated", "size": size, "requested_size": size}
        for size in (others, *made)
    ]
    gap = {"state": "inactive", "size": WORKSPACE, "requested_size": WORKSPACE}
    segments = [
        {"device": 0, "blocks": [gap, *blocks]},
        {"device": 1, "blocks": blocks},
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: others + sum(made))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    step = 2 * (WORKSPACE + LT_WORKSPACE)
    assert _overhead_bytes(_empty_task(), has_products=True) == step + others
    # A step that multiplies nothing makes none; those of others stay.
    assert _overhead_bytes(_empty_task(), has_products=False) == others + sum(made)


@pytest.fixture
def allocator(monkeypatch):
    """A GPU's allocator that has given each of these tensors its bytes."""
    given: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: sum(t.nbytes for t in given))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    # Nothing but a rehearsal looks for what nobody has.
    gc.disable()
    yield given
    gc.enable()


def streamed_training(optimizer_of):
    """A training whose updates are the host's, and the buffers of its device."""
    model, batches, forward = MODELS["blocks"]()
    optimizer, batch = optimizer_of(model), batches[0]
    section = uniform(model, 0, parameters="streamed", update="host")
    # A finished step would have no updates under way.
    section = replace(section, async_update=True)
    train = loop_of(model, optimizer, section, batch, forward)
    train.step(batch)
    return train, train._strategy.lasting


def test_a_training_that_nobody_has_any_more_is_no_other(allocator):
    kept, lasting = streamed_training(adamw)
    allocator.update(lasting)
    dropped, lasting = streamed_training(adamw)
    allocator.update(lasting)
    dropped.state_dict()
    del dropped, lasting
    assert (
        _overhead_bytes(_empty_task(), has_products=False)
        == sum(t.nbytes for t in kept._strategy.lasting)
        > 0
    )


def test_one_whose_updates_are_under_way_is_none_either(allocator):
    begun, gate = threading.Event(), threading.Event()

    class Late(torch.optim.SGD):
        def step(self, closure=None):
            begun.set()
            gate.wait(PATIENCE_S)
            return super().step(closure)

    Late.step.__module__ = "torch.optim.sgd"  # others' optimizers update in `step`, as a whole
    train, lasting = streamed_training(lambda model: Late(model.parameters(), 0.1))
    allocator.update(lasting)
    del train, lasting
    assert begun.wait(PATIENCE_S)
    gc.collect()
    assert allocator, "the update under way holds its training"
    threading.Timer(0.05, gate.set).start()
    assert _overhead_bytes(_empty_task(), has_products=False) == 0


def test_a_step_that_no_device_has_room_for_is_planned_within_a_budget():
    model, batches, forward = MODELS["blocks"]()
    whole = find_cluster("1xv100-16g")
    prepare = partial(hocket.prepare, batch=batches[0], forward=forward)
    plain = prepare(model, adamw(model), on=whole, memory="1GiB").memory.peak_bytes
    small = whole.with_headroom(int(whole.devices[0].memory_bytes) - plain // 2)
    with pytest.raises(NoFeasiblePlanError, match="no candidate fits"):
        prepare(model, adamw(model), on=small)
    with pytest.warns(BudgetWarning, match="usable beside the headroom"):
        kept = prepare(model, adamw(model), on=small, memory=int(0.8 * plain)).memory
    assert plain // 2 < kept.peak_bytes <= 0.8 * plain


def test_every_parameter_and_buffer_of_a_gpu_has_a_small_tensor_beside_it():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
    assert _small_bytes(GPU, net) == (2 + 2 + 3) * 512
    assert _small_bytes(torch.device("cpu"), net) == 0


@pytest.mark.parametrize("update", ["host", "device"])
def test_a_training_that_left_its_model_gives_its_room_back_until_it_returns(update):
    """So a model that is prepared again finds the room that its first training had."""
    model, batches, forward = MODELS["blocks"]()
    twin = copy.deepcopy(model)
    section = uniform(model, 0, parameters="streamed", update=update)
    train = loop_of(model, adamw(model), section, batches[0], forward)
    torch.manual_seed(5)
    ours = [train.step(batch).item() for batch in batches]
    strategy = train._strategy
    rooms = [*strategy._buffers, *strategy._state_swap.buffers]
    sizes = [room.untyped_storage().nbytes() for room in rooms]
    assert sum(sizes) > 0
    strategy.leave()
    assert not any(room.untyped_storage().nbytes() for room in rooms)
    strategy.come_back()
    assert [room.untyped_storage().nbytes() for room in rooms] == sizes
    ours += [train.step(batch).item() for batch in batches]
    torch.manual_seed(5)
    assert ours == plain_steps(twin, adamw(twin), [*batches, *batches], forward=forward)
