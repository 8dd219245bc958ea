"""Evaluating a plan gives the numbers of simulating it, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import joined, plans, problem_of, problems

from hocket.base.errors import UsageError
from hocket.graph.generators import generate
from hocket.plan.plan import Plan
from hocket.simulate.engine import simulate
from hocket.simulate.evaluate import Changes, Evaluator, Score, changes_of
from hocket.simulate.lowering import order_priority


def _is_better(score, other, tolerance):
    """Less overflow, else a step shorter by more than rounding, else no longer and less moved."""
    if score.overflow_bytes != other.overflow_bytes:
        return score.overflow_bytes < other.overflow_bytes
    is_shorter = score.step_s < other.step_s * (tolerance - 1e-9)
    return is_shorter or (score.step_s <= other.step_s and score.moved_bytes < other.moved_bytes)


def _simulated(problem, plan):
    timeline = simulate(problem, plan)
    over = np.maximum(timeline.peak_bytes - problem.memory_bytes, 0).sum()
    moved = problem.graph.tensor_bytes[timeline.transfer_tensor].sum()
    return Score(float(over), timeline.makespan_s, float(moved)), timeline


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_evaluator_agrees_with_the_simulator_on_plans_one_after_another(data):
    problem = data.draw(problems(max_ops=10, has_streams=True))
    evaluate = Evaluator(problem)
    for _ in range(3):
        plan = data.draw(plans(problem))
        expected, timeline = _simulated(problem, plan)
        assert evaluate.plan(plan) == expected
        np.testing.assert_array_equal(evaluate.op_start_s, timeline.op_start_s)
        np.testing.assert_array_equal(evaluate.op_end_s, timeline.op_end_s)
        np.testing.assert_array_equal(evaluate.peak_bytes, timeline.peak_bytes)


@pytest.mark.parametrize("transfers", ["shared", "queued", "parallel"])
def test_evaluator_agrees_with_the_simulator_on_a_training_step(transfers):
    graph = generate("gnmt", 300)
    problem = problem_of(graph, joined(4, 1e9, 1e-5), graph.flops / 1e13, transfers)
    evaluate = Evaluator(problem)
    for seed in range(3):
        random = np.random.default_rng(seed)
        device_of = random.integers(0, 4, graph.num_ops).astype(np.int32)
        plan = Plan().placing(device_of, priority=random.permutation(graph.num_ops) * 1.0)
        assert evaluate.plan(plan) == _simulated(problem, plan)[0]


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_first_better_stops_at_the_first_change_that_the_simulator_finds_better(data):
    problem = data.draw(problems(max_ops=6, max_devices=3, has_streams=True))
    plan = data.draw(plans(problem, orders=("priority",)))
    evaluate = Evaluator(problem)
    best = evaluate.plan(plan)
    num_ops, num_devices = problem.graph.num_ops, problem.cluster.num_devices
    op, device = np.divmod(np.arange(num_ops * num_devices), num_devices)
    changes = changes_of(np.arange(len(op) + 1), op, device.copy(), plan.priority[op])
    found = evaluate.first_better(changes, best)
    for which in range(len(op) if found < 0 else found + 1):
        device_of = plan.device_of.copy()
        device_of[op[which]] = device[which]
        score = _simulated(problem, Plan().placing(device_of, priority=plan.priority))[0]
        slightly = 1 - 1e-9
        is_better = (
            score.overflow_bytes < best.overflow_bytes
            or (
                score.overflow_bytes == best.overflow_bytes
                and (score.step_s < best.step_s * slightly)
            )
            or (score[:2] <= best[:2] and score < best)
        )
        assert is_better == (which == found)
    left = plan.device_of.copy()
    if found >= 0:
        left[op[found]] = device[found]
    np.testing.assert_array_equal(evaluate.runs.device, left)
    np.testing.assert_array_equal(evaluate.runs.priority, plan.priority)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=30)
def test_walk_keeps_what_is_good_enough_and_remembers_the_best(data):
    problem = data.draw(problems(max_ops=6, max_devices=3, has_streams=True))
    plan = data.draw(plans(problem, orders=("priority",)))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    num, num_ops = 12, problem.graph.num_ops
    op = random.integers(0, num_ops, num)
    device = random.integers(0, problem.cluster.num_devices, num)
    partner = np.where(random.random(num) < 0.5, random.integers(0, num_ops, num), -1)
    tolerance = 1 + random.exponential(0.1, num)
    nothing = np.full(num, np.nan)
    changes = Changes(np.arange(num + 1), op, device.copy(), nothing, partner, tolerance)
    evaluate = Evaluator(problem)
    found = evaluate.walk(changes, evaluate.plan(plan))

    present, score = plan, _simulated(problem, plan)[0]
    best = Score(np.inf, np.inf, np.inf)
    for which in range(num):
        device_of, priority = present.device_of.copy(), present.priority.copy()
        if partner[which] >= 0:
            pair = [op[which], partner[which]]
            priority[pair] = priority[pair[::-1]]
        else:
            device_of[op[which]] = device[which]
        candidate = Plan().placing(device_of, priority=priority)
        tried = _simulated(problem, candidate)[0]
        if _is_better(tried, score, tolerance[which]):
            present, score = candidate, tried
            if _is_better(tried, best, 1.0):
                best = tried
    assert found[0] == best
    if best.step_s < np.inf:
        assert evaluate(found[1], found[2]) == best


def test_an_order_that_deadlocks_has_no_end():
    graph = generate("chain", 3)
    problem = problem_of(graph, joined(1), np.ones(3))
    backwards = Plan().placing(np.zeros(3, np.int32), by_device=(np.array([2, 1, 0], np.int32),))
    score = Evaluator(problem).plan(backwards)
    assert (score.overflow_bytes, score.step_s) == (np.inf, np.inf)


def test_order_priority_gives_positions_on_each_device():
    order = (np.array([2, 0], np.int32), np.array([1, 3], np.int32))
    assert order_priority(order).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_plan_without_placement_is_refused():
    problem = problem_of(generate("chain", 3), joined(1), np.ones(3))
    with pytest.raises(UsageError, match="does not say where"):
        Evaluator(problem).plan(Plan())
