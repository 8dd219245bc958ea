"""Limits that an answer must keep, and what other clusters would bring."""

import numpy as np
import pytest
from planners.whole.whole_nets import problem_on

from hocket.api.planners import compare_changes
from hocket.base.errors import UsageError
from hocket.base.units import parse_seconds
from hocket.hardware.changed import changed_cluster
from hocket.planners.goal import goal_values, num_devices
from hocket.planners.parallel.compare import compare_parallel
from hocket.planners.parallel.constraints import Constraints, parse_constraints
from hocket.view.comparison import comparison_table
from hocket.view.table import plain
from hocket.view.variants import variants_table


@pytest.mark.parametrize(
    ("texts", "must"),
    [
        ((), Constraints()),
        ("step 500ms", Constraints(step_s=0.5)),
        (("fit 8GiB", "devices 2"), Constraints(device_bytes=8 * 2**30, num_devices=2)),
        (("step 500ms", "cost $3"), Constraints(step_s=0.5, dollars_per_million=3)),
    ],
)
def test_limits_as_people_write_them(texts, must):
    assert parse_constraints(texts) == must


@pytest.mark.parametrize(
    "text", ["fits 8GiB", "fit", "fit many", "devices 0", "cost -1", "step", ""]
)
def test_limits_that_are_none_are_refused_with_a_hint(text):
    with pytest.raises(UsageError) as caught:
        parse_constraints([text])
    assert caught.value.hint


@pytest.mark.usefixtures("unplaced")
def test_answers_keep_their_limits(unequal, comparison):
    two = compare_parallel(unequal, must=Constraints(num_devices=2))
    assert num_devices(two.winner) <= 2
    assert two.winner.step_s >= comparison.winner.step_s * 0.995
    least = int(two.winner.timeline.peak_bytes.max())
    lean = compare_parallel(unequal, must=Constraints(device_bytes=least // 2))
    assert lean.winner.timeline.peak_bytes.max() <= least // 2
    never = compare_parallel(unequal, must=Constraints(step_s=comparison.bound.seconds / 2))
    assert never.chosen is None
    assert any("longer than" in candidate.reason for candidate in never.candidates)
    assert "DDP (baseline): longer than" in plain(comparison_table(never))
    told_s = parse_seconds(never.why.rpartition(" is ")[2])
    assert comparison.bound.seconds <= told_s <= comparison.winner.step_s * 1.5


@pytest.mark.parametrize(
    ("net", "on", "texts", "cause"),
    [
        ("graph", "2xt4", ("tensor 2",), "cannot split the matrices of its layers"),
        ("text", "2xt4", ("tensor 3",), "takes 3 devices and 2 may be used"),
        ("text", "2xt4", ("data 2", "pipeline 2"), "takes 4 devices and 2 may be used"),
        ("text", "2xt4", ("data 2", "devices 1"), "takes 2 devices and 1 may be used"),
        ("text", "8xt4", ("data 5",), "a sample and the batch has 4"),
        ("text", "4xt4", ("tensor 3",), "allow tensor 2 or 4 or 8"),
        ("text", "1xt4+1xv100-16g", ("tensor 2",), "no 2 devices of one type and memory"),
    ],
)
@pytest.mark.usefixtures("unplaced")
def test_why_no_plan_is_shared_out_as_asked_is_told(net, on, texts, cause, request):
    problem = problem_on(request.getfixturevalue(net), on)
    comparison = compare_parallel(problem, must=parse_constraints(texts))
    assert comparison.winner is None
    asked = " x ".join(text for text in texts if not text.startswith("devices"))
    assert comparison.why.startswith(f"no plan has {asked}: ")
    assert cause in comparison.why


@pytest.mark.usefixtures("unplaced")
def test_more_devices_are_never_slower_and_fewer_never_faster(unequal, comparison):
    changes = ("+1xa100-40g", "-t4", "1xh100-80g")
    found = {v.change: v.step_s for v in compare_changes(unequal, changes)}
    assert set(found) == set(changes)
    assert found["+1xa100-40g"] < comparison.winner.step_s <= found["-t4"] * 1.005


@pytest.mark.usefixtures("unplaced")
def test_money_buys_what_it_pays_for(graph):
    problem = problem_on(graph, "1xt4")
    found = compare_changes(problem, (), dollars_per_hour=0.6)
    assert found
    for variant in found:
        kinds = [d.kind for d in variant.comparison.problem.cluster.devices]
        added = kinds[1:] if variant.change.startswith("+") else kinds
        assert 0 < sum(kind.price_per_hour for kind in added) <= 0.6
    steps = [variant.step_s for variant in found]
    assert steps == sorted(steps)


@pytest.mark.usefixtures("unplaced")
def test_changes_are_ranked_and_told_by_what_is_wanted(graph):
    problem = problem_on(graph, "1xt4")
    found = compare_changes(problem, ("1xh100-80g", "1xh200"), goal="memory")
    assert [v.change for v in found] == ["1xh200", "1xh100-80g"]  # as fast, and roomier
    told = {
        goal: plain(variants_table(compare_parallel(problem, goal), found, goal)).splitlines()[-1]
        for goal in ("time", "memory")
    }
    assert "1xh200 helps most: its fullest device" in told["memory"]
    assert "times as fast" in told["time"]


def test_money_counts_where_all_prices_are_known_and_device_time_elsewhere(graph):
    tried = [
        (problem, compare_parallel(problem).winner)
        for problem in (problem_on(graph, "1xt4"), problem_on(graph, "1xa100-40g"))
    ]
    steps = [winner.step_s for _, winner in tried]
    prices = [problem.cluster.price_per_hour for problem, _ in tried]
    assert all(prices)
    assert goal_values(tried, "cost") == pytest.approx(np.multiply(steps, prices))
    free = problem_on(graph, "1xrtx2080")
    tried.append((free, compare_parallel(free).winner))
    assert goal_values(tried, "cost")[:2] == pytest.approx(steps)


@pytest.mark.parametrize("change", ["-h100-80g", "-3xt4", "+1xnothing", "+1xdgx1-v100", "-"])
def test_changes_that_a_cluster_cannot_have_are_refused(unequal, change):
    with pytest.raises(UsageError) as caught:
        changed_cluster(unequal.cluster, change)
    assert caught.value.hint
