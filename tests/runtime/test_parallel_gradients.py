"""Every kind of parallelism and every schedule trains as one device does; others are refused.

All cases run in one set of four processes, whose start takes longest.
"""

import math
from dataclasses import replace

import pytest
import torch
from forked_worker_group import forked_worker_groups
from runtime.parallel_plans import GPT, LLAMA, circular_plan, divided, plan_of

from hocket.base.errors import CheckError, UsageError
from hocket.planners.parallel.schedules import make_schedule
from hocket.runtime.options import RunOptions
from hocket.runtime.parallel import check as check_module
from hocket.runtime.parallel.check import (
    TOLERANCE,
    Agreement,
    DividedReference,
    _agreement,
    check_division,
    check_jobs,
    toy_of,
)
from hocket.runtime.parallel.jobs import make_job
from hocket.runtime.parallel.refusals import DataProgram, data_program, refuse
from hocket.runtime.parallel.spawn import JobResult
from hocket.runtime.record import StepRecord
from hocket.runtime.session import run_plan
from hocket.transformer import SCHEDULES

RIGHT = {
    **{name: divided(GPT if name < "i" else LLAMA, name, 4) for name in SCHEDULES},
    "synthesised": divided(GPT, "synthesised", 4),
    "uneven layers, tied, full recompute": divided(
        GPT, "1f1b", 4, layers=(1, 2, 3, 1), recompute="full"
    ),
    "tensor 2": divided(replace(GPT, vocabulary=33), "1f1b", 2, tensor=2),
    "tensor 2, sequence parallel, zb-v": divided(
        LLAMA, "zb-v", 2, tensor=2, sequence_parallel=True, recompute="selective"
    ),
    "ddp": divided(GPT, "interleaved", 2, data=2),
    "zero 3": divided(GPT, "1f1b", 2, data=2, zero=3, layers=(2, 1), recompute="full"),
    "zero 2, dualpipe-v": divided(GPT, "dualpipe-v", 2, data=2, zero=2, recompute="full"),
    "zero 0, zb-v": divided(GPT, "zb-v", 2, data=2),
    "tensor 2, zero 1, sequence parallel": divided(
        GPT, "1f1b", 1, microbatches=2, tensor=2, data=2, zero=1, sequence_parallel=True
    ),
    "toy of a larger division": toy_of(
        *divided(LLAMA, "zb-v", 4, microbatches=8, tensor=2, layers=(1, 2, 1, 1, 1, 1, 1, 1))
    ),
    "tensor 2, zero 0": divided(LLAMA, "1f1b", 1, microbatches=2, tensor=2, data=2),
}
WRONG = {
    "ddp, split backward": (divided(GPT, "zb-v", 2, data=2), DataProgram("ddp")),
    "fsdp that reshards, split backward": (
        divided(GPT, "zb-v", 2, data=2, zero=3),
        DataProgram("fsdp", reshards=True),
    ),
}


@pytest.fixture(scope="module")
def agreements():
    """How far each case is from one device."""
    jobs = {name: make_job(*case) for name, case in RIGHT.items()}
    jobs |= {name: make_job(*case, data=data) for name, (case, data) in WRONG.items()}
    with forked_worker_groups():
        return dict(zip(jobs, check_jobs(list(jobs.values())), strict=True))


@pytest.mark.parametrize("name", RIGHT)
def test_loss_and_gradients_are_those_of_one_device(name, agreements):
    found = agreements[name]
    assert found.loss_error <= TOLERANCE
    assert found.gradient_error <= TOLERANCE, found.worst
    refuse(RIGHT[name][0], RIGHT[name][1], splits_backward=RIGHT[name][2].splits_backward)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_or_replaced_is_really_wrong(name, agreements):
    """PyTorch raises nothing; when this test fails PyTorch was mended and the rule can go."""
    assert agreements[name].gradient_error > 1e-3
    assert not agreements[name].is_right


def test_split_backward_never_meets_ddp_or_resharding():
    _, division, schedule = divided(GPT, "zb-v", 2, data=2)
    assert schedule.splits_backward
    assert data_program(division, splits_backward=True).kind == "reduce-after"
    sharded = replace(division, zero=2)
    assert data_program(sharded, splits_backward=True) == DataProgram("fsdp", reshards=False)
    with pytest.raises(UsageError, match="loses gradients of the last stage") as caught:
        refuse(GPT, replace(division, zero=3), splits_backward=True)
    assert "zero=2" in caught.value.hint
    refuse(GPT, replace(division, zero=3), splits_backward=False)


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
    _, division, schedule = divided(model, "1f1b", 2)
    with pytest.raises(UsageError, match=message) as caught:
        check_division(plan_of(model, replace(division, **fields), schedule, on="32xv100-16g"))
    assert caught.value.hint


def test_toy_keeps_the_structure_on_few_ranks():
    model = replace(LLAMA, hidden=4096, layers=96, heads=32, kv_heads=8, head_width=128)
    _, division, schedule = divided(
        model, "interleaved", 16, microbatches=32, tensor=8, data=4, zero=1, microbatch=2,
        layers=(3,) * 31 + (2,),
    )  # fmt: skip
    small_model, small, small_schedule = toy_of(model, division, schedule)
    assert (small.tensor, small.pipeline, small.data, small.chunks) == (2, 2, 2, 2)
    assert small.num_microbatches == small_schedule.num_microbatches
    assert (small.zero, small.recompute, small.schedule) == (1, "none", "interleaved")
    assert small.layers == (1, 2, 1, 2)
    assert small_model.layers == 6
    assert small_model.kv_heads < small_model.heads
    for name in ("zb-h2", "zb-v", "synthesised"):
        _, division, schedule = divided(GPT, name, 4)
        _, small, small_schedule = toy_of(GPT, division, schedule)
        assert small_schedule is schedule
        assert small.pipeline == 4


@pytest.mark.parametrize(("kind", "made"), [("interleaved", "zb-h1"), ("zb-h1", "interleaved")])
def test_toy_splits_backwards_as_the_plan_does(kind, made):
    """Another program would agree over replicas, and the planned one would not be checked."""
    _, division, _ = divided(GPT, kind, 4, microbatches=8, data=2)
    division = replace(division, chunks=2)
    schedule = make_schedule(made, 4, 8, 2)
    _, small, small_schedule = toy_of(GPT, division, schedule)
    assert small.pipeline == 2
    assert small_schedule.splits_backward == schedule.splits_backward


def test_what_is_not_a_number_is_never_right():
    """Comparisons with it are all false, so that the largest difference may leave it out."""
    expected = DividedReference((1.0, 1.0), {"weight": torch.ones(2)})
    for losses, gradient in (((1.0, math.nan), 1.0), ((1.0, 1.0), math.nan)):
        records = [StepRecord(start_s=0.0, end_s=1.0, loss=loss) for loss in losses]
        gradients = {rank: {"weight": torch.full((2,), gradient)} for rank in range(2)}
        found = _agreement(expected, JobResult(records, gradients))
        assert not found.is_right


def test_a_schedule_that_waits_for_itself_is_refused_before_anything_starts():
    plan = circular_plan()
    with pytest.raises(CheckError, match="can never start"):
        check_division(plan)
    with pytest.raises(CheckError, match="can never start"):
        run_plan(plan.problem, plan.plan, RunOptions(checks=False))


def test_a_wrong_division_is_told(monkeypatch):
    wrong = Agreement(loss_error=0.0, gradient_error=0.25, worst="layers.3.mlp.up.weight")
    monkeypatch.setattr(check_module, "check_jobs", lambda jobs: [wrong])
    with pytest.raises(CheckError, match=r"'layers\.3\.mlp\.up\.weight' by 2\.5e-01"):
        check_division(plan_of(*divided(GPT, "1f1b", 2)))
