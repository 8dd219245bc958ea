"""Every kind of parallelism and every schedule trains as one device does; others are refused.

All cases run in one set of four processes, whose start takes longest.
"""

from dataclasses import replace

import pytest
from runtime.parallel_plans import GPT, LLAMA, divided, plan_of

from hocket.errors import CheckError, UsageError
from hocket.runtime.parallel import check as check_module
from hocket.runtime.parallel.check import TOLERANCE, Agreement, check_division, check_jobs
from hocket.runtime.parallel.jobs import make_job
from hocket.runtime.parallel.refusals import DataProgram, data_program, refuse
from hocket.runtime.parallel.toy import toy_of
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


def test_a_wrong_division_is_told(monkeypatch):
    wrong = Agreement(loss_error=0.0, gradient_error=0.25, worst="layers.3.mlp.up.weight")
    monkeypatch.setattr(check_module, "check_jobs", lambda jobs: [wrong])
    with pytest.raises(CheckError, match=r"'layers\.3\.mlp\.up\.weight' by 2\.5e-01"):
        check_division(plan_of(*divided(GPT, "1f1b", 2)))
