"""The search against plain enumeration, and what it promises about its answer."""

import re
from dataclasses import replace

import numpy as np
import pytest
from planners.every_division import enumerate_divisions

from hocket.api import make_problem
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.jsonfile import dump_json
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.memory import memory, stage_memory
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.step import predict
from hocket.graph.generators import generate
from hocket.hardware import cluster_from_text
from hocket.plan.divided import DividedTraining
from hocket.plan.files import plan_from_data, plan_to_data
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import PlacedDivision
from hocket.plan.training import TransformerTraining
from hocket.planners import find_planner
from hocket.planners.parallelism import enumerate as enumeration
from hocket.planners.parallelism.enumerate import Limits
from hocket.planners.parallelism.limits import fixed_limits
from hocket.planners.parallelism.outlook import even_layers, outlook_of
from hocket.planners.parallelism.pools import pools_of
from hocket.planners.parallelism.programs import program_limits
from hocket.planners.parallelism.recheck import AS_SHORT, RecheckEffort
from hocket.planners.parallelism.scan import scan
from hocket.planners.parallelism.search import default_limits, plan_of, search
from hocket.simulate.verify import violations
from hocket.transformer import RECOMPUTES, Division, Transformer
from hocket.transformer.files import find_model
from hocket.transformer.rules import broken_rules
from hocket.view.parallel_report import parallel_report_html
from hocket.view.parallel_text import range_sentence

SMALL = Transformer(
    name="small", hidden=2048, layers=12, heads=16, kv_heads=16, head_width=128, mlp_width=8192,
    mlp="gelu", vocabulary=51200, sequence=2048, tied_embeddings=True, learned_positions=True,
    biases=True, dropout=True,
)  # fmt: skip
QUICK = RecheckEffort(num_simulated=30, num_balanced=4, num_balanced_chunks=1)


def _training(model=SMALL, on="8xa100-80g", batch=16, software="megatron-core", dtype=None):
    program = find_software(software)
    work = TransformerTraining(
        model=model if isinstance(model, Transformer) else find_model(model),
        global_batch=batch,
        software=program if dtype is None else replace(program, dtype=dtype),
    )
    return Problem(work=work, cluster=cluster_from_text(on))


def _outlooks(comparison):
    """What is told of every candidate, and of the winner first of all."""
    return [outlook_of(comparison.problem, candidate) for candidate in comparison.candidates]


def _winner(comparison):
    return outlook_of(comparison.problem, comparison.winner)


def _judged(problem, divisions):
    """What memory and time the closed forms give, asked without any of the scan's shortcuts."""
    held = memory(problem.training.model, divisions, problem.training.software).total_bytes
    step_s = predict(
        problem.training.model,
        divisions,
        problem.cluster,
        problem.training.software,
        problem.training.coefficients,
    ).step_s
    return held, step_s


# ── scan ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "on", "batch"),
    [
        ("gpt-7.5b", "8xa100-80g", 8),
        ("gpt-18b", "2xdgx-a100-80g", 12),
        ("mixtral-8x7b", "2xdgx-h100", 4),
    ],
)
def test_scan_finds_the_best_of_all_divisions(model, on, batch):
    problem = _training(model, on, batch)
    limits = default_limits(problem)
    found = scan(problem, 0, limits, 50)
    every = enumerate_divisions(problem.training.model, pools_of(problem)[0], batch, limits)
    held, step_s = _judged(problem, every)
    fits = held <= pools_of(problem)[0].memory_bytes
    assert found.num_divisions == len(every)
    assert found.num_fitting == fits.sum()
    kept_held, kept_s = _judged(problem, found.fitting)
    assert np.all(kept_held <= pools_of(problem)[0].memory_bytes)
    assert np.all(np.diff(kept_s) >= 0)
    assert kept_s[0] <= step_s[fits].min() * 1.005  # see the test on recomputation below
    lacking, _ = _judged(problem, found.nearly)
    assert np.all(lacking > pools_of(problem)[0].memory_bytes)


@pytest.mark.parametrize("software", ["megatron-core", "torch", "megatron-2021"])
def test_more_recomputation_never_shortens_a_step(software):
    """What lets the scan skip recomputation where less of it fits.

    Communication that waits anyway may hide behind the work done again, hence the allowance.
    """
    problem = _training("gpt-18b", "16xdgx-a100-80g", 96, software)
    limits = replace(default_limits(problem), recomputes=("none",))
    every = enumerate_divisions(problem.training.model, pools_of(problem)[0], 96, limits)
    some = every.take(np.random.default_rng(1).integers(0, len(every), 20_000))
    none_s, selective_s, full_s = (
        _judged(problem, replace(some, recompute=some.recompute + np.int8(mode)))[1]
        for mode in range(len(RECOMPUTES))
    )
    assert np.all(none_s <= selective_s * 1.005)
    assert np.all(selective_s <= full_s * 1.005)


def test_replicas_left_out_on_large_clusters_would_not_be_chosen(monkeypatch):
    problem = _training("gpt-18b", "32xdgx-a100-80g", 48)
    limits = replace(default_limits(problem), schedules=("1f1b", "interleaved"), max_context=2)
    reduced = scan(problem, 0, limits, 20).fitting[0]
    monkeypatch.setattr(enumeration, "FEW_DEVICES", 10**6)
    assert scan(problem, 0, limits, 20).fitting[0] == reduced


# ── search ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "on", "batch"),
    [(SMALL, "8xa100-80g", 16), ("gpt-39b", "4xdgx-a100-80g", 32), ("llama3-8b", "3xh100-80g", 6)],
    ids=["small", "gpt-39b", "three devices"],
)
def test_winner_is_as_short_as_any_and_its_plan_is_legal(model, on, batch):
    comparison = search(_training(model, on, batch), effort=QUICK)
    winner = _winner(comparison)
    fitting = [c for c in comparison.candidates if c.feasible]
    assert comparison.winner is comparison.candidates[0]
    assert winner.step_s <= min(c.step_s for c in fitting) * (1 + AS_SHORT)
    assert all(c.reason for c in comparison.candidates)
    assert all(c.reason.startswith("lacks") for c in _outlooks(comparison) if c.lacking_bytes)
    plan = plan_of(comparison)
    assert violations(plan, comparison.problem) == []
    assert plan.claims.step_s == winner.step_s
    assert 0 < winner.mfu < 1
    assert winner.tokens_per_s == pytest.approx(
        batch * winner.problem.training.model.sequence / winner.step_s
    )
    assert sum(len(names) for names in plan[PlacedDivision].devices) == winner.division.num_devices
    written = plan_to_data(comparison.problem, plan)
    again = plan_from_data(written, "plan")
    assert plan_to_data(again.problem, again.plan) == written


@pytest.mark.parametrize("fixed", ["pipeline=4,schedule=zb-v", "pipeline=3,schedule=1f1b"])
def test_parts_add_up_to_the_simulated_step(fixed):
    problem = _training(replace(SMALL, layers=14), "4xa100-80g", 24)
    comparison = search(problem, fixed_limits(default_limits(problem), fixed), QUICK)
    for candidate in _outlooks(comparison):
        assert sum(candidate.parts_s.values()) == pytest.approx(candidate.step_s)
        assert not candidate.simulated or candidate.parts_s["bubble"] == pytest.approx(
            candidate.bubble * candidate.step_s
        )
    assert any(c.simulated and c.step_s != c.estimate_s for c in _outlooks(comparison))


def test_same_question_same_plan():
    problem = _training()
    plans = [plan_of(search(problem, effort=QUICK)) for _ in range(2)]
    assert len({dump_json(plan_to_data(problem, plan)) for plan in plans}) == 1


def test_divide_is_a_planner_of_trainings_and_refuses_graphs():
    problem = _training(replace(SMALL, layers=4), "2xa100-80g", 4)
    plan = find_planner("divide")(problem, Plan(planner="divide"))
    assert violations(plan, problem) == []
    assert plan.planner == "divide"
    with pytest.raises(UsageError, match="not the training of a transformer"):
        find_planner("divide")(make_problem(generate("chain", 5, 0), "2xv100-16g"), Plan())
    with pytest.raises(UsageError, match="no ops to place"):
        find_planner("m-topo")(problem, Plan())


def test_simulator_and_closed_form_agree_on_even_pipelines():
    problem = _training("gpt-39b", "4xdgx-a100-80g", 64)
    limits = fixed_limits(default_limits(problem), "pipeline=4,chunks=1,schedule=1f1b")
    effort = RecheckEffort(num_simulated=30, num_balanced=0, num_balanced_chunks=0)
    fitting = [c for c in _outlooks(search(problem, limits, effort)) if c.simulated]
    assert len(fitting) > 10
    off = [abs(c.step_s / c.estimate_s - 1) for c in fitting]
    assert np.mean(off) < 0.05
    assert max(off) < 0.15


def test_layers_that_do_not_divide_are_shared_out():
    problem = _training(replace(SMALL, layers=30), "4xa100-80g", 32)
    limits = fixed_limits(default_limits(problem), "pipeline=4,chunks=1,tensor=1")
    winner = _winner(search(problem, limits, QUICK))
    assert len(winner.division.layers) == 4
    assert sum(winner.division.layers) == 30
    assert max(winner.division.layers) <= 9


def test_heavy_output_layer_gets_fewer_layers():
    problem = _training(replace(SMALL, vocabulary=500_000), "4xa100-80g", 32)
    limits = fixed_limits(default_limits(problem), "pipeline=4,schedule=1f1b,tensor=1")
    winner = _winner(search(problem, limits, QUICK))
    assert winner.division.layers[-1] < 3
    even = _winner(search(problem, limits, replace(QUICK, num_balanced=0)))
    assert even.division.layers is None
    assert winner.step_s < even.step_s


@pytest.mark.parametrize("layers", [7, 12, 13, 96])
@pytest.mark.parametrize("stages", [1, 2, 5, 7])
def test_even_shares_differ_by_one_and_ends_are_never_larger(layers, stages):
    shares = even_layers(layers, stages)
    assert sum(shares) == layers
    assert max(shares) - min(shares) <= 1
    if stages > 2:
        assert shares[0] <= max(shares[1:-1])


# ── what does not fit ────────────────────────────────────────────────────────────────────────────


def test_nothing_fits_names_the_least_lack_and_what_would_do():
    problem = _training("gpt-39b", "4xdgx1-v100", 16, dtype="float16")
    small = replace(problem, cluster=cluster_from_text("8xv100-16g"))
    comparison = search(small, effort=QUICK)
    assert comparison.winner is None
    lacking = [outlook.lacking_bytes for outlook in _outlooks(comparison)]
    assert lacking[0] == min(lacking)
    with pytest.raises(NoFeasiblePlanError) as caught:
        plan_of(comparison)
    hosts = int(re.search(r"(\d+) hosts of 8 v100-16g instead of 1", str(caught.value))[1])
    for count, fits in ((hosts, True), (hosts - 1, False)):
        other = replace(small, cluster=cluster_from_text(f"{8 * count}xv100-16g"))
        found = scan(other, 0, default_limits(other), 1)
        assert (found.num_fitting > 0) == fits


@pytest.mark.parametrize("fixed", ["pipeline=1,zero=0", "pipeline=1,zero=0,tensor=1", "chunks=4"])
def test_hosts_that_would_do_keep_to_what_is_fixed(fixed):
    problem = _training("gpt-39b", "2xdgx1-v100", 16, dtype="float16")
    comparison = search(problem, fixed_limits(default_limits(problem), fixed), QUICK)
    assert comparison.winner is None
    told = re.search(r"(\d+) hosts of 8 v100-16g instead of 2", comparison.why)
    assert (told is not None) == (fixed == "chunks=4")
    if told:
        other = replace(problem, cluster=cluster_from_text(f"{told[1]}xdgx1-v100"))
        assert scan(other, 0, fixed_limits(default_limits(other), fixed), 1).num_fitting


def test_limits_that_leave_nothing_say_so():
    problem = _training()
    comparison = search(problem, fixed_limits(default_limits(problem), "tensor=7"), QUICK)
    assert comparison.winner is None
    assert comparison.why.endswith(": tensor 7 does not divide 8 devices")
    comparison = search(problem, fixed_limits(default_limits(problem), "expert=2"), QUICK)
    assert comparison.why.endswith(": 1 experts cannot be divided by expert 2")


# ── unequal devices ──────────────────────────────────────────────────────────────────────────────


def test_unequal_kinds_share_a_pipeline_and_the_fast_ones_get_more_layers():
    problem = _training("gpt-3.6b", "4xa100-80g+4xv100-32g", 32, dtype="float16")
    comparison = search(problem, effort=RecheckEffort(num_simulated=60))
    both = [c for c in _outlooks(comparison) if c.feasible and len(c.stages.pools) == 2]
    assert both
    kinds = {device.name: device.kind.name for device in problem.cluster.devices}
    best = both[0]
    plan = best.as_candidate().plan
    assert violations(plan, comparison.problem) == []
    assert all(len({kinds[name] for name in names}) == 1 for names in plan[PlacedDivision].devices)
    layers = np.array(best.division.layers or [30 // best.division.pipeline])
    fast = np.array([kinds[names[0]] == "a100-80g" for names in plan[PlacedDivision].devices])
    assert layers[fast].mean() > layers[~fast].mean()


@pytest.mark.parametrize("fixed", ["context=2", "chunks=2"])
def test_fixed_degrees_hold_on_mixed_clusters(fixed):
    problem = _training(SMALL, "4xa100-80g+4xh100-80g", 16)
    comparison = search(problem, fixed_limits(default_limits(problem), fixed), QUICK)
    name, value = fixed.split("=")
    assert {getattr(c.division, name) for c in _outlooks(comparison)} == {int(value)}


def test_a_kind_alone_is_tried_on_mixed_clusters():
    problem = _training(SMALL, "4xa100-80g+2xv100-16g", 16, dtype="float16")
    comparison = search(problem, effort=QUICK)
    alone = search(_training(SMALL, "4xa100-80g", 16, dtype="float16"), effort=QUICK)
    assert comparison.winner.step_s <= alone.winner.step_s * (1 + AS_SHORT)


# ── schedules made for a plan ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ["1f1b", "zb-h2", "zb-v"])
def test_a_schedule_made_for_the_stages_is_never_longer(order):
    problem = _training(replace(SMALL, vocabulary=300_000), "4xa100-80g", 8)
    limits = fixed_limits(default_limits(problem), f"pipeline=4,schedule={order},microbatch=1")
    plain = _winner(search(problem, limits, QUICK))
    comparison = search(problem, limits, replace(QUICK, num_synthesised=2))
    winner = _winner(comparison)
    assert winner.step_s < plain.step_s or winner.schedule_name == order
    assert winner.step_s <= plain.step_s
    plan = plan_of(comparison)
    assert violations(plan, comparison.problem) == []
    report = parallel_report_html(DividedTraining(comparison.problem, plan), comparison)
    # Candidate, device count, plan.
    assert report.count(f"microbatch 1, {winner.schedule_name}") >= 3


# ── programs ─────────────────────────────────────────────────────────────────────────────────────


def test_report_on_a_telephone_keeps_division_step_and_memory():
    comparison = search(_training(), effort=QUICK)
    report = parallel_report_html(
        DividedTraining(comparison.problem, plan_of(comparison)), comparison
    )
    heads = re.findall(r'<th scope="col"(?: class="([^"]*)")?>([^<]*)</th>', report)
    candidates = heads[: [title for _, title in heads].index("Reason") + 1]
    assert len(candidates) > 5
    narrow = [title for classes, title in candidates if "wide" not in classes.split()]
    assert narrow == ["", "Division", "Step", "Fullest rank"]


def test_stated_stages_may_hold_the_embedding_or_the_output_layer_alone():
    model = find_model("llama3-405b")
    division = Division(pipeline=16, chunks=8, schedule="interleaved", global_batch=64)
    assert list(broken_rules(model, division)) == ["128 stages are more than 126 layers"]
    stated = replace(division, layers=(0, *[1] * 126, 0))
    assert list(broken_rules(model, stated)) == []
    held = stage_memory(model, stated, find_software("megatron-core"))
    assert held.activation_bytes[0] < held.activation_bytes[1]


def test_what_is_kept_free_stays_free():
    full = _training(batch=64, on="4xa100-40g")
    kept = replace(full, spare=0.25)
    tight = search(full, effort=QUICK)
    wide = search(kept, effort=QUICK)
    capacity = pools_of(full)[0].memory_bytes
    assert max(_winner(tight).peak_bytes) > 0.75 * capacity >= max(_winner(wide).peak_bytes)
    assert all(max(c.peak_bytes) <= 0.75 * capacity for c in _outlooks(wide) if c.feasible)
    misfits = [c for c in wide.candidates if not c.feasible]
    assert misfits
    assert all("25 % of memory stay free" in c.reason for c in misfits)
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
    problem = _training(model, on, batch=32)
    work = replace(problem.training, coefficients=Coefficients(source=source))
    problem = replace(problem, work=work)
    winner = _winner(search(problem, effort=QUICK))
    assert winner.uncertainty == expected
    low_s, high_s = winner.range_s
    assert low_s == pytest.approx(winner.step_s * (1 - expected))
    assert high_s == pytest.approx(winner.step_s * (1 + expected))
    told = range_sentence(winner)
    assert told.startswith("expect ")
    assert ("calibrated with ten runs" in told) == bool(source)


def test_a_named_program_limits_what_is_tried():
    problem = _training("gpt-39b", "4xdgx-a100-80g", 32, software="megatron-2021")
    limits = program_limits(default_limits(problem), "megatron-2021")
    found = enumerate_divisions(problem.training.model, pools_of(problem)[0], 32, limits)
    assert set(found.zero.tolist()) == {0}
    assert not found.sequence_parallel.any()
    assert set(found.context.tolist()) == {1}
    every = program_limits(Limits(max_tensor=8), "torch")
    assert every == Limits(max_tensor=8)


def test_experts_are_divided_where_that_is_shorter():
    problem = _training("qwen3-30b-a3b", "2xdgx-h100", 256, dtype="float8")
    limits = program_limits(default_limits(problem), "megatron-core")
    chosen = _winner(search(problem, limits, QUICK))
    assert chosen.division.expert == 8
    whole = _winner(search(problem, fixed_limits(limits, "expert=1"), QUICK))
    assert chosen.step_s < whole.step_s


def test_megatron_core_divides_gradients_without_pipelines_only():
    problem = _training("gpt-7.5b", "16xa100-80g", 32)
    limits = program_limits(default_limits(problem), "megatron-core")
    found = enumerate_divisions(problem.training.model, pools_of(problem)[0], 32, limits)
    assert found.zero[found.pipeline > 1].max() == 1
    assert found.zero[found.pipeline == 1].max() == 3
