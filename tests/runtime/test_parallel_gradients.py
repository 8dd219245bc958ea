"""Every parallel configuration and every schedule trains as one device does; others are refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from forked_worker_group import forked_worker_groups
from runtime.parallel_plans import GPT, LLAMA, circular_plan, divided, plan_of

from hocket.base.errors import CheckError, UsageError
from hocket.export.torch import data_kind
from hocket.planners.parallel.schedules import make_schedule
from hocket.runtime import numerics_check as check_module
from hocket.runtime.numerics_check import (
    TOLERANCE,
    Agreement,
    Reference,
    _agreement,
    check_parallel,
    differences,
    small_of,
    small_plan,
)
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunOptions
from hocket.runtime.transformer_refusals import refuse
from hocket.transformer import SCHEDULES

RIGHT = {
    **{name: divided(GPT if name < "i" else LLAMA, name, 4) for name in SCHEDULES},
    "uneven layers, tied, full recompute": divided(
        GPT, "1f1b", 4, layers=(1, 2, 3, 1), recompute="full"
    ),
    "tensor 2": divided(replace(GPT, vocabulary=33), "1f1b", 2, tensor=2),
    "tensor 2, sequence parallel, zb-v": divided(
        LLAMA, "zb-v", 2, tensor=2, sequence_parallel=True, recompute="selective"
    ),
    "ddp": divided(GPT, "interleaved", 2, data=2),
    "zero 3": divided(GPT, "1f1b", 1, data=2, zero=3, recompute="full"),
    "zero 1, dualpipe-v": divided(GPT, "dualpipe-v", 2, data=2, zero=1, recompute="full"),
    "zero 0, zb-v": divided(GPT, "zb-v", 2, data=2),
    "tensor 2, zero 1, sequence parallel": divided(
        GPT, "1f1b", 1, microbatches=2, tensor=2, data=2, zero=1, sequence_parallel=True
    ),
    "small size of a larger plan": small_of(
        *divided(LLAMA, "zb-v", 4, microbatches=8, tensor=2, layers=(1, 2, 1, 1, 1, 1, 1, 1))
    ),
    "tensor 2, zero 0": divided(LLAMA, "1f1b", 1, microbatches=2, tensor=2, data=2),
}
QUICK = ("zb-v", "interleaved", "tensor 2, zero 1, sequence parallel", "zero 3")
"""The others have the same parts, and take processes of their own each."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RIGHT]
)
def test_loss_and_gradients_are_those_of_one_device(name):
    plan = plan_of(*RIGHT[name])
    refuse(plan.model, plan.config)
    with forked_worker_groups():
        found = differences(small_plan(plan))
    assert found.loss_error <= TOLERANCE
    assert found.gradient_error <= TOLERANCE, found.worst


def test_split_backward_never_meets_ddp_or_resharding():
    _, config, schedule = divided(GPT, "zb-v", 2, data=2)
    assert schedule.splits_backward
    assert data_kind(config, splits_backward=True) == "reduce-after"
    sharded = replace(config, zero=2)
    assert data_kind(sharded, splits_backward=True) == "fsdp"


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (GPT, {"context": 2}, "context parallelism"),
        (GPT, {"expert": 2}, "experts"),
        (LLAMA, {"tensor": 4}, "heads"),
        (replace(LLAMA, mlp_width=27), {"tensor": 2}, "width of the MLP"),
        (replace(GPT, sequence=7), {"tensor": 2, "sequence_parallel": True}, "sequence"),
        (replace(LLAMA, head_width=3), {}, "rotary"),
        (GPT, {"layers": (2, 0, 2)}, "has no layers"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_a_way_out(model, fields, message):
    _, config, schedule = divided(model, "1f1b", 2)
    with pytest.raises(UsageError, match=message) as caught:
        check_parallel(plan_of(model, replace(config, **fields), schedule, on="32xv100-16g"))
    assert caught.value.hint


def test_a_pipeline_of_shards_is_refused_before_anything_starts():
    plan = plan_of(*divided(GPT, "1f1b", 2, data=2, zero=3))
    for act in (
        lambda: check_parallel(plan),
        lambda: run_plan(plan.problem, plan.plan, RunOptions()),
    ):
        with pytest.raises(UsageError, match="ZeRO 3") as caught:
            act()
        assert "zero=1" in caught.value.hint


def test_small_size_keeps_the_structure_on_few_ranks():
    model = replace(LLAMA, hidden=4096, layers=96, heads=32, kv_heads=8, head_width=128)
    _, config, schedule = divided(
        model, "interleaved", 16, microbatches=32, tensor=8, data=4, zero=1, microbatch=2,
        layers=(3,) * 31 + (2,),
    )  # fmt: skip
    small_model, small, small_schedule = small_of(model, config, schedule)
    assert (small.tensor, small.pipeline, small.data, small.chunks) == (2, 2, 2, 2)
    assert small.num_microbatches == small_schedule.num_microbatches
    assert (small.zero, small.recompute, small.schedule) == (1, "none", "interleaved")
    assert small.layers == (1, 2, 1, 2)
    assert small_model.layers == 6
    assert small_model.kv_heads < small_model.heads
    for name in ("zb-h2", "zb-v"):
        _, config, schedule = divided(GPT, name, 4)
        _, small, small_schedule = small_of(GPT, config, schedule)
        assert small_schedule is schedule
        assert small.pipeline == 4


@pytest.mark.parametrize(("kind", "made"), [("interleaved", "zb-h1"), ("zb-h1", "interleaved")])
def test_small_size_splits_backwards_as_the_plan_does(kind, made):
    """Another program would agree over replicas, and the planned one would not be checked."""
    _, config, _ = divided(GPT, kind, 4, microbatches=8, data=2)
    config = replace(config, chunks=2)
    schedule = make_schedule(made, 4, 8, 2)
    _, small, small_schedule = small_of(GPT, config, schedule)
    assert small.pipeline == 2
    assert small_schedule.splits_backward == schedule.splits_backward


def test_what_is_not_a_number_is_never_right():
    """Comparisons with NaN are all false, so that the largest difference may leave it out."""
    expected = Reference((1.0, 1.0), {"weight": np.zeros(2)}, {"weight": np.ones(2)})
    for losses, value in (((1.0, math.nan), 1.0), ((1.0, 1.0), math.nan)):
        found = _agreement(expected, losses, {"weight": np.full(2, value)})
        assert not found.is_right
    assert not _agreement(expected, (1.0, 1.0), {}).is_right
    assert _agreement(expected, (1.0, 1.0), {"weight": np.ones(2)}).is_right


def test_a_schedule_that_waits_for_itself_is_refused_before_anything_starts():
    plan = circular_plan()
    with pytest.raises(CheckError, match="can never start"):
        check_parallel(plan)
    with pytest.raises(CheckError, match="can never start"):
        run_plan(plan.problem, plan.plan, RunOptions(checks=False))


def test_a_wrong_config_is_told(monkeypatch):
    wrong = Agreement(loss_error=0.0, gradient_error=0.25, worst="layers.3.mlp.up.weight")
    monkeypatch.setattr(check_module, "differences", lambda saved: wrong)
    with pytest.raises(CheckError, match=r"'layers\.3\.mlp\.up\.weight' by 2\.5e-01"):
        check_parallel(plan_of(*divided(GPT, "1f1b", 2)))
