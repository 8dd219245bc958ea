"""Which of several plans is chosen: ties to the efficient, money where it is asked for."""

from dataclasses import replace

import numpy as np
import pytest

from hocket.api.planned import plan_graph
from hocket.base.errors import UsageError
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel, Replica
from hocket.planners.candidates import judge
from hocket.planners.compare import compare
from hocket.planners.goal import (
    GOALS,
    cost_efficiency_text,
    efficient,
    num_devices,
    objective_text,
    ranked,
)

GRAPH = generate("chain", 8, 0)


@pytest.fixture(scope="module")
def problem():
    return make_problem(GRAPH, "1xv100-16g+2xt4")


def placed(problem, devices, step_s=None):
    """A candidate on some devices, its step stretched to a length."""
    device_of = np.array([devices[op % len(devices)] for op in range(GRAPH.num_ops)], np.int32)
    candidate = judge(problem, f"on {devices}", Plan().placing(device_of), 0.0)
    if step_s is None:
        return candidate
    return replace(candidate, timeline=replace(candidate.timeline, makespan_s=step_s))


def first(problem, tried, goal="time"):
    return ranked(problem, tried, goal)[0]


def test_ties_go_to_fewer_devices_then_less_money_then_less_memory(problem):
    many, few = placed(problem, [0, 1, 2], 1.0), placed(problem, [0], 1.004)
    assert first(problem, [many, few]) == 1
    assert first(problem, [many, placed(problem, [0], 1.006)]) == 0
    # A V100 costs more than a T4.
    assert first(problem, [placed(problem, [0], 1.0), placed(problem, [1], 1.0)]) == 1
    full = placed(problem, [1], 1.0)
    lean = replace(full, timeline=replace(full.timeline, peak_bytes=full.timeline.peak_bytes // 2))
    assert first(problem, [full, lean]) == 1
    assert first(problem, [full, full]) == 0


def test_the_simplest_within_the_error_range_is_chosen_and_explained(problem):
    many, few = placed(problem, [0, 1, 2], 1.0), placed(problem, [0], 1.08)
    assert ranked(problem, [many, few], "time", 0.09) == [1, 0]
    assert ranked(problem, [many, placed(problem, [0], 1.1)], "time", 0.09) == [0, 1]
    # Memory is counted, not timed: its ties stay narrow.
    assert ranked(problem, [many, few], "memory", 0.09) == ranked(problem, [many, few], "memory")
    assert objective_text(problem, few, [many], "time", 0.09) == (
        "it is the simplest within the error range: on [0, 1, 2] is 7 % shorter, and predictions "
        "of two candidates are comparable within 9 %"
    )


def test_families_are_ranked_by_simplicity(problem):
    def shared(replicas, **options):
        plan = Plan().having(Parallel(replicas=replicas, **options))
        return replace(placed(problem, [0, 1], 1.0), plan=plan)

    one, half = Replica(devices=("gpu0",), microbatches=(4,)), (2, 2)
    ddp = tuple(Replica(devices=(name,), microbatches=(2,)) for name in ("gpu0", "gpu1"))
    staged = Replica(devices=("gpu0", "gpu1"), microbatches=half, cuts=(3,))
    tried = [
        placed(problem, [0, 1], 1.0), shared((staged,)), shared(ddp, zero=3), shared(ddp),
        shared((replace(one, microbatches=half),)), shared((one,)),
    ]  # fmt: skip
    assert ranked(problem, tried, "time", 0.09) == [5, 4, 3, 2, 1, 0]


def test_the_cheapest_step_is_chosen_where_that_is_the_goal(problem):
    fast, slow = placed(problem, [0, 1, 2], 1.0), placed(problem, [1], 2.0)
    assert first(problem, [fast, slow]) == 0
    assert first(problem, [fast, slow], "cost") == 1
    # Without prices, device time counts: 3 x 1.0 against 1 x 3.5.
    unknown = make_problem(GRAPH, "3xrtx3090")
    tried = [placed(unknown, [0, 1, 2], 1.0), placed(unknown, [0], 3.5)]
    assert first(unknown, tried, "cost") == 0
    assert first(unknown, [tried[0], placed(unknown, [0], 2.9)], "cost") == 1


def test_a_plan_that_is_nearly_as_fast_on_far_fewer_devices_is_told(problem):
    tried = [placed(problem, [0, 1, 2], 1.0), placed(problem, [0], 1.2)]
    assert efficient(tried, 0) == 1
    assert efficient([tried[0], placed(problem, [0], 2.9)], 0) is None
    assert efficient(tried, 1) is None
    # Of two that are tied the first, which is the plainest.
    assert efficient([*tried, placed(problem, [0], 1.199)], 0) == 1
    told = cost_efficiency_text(tried, 0)
    assert told == "on [0] takes 20 % longer on 1 device instead of 3 (--objective cost)"
    assert not cost_efficiency_text(tried, 1)
    # Chosen for its memory although it is longer: nothing is "-20 % longer".
    assert not cost_efficiency_text([placed(problem, [0, 1, 2], 1.2), placed(problem, [0], 1.0)], 0)


def test_why_a_plan_was_chosen_is_told_by_what_was_wanted(problem):
    """A longer step is never said to take no longer."""
    fast, slow = placed(problem, [0, 1, 2], 1.0), placed(problem, [1], 2.0)
    assert objective_text(problem, fast, [slow], "time") == "its step is 50 % shorter than on [1]"
    assert objective_text(problem, fast, [fast], "time") == "it takes no longer than on [0, 1, 2]"
    cheap = objective_text(problem, slow, [fast], "cost")
    assert cheap.startswith("its steps take 74 % less money than on [0, 1, 2]")
    assert cheap.endswith(", and its step 100 % longer")
    peaks = fast.timeline.peak_bytes
    lean = replace(slow, timeline=replace(slow.timeline, peak_bytes=peaks * 0 + 2**30))
    full = replace(fast, timeline=replace(fast.timeline, peak_bytes=peaks * 0 + 2 * 2**30))
    told = objective_text(problem, lean, [full], "memory")
    assert told.startswith("its fullest device is ")
    assert told.endswith(" %, and its step 100 % longer")
    unknown = make_problem(GRAPH, "3xrtx3090")
    one, three = placed(unknown, [0], 2.0), placed(unknown, [0, 1, 2], 1.0)
    assert "33 % less device time than" in objective_text(unknown, one, [three], "cost")


def test_one_device_is_one_row_unless_only_another_order_fits():
    alone = compare(make_problem(GRAPH, "1xv100-16g"))
    assert [c.planner for c in alone.candidates] == ["one-device"]
    assert num_devices(alone.candidates[0]) == 1
    asked = compare(make_problem(GRAPH, "1xv100-16g"), ["m-topo", "m-etf"])
    assert [c.planner for c in asked.candidates] == ["m-topo", "m-etf"]


def test_an_unknown_objective_is_refused():
    with pytest.raises(UsageError, match="unknown objective 'tim'"):
        plan_graph(GRAPH, "2xt4", objective="tim")
    assert set(GOALS) == {"step", "throughput", "time", "cost", "memory"}
    quick, usual = (plan_graph(GRAPH, "1xt4", **goal) for goal in ({"objective": "step"}, {}))
    assert quick.step_s == usual.step_s
