"""What a rehearsal finds on a GPU beside the training, by what its allocator tells."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from runtime.budget_models import MODELS
from runtime.train_loops import adamw

import hocket
from hocket.api import find_cluster
from hocket.base.errors import NoFeasiblePlanError
from hocket.runtime.train.rehearsal import _counters_bytes, _others_bytes

GPU = torch.device("cuda:0")
WORKSPACE, LT_WORKSPACE = 32 * 2**20, 2**20


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
    assert _others_bytes(GPU, []) == others


def test_a_step_that_no_device_has_room_for_is_planned_within_a_budget():
    model, batches, forward = MODELS["blocks"]()
    whole = find_cluster("1xv100-16g")
    prepare = partial(hocket.prepare, batch=batches[0], forward=forward)
    plain = prepare(model, adamw(model), on=whole, memory="1GiB").memory.peak_bytes
    small = whole.with_headroom(int(whole.devices[0].memory_bytes) - plain // 2)
    with pytest.raises(NoFeasiblePlanError, match="no candidate fits"):
        prepare(model, adamw(model), on=small)
    kept = prepare(model, adamw(model), on=small, memory=int(0.8 * plain)).memory
    assert plain // 2 < kept.peak_bytes <= 0.8 * plain


def test_parameters_that_are_updated_on_a_gpu_have_a_counter_there():
    at_home, visiting, streamed = (
        SimpleNamespace(parameters=[0] * count, home=home, is_updated_here=is_here)
        for count, home, is_here in ((2, None, True), (3, "host", True), (4, "host", False))
    )
    carrier = SimpleNamespace(blocks=[at_home, visiting, streamed])
    assert _counters_bytes(GPU, carrier) == (2 + 3) * 512
