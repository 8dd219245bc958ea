"""Properties that every planner keeps, and what each one promises on its own."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from planners.fork_joins import fork_join
from planners.memory_cases import with_memory
from planners.tight_cases import tight_problem
from simulate.problems import joined, problem_of, problems

from hocket.base.errors import CheckError, NoFeasiblePlanError, UsageError
from hocket.graph import GraphBuilder, Phase, Role, Stream
from hocket.graph.coarsen import tied_ops
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.planners import PLANNERS, chain, find_planner
from hocket.planners.auto import portfolio
from hocket.planners.bounds import lower_bound
from hocket.planners.compare import compare
from hocket.planners.order import ORDERS
from hocket.planners.placement.baselines import layer_of
from hocket.planners.placement.coarse import hides_parallelism
from hocket.planners.placement.exact import try_all
from hocket.planners.placement.m_topo import unit_memory_bytes
from hocket.planners.registry import PLACERS, REFINERS
from hocket.simulate.engine import simulate
from hocket.simulate.verify import violations

SLOW = ("auto", "optimal", "throughput", "memory-split", "local-search", "spread-memory")
PLACING = tuple(PLANNERS)
QUICK = tuple(name for name in PLACING if name not in SLOW)


def planned(name, problem):
    """The plan of a planner, or None; those that need a placement start from one-device."""
    whole = f"one-device+{name}" if name in REFINERS else name
    try:
        return find_planner(whole)(problem, Plan(planner=name))
    except NoFeasiblePlanError:
        return None


def assert_legal_and_repeatable(name, problem):
    first = planned(name, problem)
    second = planned(name, problem)
    if first is None:
        assert second is None
        return
    broken = [v for v in violations(first, problem) if v.rule != "memory"]
    assert broken == []
    assert np.array_equal(first.device_of, second.device_of)
    for one, other in ((first.priority, second.priority), (first.by_device, second.by_device)):
        assert (one is None) == (other is None)
    if first.priority is not None:
        assert np.array_equal(first.priority, second.priority)
    for one, other in zip(first.by_device or (), second.by_device or (), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", QUICK)
@given(problem=problems())
@settings(derandomize=True, deadline=None, max_examples=30)
def test_every_planner_yields_a_legal_plan_again_and_again(name, problem):
    assert_legal_and_repeatable(name, problem)


@pytest.mark.parametrize("name", SLOW)
@given(problem=problems(max_ops=7))
@settings(derandomize=True, deadline=None, max_examples=6)
def test_thorough_planners_yield_legal_plans_again_and_again(name, problem):
    assert_legal_and_repeatable(name, problem)


@given(problem=problems())
@settings(derandomize=True, deadline=None, max_examples=8)
def test_auto_is_never_worse_than_what_it_tries(problem):
    *tried, best = portfolio(problem)
    assert best.planner == "auto"
    steps = [candidate.step_s for candidate in tried if candidate.step_s is not None]
    if steps:
        assert best.step_s <= min(steps)


@pytest.mark.parametrize("on", ["4xv100-16g", "1xv100-32g+2xt4"])
def test_auto_is_never_worse_than_what_a_user_can_name(on):
    problem = make_problem(fork_join(3, 5, 3), on)
    steps = {}
    for placer in PLACERS:
        if placer in ("optimal", "throughput"):  # they search for seconds, and auto leaves them out
            continue
        plan = find_planner(placer)(problem, Plan())
        steps[placer] = simulate(problem, plan).makespan_s
        for order, reorder in ORDERS.items():
            steps[f"{placer}+order-{order}"] = simulate(problem, reorder(problem, plan)).makespan_s
    best = min(steps, key=lambda name: steps[name])
    assert simulate(problem, planned("auto", problem)).makespan_s <= steps[best], best


def test_auto_does_not_search_beyond_a_plan_that_is_proven_to_be_the_shortest(monkeypatch):
    builder = GraphBuilder("chain")
    tensor = builder.tensor("batch", 4, role=Role.INPUT)
    for index in range(70):
        op = builder.op(f"op{index}", reads=[tensor], flops=1e9)
        tensor = builder.tensor(f"out{index}", 4, producer=op)
    problem = make_problem(builder.build(), "2xv100-16g")

    def search(*_, **__):
        raise AssertionError("a shorter step was looked for")

    monkeypatch.setattr(import_module("hocket.planners.auto"), "local_search", search)
    best = portfolio(problem)[-1]
    assert best.step_s == pytest.approx(lower_bound(problem).seconds, rel=1e-9)


@pytest.mark.parametrize("name", ["m-etf", "m-sct"])
def test_groups_that_hide_parallelism_do_not_hide_it_from_the_published_algorithms(name):
    problem = make_problem(fork_join(3, 5, 3), "4xv100-16g")
    plan, fine = planned(name, problem), planned(f"{name}-fine", problem)
    assert simulate(problem, plan).makespan_s <= simulate(problem, fine).makespan_s
    assert plan.claims.form == "ops"
    assert hides_parallelism(make_problem(fork_join(40, 5, 3), "4xv100-16g"))
    assert not hides_parallelism(make_problem(generate("chain", 60, 0), "4xv100-16g"))


@pytest.mark.parametrize("seed", [12, 19, 20])
def test_auto_finds_the_shortest_step_where_memory_is_tight(seed):
    problem = tight_problem(seed, num_ops=7)
    exact = try_all(problem, Plan(), 1_000_000)
    assert exact.is_complete
    auto_s = simulate(problem, planned("auto", problem)).makespan_s
    assert auto_s == pytest.approx(exact.bound_s, rel=1e-8)


@given(problem=problems())
@settings(derandomize=True, deadline=None, max_examples=8)
def test_compare_chooses_the_shortest_feasible_step(problem):
    comparison = compare(problem)
    steps = [c.step_s for c in comparison.candidates if c.step_s is not None]
    if comparison.winner is None:
        assert steps == []
    else:
        assert comparison.winner.step_s == min(steps)
        for candidate in comparison.candidates:
            assert candidate.reason


@pytest.mark.parametrize("name", PLACING)
def test_a_graph_without_ops_is_planned(name):
    problem = make_problem(GraphBuilder("nothing").build(), "2xv100-16g")
    assert planned(name, problem).device_of.tolist() == []


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_an_op_that_no_device_can_run_is_named(objective):
    problem = make_problem(generate("chain", 4, 0), "2xv100-16g", objective=objective)
    op_s = problem.costs.op_s.copy()
    op_s[:, 2] = np.inf
    problem = replace(problem, op_costs=replace(problem.costs, op_s=op_s))
    with pytest.raises(NoFeasiblePlanError, match=f"run op {problem.graph.op_names[2]!r}"):
        compare(problem)


@pytest.mark.parametrize(
    ("objective", "needle"),
    [("latency", "what fits is not contiguous"), ("throughput", "what fits is not contiguous")],
)
def test_what_fits_only_where_paths_may_come_back_is_told(objective, needle):
    builder = GraphBuilder("there and back")
    flow = builder.tensor("x", 1, role=Role.INPUT)
    for index, group in enumerate((0, -1, 0)):
        weight = builder.tensor(f"w{index}", 100, role=Role.PARAMETER)
        op = builder.op(f"op{index}", reads=[flow, weight], group=group)
        flow = builder.tensor(f"y{index}", 1, producer=op)
    problem = with_memory(problem_of(builder.build(), joined(2), np.ones(3)), [220, 220])
    comparison = compare(replace(problem, objective=objective, contiguous=True))
    assert comparison.winner is None
    assert needle in comparison.why


def test_unknown_planner_is_refused_with_a_suggestion():
    with pytest.raises(UsageError) as caught:
        find_planner("m-tpo")
    assert caught.value.hint == "did you mean 'm-topo'?"


def test_chain_refuses_a_planner_that_breaks_a_rule():
    problem = make_problem(generate("chain", 10, 0), "2xv100-16g")

    def half(problem, plan):
        return Plan().placing(np.zeros(3, dtype=np.int32))

    with pytest.raises(CheckError, match="3 placements for"):
        chain(half)(problem, Plan())


def _training_chain(num_layers: int, layer_bytes: int = 100) -> GraphBuilder:
    """A chain of layers with mirrored backward ops and an optimizer op per layer."""
    builder = GraphBuilder("chain")
    made, weights = [], []
    previous = builder.tensor("x", 8, role=Role.INPUT)
    for layer in range(num_layers):
        weight = builder.tensor(f"w{layer}", layer_bytes, role=Role.PARAMETER)
        op = builder.op(
            f"f{layer}", reads=[previous, weight], module=f"h.{layer}.fc", flops=1e9, group=layer
        )
        previous = builder.tensor(f"y{layer}", 10, producer=op)
        made.append(previous)
        weights.append(weight)
    gradient = previous
    for layer in reversed(range(num_layers)):
        op = builder.op(
            f"b{layer}",
            reads=[gradient, made[layer], weights[layer]],
            phase=Phase.BACKWARD,
            partner=layer,
            flops=2e9,
        )
        gradient = builder.tensor(f"g{layer}", 10, producer=op)
        weight_gradient = builder.tensor(f"wg{layer}", layer_bytes, producer=op, role=Role.GRADIENT)
        builder.op(
            f"o{layer}",
            reads=[weights[layer], weight_gradient],
            phase=Phase.OPTIMIZER,
            group=layer,
        )
    return builder


def _devices_of_forward_ops(graph, plan):
    return plan.device_of[graph.op_phase == Phase.FORWARD].tolist()


def test_tied_ops_join_backward_and_optimizer_with_their_forward_op():
    graph = _training_chain(3).build()
    assert tied_ops(graph).tolist() == [int(name[1:]) for name in graph.op_names]


def test_memory_of_units_counts_every_storage_once():
    graph = _training_chain(4).build()
    need = unit_memory_bytes(graph, tied_ops(graph))
    assert need.sum() == graph.held_bytes.sum() + graph.workspace_bytes.sum()


def test_m_topo_fills_devices_in_order_and_never_goes_back():
    graph = _training_chain(8).build()
    problem = make_problem(graph, "4xv100-16g")
    plan = find_planner("m-topo")(problem, Plan())
    forward = _devices_of_forward_ops(graph, plan)
    assert forward == sorted(forward)
    # Equal layers: the cap is total/4 + one layer, so each device takes 3 until none are left.
    assert forward == [0, 0, 0, 1, 1, 1, 2, 2]


def test_m_topo_shares_follow_the_memory_of_unequal_devices():
    graph = _training_chain(9).build()
    problem = make_problem(graph, "1xv100-32g+1xv100-16g")
    plan = find_planner("m-topo")(problem, Plan())
    forward = _devices_of_forward_ops(graph, plan)
    assert forward.count(0) == 7
    assert forward.count(1) == 2


def test_layer_blocks_gives_each_device_the_same_number_of_layers():
    graph = _training_chain(12).build()
    problem = make_problem(graph, "4xv100-16g")
    plan = find_planner("layer-blocks")(problem, Plan())
    for op, name in enumerate(graph.op_names):
        assert plan.device_of[op] == int(name[1:]) // 3


def test_layer_blocks_splits_by_ops_where_modules_are_unknown():
    builder = GraphBuilder("plain")
    previous = builder.tensor("x", 8, role=Role.INPUT)
    for index in range(8):
        op = builder.op(f"op{index}", reads=[previous], flops=1.0)
        previous = builder.tensor(f"t{index}", 8, producer=op)
    problem = make_problem(builder.build(), "2xv100-16g")
    plan = find_planner("layer-blocks")(problem, Plan())
    assert plan.device_of.tolist() == [0] * 4 + [1] * 4


def test_layers_are_module_paths_up_to_the_first_number():
    builder = GraphBuilder("layers")
    previous = builder.tensor("x", 8, role=Role.INPUT)
    for index, module in enumerate(["embed", "h.0.attn", "h.0.mlp", "norm", "h.1", "head"]):
        op = builder.op(f"op{index}", reads=[previous], module=module)
        previous = builder.tensor(f"t{index}", 8, producer=op)
    assert layer_of(builder.build()).tolist() == [0, 0, 0, 0, 1, 1]


def test_one_device_takes_the_fastest_that_fits():
    graph = _training_chain(4, layer_bytes=2**30).build()
    fits_everywhere = make_problem(graph, "1xt4+1xv100-32g")
    plan = find_planner("one-device")(fits_everywhere, Plan())
    assert set(plan.device_of.tolist()) == {1}


def test_one_device_shows_the_smallest_shortage_where_nothing_fits():
    graph = _training_chain(4, layer_bytes=100 * 2**30).build()
    problem = make_problem(graph, "1xt4+1xv100-32g")
    comparison = compare(problem, ["one-device"])
    assert comparison.winner is None
    assert set(comparison.candidates[0].plan.device_of.tolist()) == {1}
    assert "the largest device" in comparison.why


def test_devices_that_their_headroom_fills_are_told_so():
    cluster = make_problem(_training_chain(2).build(), "2xt4").cluster
    small = tuple(replace(device, memory_bytes=100 * 2**20) for device in cluster.devices)
    problem = make_problem(_training_chain(2).build(), replace(cluster, devices=small))
    comparison = compare(problem, ["m-topo", "m-etf"])
    assert comparison.winner is None
    assert "has 0 B beside a headroom of 100.0 MiB" in comparison.why


def test_bottleneck_of_the_winner_is_part_of_the_reason():
    problem = make_problem(generate("transformer", 400, 1), "2xv100-16g")
    comparison = compare(problem)
    assert comparison.why.startswith("chosen because ")
    assert "limited by" in comparison.why
    timeline = simulate(problem, comparison.winner.plan)
    assert timeline.makespan_s == comparison.winner.step_s


def test_m_topo_places_a_layer_where_it_stands_though_its_views_are_ready_at_once():
    builder = GraphBuilder("views")
    previous = builder.tensor("x", 100, role=Role.INPUT)
    for layer in range(6):
        weight = builder.tensor(f"w{layer}", 100, role=Role.PARAMETER)
        view = builder.op(f"view{layer}", reads=[weight])
        turned = builder.tensor(f"wt{layer}", 100, producer=view, alias_of=weight)
        op = builder.op(f"mm{layer}", reads=[previous, turned], flops=1.0)
        previous = builder.tensor(f"y{layer}", 100, producer=op)
        # Ready at once too: a backward op that reads only the parameter.
        builder.op(f"b{layer}", reads=[weight], phase=Phase.BACKWARD, partner=op)
    graph = builder.build()
    problem = make_problem(graph, "2xv100-16g")
    device_of = find_planner("m-topo")(problem, Plan()).device_of
    by_name = dict(zip(graph.op_names, device_of.tolist(), strict=True))
    assert [by_name[f"mm{layer}"] for layer in range(6)] == [0, 0, 0, 0, 1, 1]
    for layer in range(6):
        assert by_name[f"view{layer}"] == by_name[f"mm{layer}"] == by_name[f"b{layer}"]


def test_layer_blocks_moves_what_a_device_cannot_run():
    problem = make_problem(_training_chain(6).build(), "1xv100-16g+1xt4")
    op_s = problem.costs.op_s.copy()
    op_s[problem.costs.device_row[0], 1] = np.inf
    problem = replace(problem, op_costs=replace(problem.costs, op_s=op_s))
    comparison = compare(problem)
    by_name = {candidate.planner: candidate for candidate in comparison.candidates}
    assert by_name["layer-blocks"].plan.device_of[1] == 1
    assert by_name["layer-blocks"].feasible
    assert set(by_name["one-device"].plan.device_of.tolist()) == {1}


def test_compare_says_when_there_was_nothing_to_compare_with():
    comparison = compare(make_problem(generate("chain", 9, 0), "2xt4"), ["m-topo"])
    assert "it is the only candidate" in comparison.why


def test_graphs_with_further_streams_are_refused():
    builder = GraphBuilder("rewritten")
    builder.op("copy", stream=Stream.COPY_OUT)
    problem = make_problem(builder.build(), "2xv100-16g")
    with pytest.raises(UsageError, match="further streams"):
        compare(problem)
