"""What training programs can run, what is kept free and what is told of a prediction."""

import re
from dataclasses import replace

import pytest
from planners.every_config import enumerate_configs
from planners.parallel_trainings import QUICK, SMALL, outlooks, training, winning

from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.stage_memory import stage_memory
from hocket.plan.limits import Limits
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.pools import pools_of
from hocket.planners.parallel.search_limits import fixed_limits, program_limits
from hocket.planners.parallel.transformer_search import compare_configs, default_limits, plan_of
from hocket.transformer import ParallelConfig
from hocket.transformer.files import find_model
from hocket.transformer.rules import broken_rules
from hocket.view.parallel_report import parallel_report_html
from hocket.view.parallel_text import mfu_sentence, range_sentence


def test_report_on_a_telephone_keeps_config_step_and_memory():
    comparison = compare_configs(training(), QUICK)
    report = parallel_report_html(
        TransformerPlan(comparison.problem, plan_of(comparison)), comparison
    )
    heads = re.findall(r'<th scope="col"(?: class="([^"]*)")?>([^<]*)</th>', report)
    candidates = heads[: [title for _, title in heads].index("Of") + 1]
    assert len(candidates) > 5
    narrow = [title for classes, title in candidates if "wide" not in classes.split()]
    assert narrow == ["", "Parallel config", "Step", "Peak"]


def test_stated_stages_may_hold_the_embedding_or_the_output_layer_alone():
    model = find_model("llama3-405b")
    config = ParallelConfig(pipeline=16, chunks=8, schedule="interleaved", global_batch=64)
    assert list(broken_rules(model, config)) == ["128 stages are more than 126 layers"]
    stated = replace(config, layers=(0, *[1] * 126, 0))
    assert list(broken_rules(model, stated)) == []
    held = stage_memory(model, stated, find_software("megatron-core"))
    assert held.activation_bytes[0] < held.activation_bytes[1]


def test_what_is_kept_free_stays_free():
    full = training(batch=64, on="4xa100-40g")
    kept = replace(full, spare=0.45)
    tight = compare_configs(full, QUICK)
    wide = compare_configs(kept, QUICK)
    capacity = pools_of(full)[0].memory_bytes
    assert max(winning(tight).peak_bytes) > 0.55 * capacity >= max(winning(wide).peak_bytes)
    assert all(max(c.peak_bytes) <= 0.55 * capacity for c in outlooks(wide) if c.feasible)
    misfits = [c for c in wide.candidates if not c.feasible]
    assert misfits
    assert all("45 % of memory stay free" in c.reason for c in misfits)
    assert wide.counts["fitting"] < tight.counts["fitting"]


@pytest.mark.parametrize(
    ("model", "on", "source", "expected"),
    [
        (SMALL, "8xa100-80g", "", 0.15),
        (SMALL, "8xrtx4090", "", 0.35),
        (SMALL, "8xh100", "", 0.15),
        ("mixtral-8x7b", "2xdgx-h100", "", 0.5),
        (SMALL, "8xrtx4090", "ten runs", 0.12),
    ],
)
def test_the_range_to_expect_is_that_of_what_is_known(model, on, source, expected):
    problem = training(model, on, batch=32)
    work = replace(problem.training, coefficients=Coefficients(source=source))
    problem = replace(problem, work=work)
    winner = winning(compare_configs(problem, QUICK))
    assert winner.uncertainty == expected
    low_s, high_s = winner.range_s
    assert low_s == pytest.approx(winner.step_s * (1 - expected))
    assert high_s == pytest.approx(winner.step_s * (1 + expected))
    told = range_sentence(winner)
    assert told.startswith("expect ")
    assert ("calibrated with ten runs" in told) == bool(source)
    assert winner.causal_mfu < winner.mfu
    assert all(
        f"{100 * share:.0f}" in mfu_sentence(winner) for share in (winner.mfu, winner.causal_mfu)
    )


def test_a_named_program_limits_what_is_tried():
    problem = training("gpt-39b", "4xdgx-a100-80g", 32, software="megatron-2021")
    limits = program_limits(default_limits(problem), "megatron-2021")
    found = enumerate_configs(problem.training.model, pools_of(problem)[0], 32, limits)
    assert set(found.zero.tolist()) == {0}
    assert not found.sequence_parallel.any()
    assert set(found.context.tolist()) == {1}
    every = program_limits(Limits(max_tensor=8), "torch")
    assert every == Limits(max_tensor=8)


def test_experts_are_divided_where_that_is_shorter():
    problem = training("qwen3-30b-a3b", "2xdgx-h100", 256, dtype="float8")
    limits = program_limits(default_limits(problem), "megatron-core")
    chosen = winning(compare_configs(replace(problem, limits=limits), QUICK))
    assert chosen.config.expert == 8
    whole = winning(
        compare_configs(replace(problem, limits=fixed_limits(limits, "expert=1")), QUICK)
    )
    assert chosen.step_s < whole.step_s


def test_megatron_core_divides_gradients_without_pipelines_only():
    problem = training("gpt-7.5b", "16xa100-80g", 32)
    limits = program_limits(default_limits(problem), "megatron-core")
    found = enumerate_configs(problem.training.model, pools_of(problem)[0], 32, limits)
    assert found.zero[found.pipeline > 1].max() == 1
    assert found.zero[found.pipeline == 1].max() == 3
