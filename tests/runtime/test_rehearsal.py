"""What a rehearsal finds on a GPU beside the training, by what its allocator tells."""

from functools import partial

import pytest
import torch
from runtime.budget_models import MODELS
from runtime.train_loops import adamw

import hocket
from hocket.api import find_cluster
from hocket.base.errors import NoFeasiblePlanError
from hocket.runtime.train.rehearsal import _others_bytes

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
