"""What the search promises about its answer."""

import re
from dataclasses import replace

import numpy as np
import pytest
from planners.parallel_trainings import QUICK, SMALL, fixing, outlooks, training, winning

from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.jsonfile import dump_json
from hocket.hardware import cluster_from_text
from hocket.plan.files import plan_from_data, plan_to_data
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel
from hocket.planners import find_planner
from hocket.planners.parallel.forecast import most_in_the_middle
from hocket.planners.parallel.recheck import AS_SHORT, RecheckEffort
from hocket.planners.parallel.search_limits import fixed_limits
from hocket.planners.parallel.transformer_search import (
    compare_configs,
    default_limits,
    plan_of,
    scan,
)
from hocket.simulate.verify import violations

# ── search ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "on", "batch"),
    [(SMALL, "8xa100-80g", 16), ("gpt-39b", "4xdgx-a100-80g", 32), ("llama3-8b", "3xh100-80g", 6)],
    ids=["small", "gpt-39b", "three devices"],
)
def test_winner_is_as_short_as_any_and_its_plan_is_legal(model, on, batch):
    comparison = compare_configs(training(model, on, batch), QUICK)
    winner = winning(comparison)
    fitting = [c for c in comparison.candidates if c.feasible]
    assert comparison.winner is comparison.candidates[0]
    assert winner.step_s <= min(c.step_s for c in fitting) * (1 + AS_SHORT)
    assert all(c.reason for c in comparison.candidates)
    assert all(c.reason.startswith("lacks") for c in outlooks(comparison) if c.lacking_bytes)
    plan = plan_of(comparison)
    assert violations(plan, comparison.problem) == []
    assert plan.claims.step_s == winner.step_s
    assert 0 < winner.mfu < 1
    assert winner.tokens_per_s == pytest.approx(
        batch * winner.problem.training.model.sequence / winner.step_s
    )
    assert sum(len(names) for names in plan[Parallel].rank_devices) == winner.config.num_devices
    written = plan_to_data(comparison.problem, plan)
    again = plan_from_data(written, "plan")
    assert plan_to_data(again.problem, again.plan) == written


@pytest.mark.parametrize("fixed", ["pipeline=4,schedule=zb-v", "pipeline=3,schedule=1f1b"])
def test_parts_add_up_to_the_simulated_step(fixed):
    problem = training(replace(SMALL, layers=14), "4xa100-80g", 24)
    comparison = compare_configs(fixing(problem, fixed), QUICK)
    for candidate in outlooks(comparison):
        assert sum(candidate.parts_s.values()) == pytest.approx(candidate.step_s)
        assert not candidate.simulated or candidate.parts_s["bubble"] == pytest.approx(
            candidate.bubble * candidate.step_s
        )
    assert any(c.simulated and c.step_s != c.estimate_s for c in outlooks(comparison))


def test_same_question_same_plan():
    problem = training()
    plans = [plan_of(compare_configs(problem, QUICK)) for _ in range(2)]
    assert len({dump_json(plan_to_data(problem, plan)) for plan in plans}) == 1


def test_a_training_has_no_ops_to_place():
    with pytest.raises(UsageError, match="no ops to place"):
        find_planner("m-topo")(training(), Plan())


def test_simulator_and_closed_form_agree_on_even_pipelines():
    problem = training("gpt-39b", "4xdgx-a100-80g", 64)
    limits = fixed_limits(default_limits(problem), "pipeline=4,chunks=1,schedule=1f1b")
    effort = RecheckEffort(num_simulated=30, num_balanced=0, num_balanced_chunks=0)
    fitting = [
        c for c in outlooks(compare_configs(replace(problem, limits=limits), effort)) if c.simulated
    ]
    assert len(fitting) > 10
    off = [abs(c.step_s / c.estimate_s - 1) for c in fitting]
    assert np.mean(off) < 0.05
    assert max(off) < 0.15


def test_layers_that_do_not_divide_are_shared_out():
    problem = training(replace(SMALL, layers=30), "4xa100-80g", 32)
    limits = fixed_limits(default_limits(problem), "pipeline=4,chunks=1,tensor=1")
    winner = winning(compare_configs(replace(problem, limits=limits), QUICK))
    assert len(winner.config.layers) == 4
    assert sum(winner.config.layers) == 30
    assert max(winner.config.layers) <= 9


def test_heavy_output_layer_gets_fewer_layers():
    problem = training(replace(SMALL, vocabulary=500_000), "4xa100-80g", 32)
    limits = fixed_limits(default_limits(problem), "pipeline=4,schedule=1f1b,tensor=1")
    winner = winning(compare_configs(replace(problem, limits=limits), QUICK))
    assert winner.config.layers[-1] < 3
    even = winning(compare_configs(replace(problem, limits=limits), replace(QUICK, num_balanced=0)))
    assert even.config.layers is None
    assert winner.step_s < even.step_s


@pytest.mark.parametrize("layers", [7, 12, 13, 96])
@pytest.mark.parametrize("stages", [1, 2, 5, 7])
def test_even_shares_differ_by_one_and_ends_are_never_larger(layers, stages):
    shares = most_in_the_middle(layers, stages)
    assert sum(shares) == layers
    assert max(shares) - min(shares) <= 1
    if stages > 2:
        assert shares[0] <= max(shares[1:-1])


# ── what does not fit ────────────────────────────────────────────────────────────────────────────


def test_nothing_fits_names_the_least_lack_and_what_would_do():
    problem = training("gpt-39b", "4xdgx1-v100", 16, dtype="float16")
    small = replace(problem, cluster=cluster_from_text("8xv100-16g"))
    comparison = compare_configs(small, QUICK)
    assert comparison.winner is None
    lacking = [outlook.lacking_bytes for outlook in outlooks(comparison)]
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
    problem = training("gpt-39b", "2xdgx1-v100", 16, dtype="float16")
    comparison = compare_configs(fixing(problem, fixed), QUICK)
    assert comparison.winner is None
    told = re.search(r"(\d+) hosts of 8 v100-16g instead of 2", comparison.why)
    assert (told is not None) == (fixed == "chunks=4")
    if told:
        other = replace(problem, cluster=cluster_from_text(f"{told[1]}xdgx1-v100"))
        assert scan(other, 0, fixed_limits(default_limits(other), fixed), 1).num_fitting


def test_limits_that_leave_nothing_say_so():
    problem = training()
    comparison = compare_configs(fixing(problem, "tensor=7"), QUICK)
    assert comparison.winner is None
    assert comparison.why.endswith(": tensor 7 does not divide 8 devices")
    comparison = compare_configs(fixing(problem, "expert=2"), QUICK)
    assert comparison.why.endswith(": 1 experts are not divisible by expert 2")


# ── unequal devices ──────────────────────────────────────────────────────────────────────────────


def test_unequal_kinds_share_a_pipeline_and_the_fast_ones_get_more_layers():
    problem = training("gpt-3.6b", "4xa100-80g+4xv100-32g", 32, dtype="float16")
    comparison = compare_configs(problem, RecheckEffort(num_simulated=60))
    both = [c for c in outlooks(comparison) if c.feasible and len(c.stages.pools) == 2]
    assert both
    kinds = {device.name: device.kind.name for device in problem.cluster.devices}
    best = both[0]
    plan = best.as_candidate().plan
    assert violations(plan, comparison.problem) == []
    assert all(len({kinds[name] for name in names}) == 1 for names in plan[Parallel].rank_devices)
    layers = np.array(best.config.layers or [30 // best.config.pipeline])
    fast = np.array([kinds[names[0]] == "a100-80g" for names in plan[Parallel].rank_devices])
    assert layers[fast].mean() > layers[~fast].mean()


def test_unequal_kinds_take_the_order_with_the_shortest_step():
    problem = training("gpt2-xl", "2xv100-32g+4xt4", 32, dtype="float16")
    known = compare_configs(problem, RecheckEffort(num_balanced=0))
    found = compare_configs(problem)
    assert winning(known).kinds == ("v100-32g", "t4", "t4")
    assert winning(found).kinds == ("t4", "t4", "v100-32g")
    assert found.winner.step_s < 0.98 * known.winner.step_s
    for candidate in found.candidates:
        if candidate.feasible:
            assert violations(candidate.plan, problem) == []
    orders = [c.kinds for c in outlooks(found) if c.feasible and len(c.stages.pools) > 2]
    assert orders, "none has a kind twice, with another between"


@pytest.mark.parametrize("fixed", ["context=2", "chunks=2"])
def test_fixed_degrees_hold_on_mixed_clusters(fixed):
    problem = training(SMALL, "4xa100-80g+4xh100-80g", 16)
    comparison = compare_configs(fixing(problem, fixed), QUICK)
    name, value = fixed.split("=")
    assert {getattr(c.config, name) for c in outlooks(comparison)} == {int(value)}


def test_a_kind_alone_is_tried_on_mixed_clusters():
    problem = training(SMALL, "4xa100-80g+2xv100-16g", 16, dtype="float16")
    comparison = compare_configs(problem, QUICK)
    alone = compare_configs(training(SMALL, "4xa100-80g", 16, dtype="float16"), QUICK)
    assert comparison.winner.step_s <= alone.winner.step_s * (1 + AS_SHORT)
