"""Repairs never lack more memory than the plan that came in, and tight problems get a plan."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.memory_cases import (
    need_bytes,
    on_joined,
    tight,
    training_steps,
    with_memory,
)
from simulate.problems import joined, plans, problem_of, problems

from hocket.base.units import parse_bytes
from hocket.graph import GraphBuilder, Phase, Role
from hocket.graph.coarsen import bound_ops
from hocket.graph.files import read_graph
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.planners.placement.memory_fit import (
    attempt,
    memory_layers,
    memory_split,
    memory_units,
    spread_memory,
)
from hocket.planners.placement.memory_shortage import (
    explain_shortage,
    held_at_end_bytes,
    tie_needs,
)
from hocket.simulate.engine import simulate
from hocket.simulate.verify import update_violations, violations

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "placement"
SHARES = ((1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 1, 1))


def overflow_bytes(problem, plan):
    return attempt(problem, plan).overflow_bytes


def broken_rules(problem, plan):
    return [v for v in violations(plan, problem) if v.rule != "memory"]


# ── units ────────────────────────────────────────────────────────────────────────────────────────


@given(problem=problems(max_ops=16), data=st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_ties_are_enough_for_a_legal_plan_and_larger_units_keep_them(problem, data):
    graph = problem.graph
    tie_of, unit_of = bound_ops(graph), memory_units(graph)
    last = problem.cluster.num_devices - 1
    count = int(tie_of.max()) + 1
    device_of_tie = data.draw(st.lists(st.integers(0, last), min_size=count, max_size=count))
    device_of = np.array(device_of_tie, dtype=np.int32)[tie_of]
    assert list(update_violations(device_of, problem)) == []
    for larger in (unit_of, memory_layers(graph, unit_of)):
        for tie in range(count):
            assert len(set(larger[tie_of == tie].tolist())) == 1


def test_layers_of_a_recurrent_net_are_its_weights():
    graph = generate("gnmt", 500, 0)
    assert int(memory_layers(graph, memory_units(graph)).max()) + 1 == graph.meta["layers"] + 1


# ── promises of the planners ─────────────────────────────────────────────────────────────────────


@given(problem=problems(max_ops=16), data=st.data(), filled=st.sampled_from([0.3, 0.7, 1.5]))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_spread_memory_never_lacks_more_and_stays_legal(problem, data, filled):
    problem = tight(problem, (1,) * problem.cluster.num_devices, filled)
    plan = data.draw(plans(problem))
    tie_of = bound_ops(problem.graph)
    first = np.unique(tie_of, return_index=True)[1]
    plan = plan.placing(plan.device_of[first][tie_of])
    fitted = spread_memory(problem, plan)
    assert overflow_bytes(problem, fitted) <= overflow_bytes(problem, plan)
    assert broken_rules(problem, fitted) == []
    if overflow_bytes(problem, plan) == 0:
        assert fitted is plan


@given(graph=training_steps(), num_devices=st.sampled_from([2, 3, 4]))
@settings(derandomize=True, deadline=None, max_examples=5)
def test_repairs_are_deterministic(graph, num_devices):
    problem = tight(on_joined(graph, num_devices), (1,) * num_devices, 1.1)
    start = Plan().placing(np.zeros(graph.num_ops, dtype=np.int32))
    for planner in (spread_memory, memory_split):
        first, second = planner(problem, start), planner(problem, start)
        assert np.array_equal(first.device_of, second.device_of)
        assert broken_rules(problem, first) == []


@given(graph=training_steps(min_layers=60), shares=st.sampled_from(SHARES))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_steps_of_small_parts_fit_at_the_promised_share(graph, shares):
    problem = tight(on_joined(graph, len(shares)), shares)
    assert tie_needs(graph, bound_ops(graph)).max() < problem.memory_bytes.min() / 6
    plan = memory_split(problem, Plan())
    assert overflow_bytes(problem, plan) == 0
    assert broken_rules(problem, plan) == []


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize(("family", "num_ops"), [("transformer", 1000), ("transformer", 3000)])
def test_generated_models_fit_at_the_promised_share(family, num_ops, shares):
    graph = generate(family, num_ops, 1)
    problem = tight(make_problem(graph, f"{len(shares)}xv100-16g"), shares)
    assert overflow_bytes(problem, memory_split(problem, Plan())) == 0


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", ["resnet50", "wide-resnet"])
def test_captured_models_fit_at_the_promised_share(name, shares, captured):
    problem = tight(make_problem(captured(name), f"{len(shares)}xv100-16g"), shares)
    assert overflow_bytes(problem, memory_split(problem, Plan())) == 0


@pytest.fixture(scope="module")
def captured():
    """Graphs of captured models, each captured once."""
    pytest.importorskip("torch")
    from hocket.capture import capture, load_model

    graphs = {}

    def graph_of(name):
        if name not in graphs:
            graphs[name] = capture(*load_model(name, batch=8))
        return graphs[name]

    return graph_of


@pytest.mark.parametrize("shares", SHARES[1:], ids=str)
@pytest.mark.parametrize(
    "path",
    [
        "dnn-partitioning/throughput-inputs/OperatorGraphs/bert_L-12_training.json",
        "pipedream/profiler/image_classification/profiles/nasnetamobile/graph.txt",
        "pipedream/profiler/image_classification/profiles/resnet50/graph.txt",
    ],
    ids=lambda path: Path(path).parts[-2],
)
def test_public_graphs_fit_at_the_promised_share(path, shares):
    if not (PUBLIC / path).exists():
        pytest.skip("no ../shared/data beside the repository")
    graph = read_graph(PUBLIC / path)
    problem = tight(make_problem(graph, f"{len(shares)}xv100-16g"), shares)
    assert overflow_bytes(problem, memory_split(problem, Plan())) == 0


def test_split_of_a_chain_is_contiguous():
    graph = generate("transformer", 1000, 1)
    problem = make_problem(graph, "4xv100-16g")
    plan = memory_split(with_memory(problem, [need_bytes(problem)] * 4), Plan())
    blocks = [int(graph.module_of(op).split(".")[1]) for op in _block_ops(graph)]
    devices = [int(plan.device_of[op]) for op in _block_ops(graph)]
    by_block = [devices[blocks.index(block)] for block in sorted(set(blocks))]
    changes = sum(a != b for a, b in pairwise(by_block))
    assert changes == len(set(by_block)) - 1


def _block_ops(graph):
    return [op for op in range(graph.num_ops) if re.match(r"\w+\.\d+\.ln1", graph.module_of(op))]


def test_moves_keep_most_of_a_placement_that_almost_fits():
    graph = generate("transformer", 1000, 1)
    problem = tight(make_problem(graph, "4xv100-16g"), (1, 1, 1, 1), 0.8)
    start = memory_split(problem, Plan())
    peaks = simulate(problem, start).peak_bytes
    worst = int(np.argmax(peaks))
    smaller = list(problem.memory_bytes)
    smaller[worst] = int(peaks[worst] * 0.97)
    problem = with_memory(problem, smaller)
    fitted = spread_memory(problem, start)
    assert overflow_bytes(problem, fitted) == 0
    assert np.mean(fitted.device_of != start.device_of) < 0.1


def test_processors_take_what_accelerators_cannot_hold():
    graph = generate("transformer", 400, 1)
    problem = make_problem(graph, "1xv100-16g+1xcpu-core")
    is_cpu = [device.kind.is_cpu for device in problem.cluster.devices]
    need = need_bytes(problem)
    roomy = with_memory(problem, [need * 2 if cpu else int(need * 1.1) for cpu in is_cpu])
    scarce = with_memory(problem, [need * 2 if cpu else int(need * 0.7) for cpu in is_cpu])
    processor = is_cpu.index(True)
    assert not (memory_split(roomy, Plan()).device_of == processor).any()
    plan = memory_split(scarce, Plan())
    assert overflow_bytes(scarce, plan) == 0
    assert 0 < np.mean(plan.device_of == processor) < 0.7


def test_an_order_that_releases_early_is_enough_where_it_fits():
    builder = GraphBuilder("order")
    x = builder.tensor("x", 1, role=Role.INPUT)
    for index in range(4):
        first = builder.op(f"first{index}", reads=[x])
        made = builder.tensor(f"t{index}", 100, producer=first)
        builder.op(f"second{index}", reads=[made], phase=Phase.BACKWARD)
    graph = builder.build()
    problem = problem_of(graph, joined(2), np.ones(graph.num_ops))
    late = np.array([0.0 if name.startswith("first") else 1.0 for name in graph.op_names])
    plan = Plan().placing(np.zeros(graph.num_ops, dtype=np.int32), priority=late)
    problem = with_memory(problem, [250, 250])
    assert overflow_bytes(problem, plan) > 0
    fitted = spread_memory(problem, plan)
    assert overflow_bytes(problem, fitted) == 0
    assert np.array_equal(fitted.device_of, plan.device_of)


# ── what no plan can do, and what is said of it ──────────────────────────────────────────────────


@given(problem=problems(max_ops=16), data=st.data())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_no_plan_gets_below_the_stated_needs(problem, data):
    graph, tie_of = problem.graph, bound_ops(problem.graph)
    first = np.unique(tie_of, return_index=True)[1]
    device_of = data.draw(plans(problem, orders=("none",))).device_of[first][tie_of]
    peaks = simulate(problem, Plan().placing(device_of)).peak_bytes
    assert np.all(tie_needs(graph, tie_of) <= peaks[device_of[first]])
    assert held_at_end_bytes(graph) <= peaks.sum()


def test_shortage_names_the_op_that_is_larger_than_every_device():
    graph = generate("transformer", 100, 1)
    problem = make_problem(graph, "2xv100-16g")
    needs = tie_needs(graph, bound_ops(graph))
    problem = with_memory(problem, [int(needs.max()) - 10**6, int(needs.max()) - 10**7])
    shortage = explain_shortage(problem, [])
    assert shortage.device == "gpu0"
    assert shortage.lacking_bytes == 10**6
    assert "must sit with it needs" in shortage.message
    assert f"{shortage.device}, has" in shortage.message


def test_shortage_tells_when_the_step_holds_more_than_all_devices_have():
    graph = generate("transformer", 1000, 1)
    problem = make_problem(graph, "4xv100-16g")
    held = held_at_end_bytes(graph)
    shortage = explain_shortage(with_memory(problem, [held // 4 - 1] * 4), [])
    assert shortage.message.startswith("the step holds at least")
    assert shortage.lacking_bytes == held - 4 * (held // 4 - 1)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_smallest_change_of_a_shortage_really_fits(num_devices):
    graph = generate("transformer", 400, 1)
    problem = make_problem(graph, f"{num_devices}xv100-16g")
    problem = tight(problem, (1,) * num_devices, 1.0)
    best = memory_split(problem, Plan())
    shortage = explain_shortage(problem, [Plan().placing(np.zeros(graph.num_ops, np.int32))])
    assert shortage.lacking_bytes > 0
    assert shortage.device in problem.cluster.device_names
    memory = dict(zip(problem.cluster.device_names, problem.memory_bytes.tolist(), strict=True))
    extra = re.findall(r"([\d.]+ \w+) more on (\w+)", shortage.smallest_change)
    assert extra
    for size, device in extra:
        memory[device] += parse_bytes(size)
    larger = with_memory(problem, list(memory.values()))
    assert overflow_bytes(larger, spread_memory(larger, best)) == 0


def test_shortage_of_nothing_says_so():
    problem = make_problem(generate("chain", 20, 0), "2xv100-16g")
    assert explain_shortage(problem, [memory_split(problem, Plan())]).lacking_bytes == 0
