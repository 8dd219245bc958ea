"""Cases whose result can be written down, errors, and sameness across processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simulate.oracle import Oracle
from simulate.problems import costs_of, device, device_kind, joined, problem_of

from hocket.base.errors import CheckError, UsageError
from hocket.graph import Graph, GraphBuilder, Role
from hocket.hardware import Cluster, Link
from hocket.plan.plan import Plan
from hocket.plan.problem import TRANSFER_MODES, Problem
from hocket.simulate import kernels_are_compiled, simulate
from hocket.simulate.evaluate import Evaluator
from hocket.simulate.timeline import Timeline


def chain(num_ops: int, size_bytes: int = 8) -> Graph:
    builder = GraphBuilder("chain")
    tensor = builder.tensor("x", size_bytes, role=Role.INPUT)
    for index in range(num_ops):
        op = builder.op(f"op{index}", reads=[tensor])
        tensor = builder.tensor(f"t{index}", size_bytes, producer=op)
    return builder.build()


def fan_out(num_readers: int, size_bytes: int = 8) -> Graph:
    """One tensor read by all."""
    builder = GraphBuilder("fan-out")
    source = builder.op("source")
    shared = builder.tensor("shared", size_bytes, producer=source)
    for index in range(num_readers):
        builder.op(f"reader{index}", reads=[shared])
    return builder.build()


def run(graph: Graph, cluster: Cluster, op_s, device_of, mode="shared", **order) -> Timeline:
    plan = Plan(planner="by hand").placing(np.array(device_of), **order)
    return simulate(problem_of(graph, cluster, op_s, mode), plan)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", TRANSFER_MODES)
def test_chain_on_one_device_takes_the_sum(mode):
    timeline = run(chain(5), joined(2), [1.0, 2.0, 3.0, 4.0, 0.0], [1] * 5, mode)
    assert timeline.makespan_s == 10
    assert len(timeline.transfer_tensor) == 0


@pytest.mark.parametrize("mode", TRANSFER_MODES)
def test_chain_across_two_devices_pays_each_transfer(mode):
    timeline = run(chain(4), joined(2, 4.0, 0.5), [1.0] * 4, [0, 1, 0, 1], mode)
    assert timeline.makespan_s == 4 * 1.0 + 3 * (0.5 + 8 / 4.0)
    assert timeline.transfer_src.tolist() == [0, 1, 0]


@pytest.mark.parametrize("mode", TRANSFER_MODES)
def test_tensor_is_sent_once_to_many_readers(mode):
    timeline = run(fan_out(6), joined(3, 8.0), [1.0] * 7, [0, 1, 1, 1, 2, 2, 0], mode)
    pairs = zip(timeline.transfer_tensor.tolist(), timeline.transfer_dst.tolist(), strict=True)
    assert list(pairs) == [(0, 1), (0, 2)]


def two_flows(mode: str) -> Timeline:
    builder = GraphBuilder("two")
    op = builder.op("make")
    tensors = [builder.tensor(name, 8, producer=op) for name in "ab"]
    for tensor in tensors:
        builder.op(f"read{tensor}", reads=[tensor])
    return run(builder.build(), joined(2, 8.0), [0.0, 0.0, 0.0], [0, 1, 1], mode)


@pytest.mark.parametrize(
    ("mode", "ends"), [("shared", [2, 2]), ("queued", [1, 2]), ("parallel", [1, 1])]
)
def test_two_transfers_on_one_link_follow_the_mode(mode, ends):
    assert two_flows(mode).transfer_end_s.tolist() == ends


def test_late_transfer_shares_only_what_is_left():
    """The first has the link alone for one second, then both at half rate."""
    builder = GraphBuilder("late")
    for name, size in (("a", 8), ("b", 8)):
        op = builder.op(f"make {name}")
        builder.op(f"read {name}", reads=[builder.tensor(name, size, producer=op)])
    graph = builder.build()
    timeline = run(graph, joined(2, 4.0), [0.0, 0.0, 1.0, 0.0], [0, 1, 0, 1])
    # a: 4 bytes in [0, 1], 4 more at 2 B/s until 3; b: 4 bytes until 3, the rest at 4 B/s.
    assert timeline.transfer_end_s.tolist() == [3.0, 4.0]


def test_transfer_that_takes_the_place_of_another_leaves_the_rate():
    """One ends when another begins, while a third flows on: its number of sharers stays two."""
    builder = GraphBuilder("relay")
    first = builder.op("make short and long")
    short = builder.tensor("short", 1, producer=first)
    long = builder.tensor("long", 10, producer=first)
    second = builder.op("make late")
    late = builder.tensor("late", 1, producer=second)
    for tensor in (short, long, late):
        builder.op(f"read{tensor}", reads=[tensor])
    graph = builder.build()
    timeline = run(graph, joined(2, 1.0), [0.0, 2.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 1])
    ends = dict(zip(timeline.transfer_tensor.tolist(), timeline.transfer_end_s, strict=True))
    assert ends == {short: 2.0, late: 4.0, long: 12.0}


def bus(num_devices: int, bandwidth_bps: float) -> Cluster:
    kind = device_kind()
    names = tuple(f"gpu{index}" for index in range(num_devices))
    return Cluster(
        name="bus",
        devices=tuple(device(name, kind) for name in names),
        hosts=("host0",),
        links=(Link(name="bus", ends=names, bandwidth_bps=bandwidth_bps, latency_s=0.0),),
    )


@pytest.mark.parametrize(("mode", "last"), [("shared", 2.0), ("queued", 1.0), ("parallel", 1.0)])
def test_bus_is_shared_by_pairs_that_have_nothing_in_common(mode, last):
    builder = GraphBuilder("pairs")
    for index in range(2):
        op = builder.op(f"make{index}")
        builder.op(f"read{index}", reads=[builder.tensor(f"t{index}", 8, producer=op)])
    timeline = run(builder.build(), bus(4, 8.0), [0.0] * 4, [0, 1, 2, 3], mode)
    assert timeline.makespan_s == last


def test_half_duplex_queues_send_and_receive_behind_each_other():
    builder = GraphBuilder("exchange")
    for index in range(2):
        op = builder.op(f"make{index}")
        builder.op(f"read{index}", reads=[builder.tensor(f"t{index}", 8, producer=op)])
    graph = builder.build()
    assert run(graph, bus(3, 8.0), [0.0] * 4, [0, 1, 1, 0], "queued").makespan_s == 2
    assert run(graph, joined(2, 8.0), [0.0] * 4, [0, 1, 1, 0], "queued").makespan_s == 1


def test_what_an_op_of_no_length_makes_ready_queues_behind_what_was_ready_before_it():
    builder = GraphBuilder("rounds")
    first = builder.tensor("t0", 8, producer=builder.op("long"))
    early = builder.tensor("t1", 8, producer=builder.op("no length", reads=[first]))
    late = builder.tensor("t2", 8, producer=builder.op("elsewhere"))
    builder.op("read t1", reads=[early])
    builder.op("read t2", reads=[late])
    problem = problem_of(builder.build(), joined(3, 8.0), [1.0, 0.0, 1.0, 0.0, 0.0], "queued")
    plan = Plan().placing(np.array([0, 0, 1, 2, 2], dtype=np.int32))
    timeline, oracle = simulate(problem, plan), Oracle(problem, plan).run()
    # Both are ready at 1, t1 in a later round than t2: by (ready, tensor) t1 would go first.
    assert timeline.transfer_ready_s.tolist() == [1, 1]
    assert timeline.transfer_tensor.tolist() == [late, early]
    assert timeline.transfer_start_s.tolist() == [1, 2]
    assert [oracle.op_end[3], oracle.op_end[4]] == timeline.op_end_s[3:].tolist() == [3, 2]
    evaluator = Evaluator(problem)
    assert evaluator.plan(plan).step_s == 3
    assert evaluator.op_end_s.tolist() == timeline.op_end_s.tolist()


def test_control_tensor_costs_the_latency():
    builder = GraphBuilder("control")
    op = builder.op("first")
    builder.op("second", reads=[builder.tensor("after", 0, producer=op, role=Role.CONTROL)])
    timeline = run(builder.build(), joined(2, 8.0, 0.25), [1.0, 1.0], [0, 1])
    assert timeline.makespan_s == 2.25


def test_stated_tensor_times_replace_bytes():
    graph, cluster = chain(2, size_bytes=10**9), joined(2, 1.0, 0.5)
    costs = costs_of(graph, cluster, [1.0, 1.0], np.array([0.0, 3.0, 0.0]))
    problem = Problem(work=graph, cluster=cluster, op_costs=costs)
    assert simulate(problem, Plan().placing(np.array([0, 1]))).makespan_s == 1 + 0.5 + 3 + 1


@pytest.mark.parametrize(("num_stages", "num_batches"), [(2, 4), (4, 8), (3, 1)])
def test_pipeline_has_the_known_bubble(num_stages, num_batches):
    """p stages, m micro-batches of equal ops: idle share (p - 1)/(m + p - 1)."""
    builder, device_of = GraphBuilder("pipeline"), []
    for batch in range(num_batches):
        tensor = builder.tensor(f"x{batch}", 0, role=Role.INPUT)
        for stage in range(num_stages):
            op = builder.op(f"f{batch}.{stage}", reads=[tensor])
            tensor = builder.tensor(f"a{batch}.{stage}", 0, producer=op)
            device_of.append(stage)
    graph = builder.build()
    timeline = run(graph, joined(num_stages), [1.0] * graph.num_ops, device_of)
    busy_s = num_batches * 1.0
    bubble = 1 - busy_s / timeline.makespan_s
    assert bubble == pytest.approx((num_stages - 1) / (num_batches + num_stages - 1), rel=1e-12)


def test_priority_decides_which_ready_op_runs_first():
    timeline = run(
        fan_out(3), joined(1), [1.0] * 4, [0] * 4, priority=np.array([0.0, 3.0, 1.0, 2.0])
    )
    assert np.argsort(timeline.op_start_s).tolist() == [0, 2, 3, 1]


def test_strict_order_waits_for_the_next_op_though_another_is_ready():
    builder = GraphBuilder("order")
    far = builder.tensor("far", 8, producer=builder.op("remote"))
    builder.op("reads remote", reads=[far])
    builder.op("free")
    order = (np.array([0]), np.array([1, 2]))
    timeline = run(builder.build(), joined(2, 8.0), [1.0] * 3, [0, 1, 1], by_device=order)
    assert timeline.op_start_s.tolist() == [0.0, 2.0, 3.0]
    free = run(builder.build(), joined(2, 8.0), [1.0] * 3, [0, 1, 1])
    assert free.op_start_s.tolist() == [0.0, 2.0, 0.0]


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def test_chain_holds_input_and_two_neighbours():
    timeline = run(chain(4, 100), joined(1), [1.0] * 4, [0] * 4)
    assert timeline.peak_bytes.tolist() == [300]
    times, held = timeline.memory_curve(0)
    assert times.tolist() == [0, 1, 4]
    assert held.tolist() == [200, 300, 100]


def test_alias_holds_no_bytes_and_keeps_its_base():
    builder = GraphBuilder("alias")
    op = builder.op("make")
    base = builder.tensor("base", 100, producer=op)
    view = builder.op("view", reads=[base])
    alias = builder.tensor("view of base", 100, producer=view, alias_of=base)
    builder.op("wait", reads=[builder.tensor("go", 0, producer=view, role=Role.CONTROL)])
    builder.op("use", reads=[alias])
    timeline = run(builder.build(), joined(1), [1.0] * 4, [0] * 4)
    assert timeline.peak_bytes.tolist() == [100]
    assert timeline.memory_curve(0)[0].tolist() == [0, 4]


def test_copy_is_counted_from_the_start_of_its_transfer():
    timeline = run(chain(2, 16), joined(2, 8.0), [1.0, 1.0], [0, 1])
    times, held = timeline.memory_curve(1)
    assert times.tolist() == [0, 1, 3, 4]
    assert held.tolist() == [0, 16, 32, 0]
    times, held = timeline.memory_curve(0)
    assert times.tolist() == [0, 3]
    assert held.tolist() == [32, 16]


def test_parameter_stays_at_home_and_its_copy_goes():
    builder = GraphBuilder("weights")
    weights = builder.tensor("weights", 50, role=Role.PARAMETER)
    for index in range(2):
        builder.op(f"op{index}", reads=[weights], workspace_bytes=7)
    timeline = run(builder.build(), joined(2, 50.0), [1.0, 1.0], [0, 1])
    assert timeline.transfer_ready_s.tolist() == [0.0]
    assert timeline.peak_bytes.tolist() == [57, 57]
    assert [timeline.memory_curve(d)[1][-1] for d in range(2)] == [50, 0]


def test_op_of_no_length_is_seen_in_the_peak_only():
    builder = GraphBuilder("instant")
    builder.op("burst", workspace_bytes=1000)
    timeline = run(builder.build(), joined(1), [0.0], [0])
    assert timeline.peak_bytes.tolist() == [1000]
    assert timeline.memory_curve(0)[1].tolist() == [0]


def test_unread_parameter_lives_on_the_first_device():
    builder = GraphBuilder("unread")
    builder.tensor("weights", 50, role=Role.PARAMETER)
    builder.op("op")
    assert run(builder.build(), joined(2), [1.0], [1]).peak_bytes.tolist() == [50, 0]


def test_memory_beyond_capacity_is_reported_not_refused():
    graph = chain(1, 2**40)
    assert run(graph, joined(1), [1.0], [0]).peak_bytes[0] > 2**30


def test_empty_graph_takes_no_time():
    timeline = run(GraphBuilder("empty").build(), joined(2), [], np.empty(0, dtype=np.int32))
    assert timeline.makespan_s == 0
    assert timeline.memory_time_s.tolist() == [0, 0]


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def test_plan_without_placement_is_refused():
    with pytest.raises(UsageError, match="does not say where") as caught:
        simulate(problem_of(chain(1), joined(1), [1.0]), Plan())
    assert caught.value.hint


def test_order_against_dependencies_names_both_ops():
    with pytest.raises(
        CheckError, match=r"'op1' can never start: it reads a result of 'op0'"
    ) as error:
        run(chain(2), joined(1), [1.0] * 2, [0, 0], by_device=(np.array([1, 0]),))
    assert error.value.hint
    assert error.value.where == "by hand"


def test_orders_that_wait_for_each_other_across_devices_are_refused():
    builder = GraphBuilder("cross")
    for pair in "ab":
        op = builder.op(f"make {pair}")
        builder.op(f"read {pair}", reads=[builder.tensor(pair, 8, producer=op)])
    order = (np.array([3, 0]), np.array([1, 2]))
    with pytest.raises(CheckError, match="can never start"):
        run(builder.build(), joined(2), [1.0] * 4, [0, 1, 1, 0], by_device=order)


@pytest.mark.parametrize(
    ("device_of", "sections", "message"),
    [
        ([0], {}, "1 placements for 2 ops"),
        ([0, 5], {}, "'op1' is on device 5"),
        ([0, -1], {}, "'op1' is on device -1"),
        ([0, 1], {"by_device": (np.array([0, 1]),)}, "1 orders for 2 devices"),
        (
            [0, 1],
            {"by_device": (np.array([0, 1]), np.array([]))},
            "the order of 'gpu0' is not its ops, each once",
        ),
        (
            [0, 1],
            {"by_device": (np.array([0]), np.array([]))},
            "order of .gpu1. is not",
        ),
        (
            [0, 1],
            {"by_device": (np.array([0, 0]), np.array([1]))},
            "order of .gpu0. is not",
        ),
        (
            [0, 1],
            {"by_device": (np.array([0, 7]), np.array([1]))},
            "order of .gpu0. is not",
        ),
        ([0, 1], {"priority": np.array([1.0])}, "one number per op"),
    ],
)
def test_plan_for_something_else_is_refused(device_of, sections, message):
    with pytest.raises(CheckError, match=message) as caught:
        run(chain(2), joined(2), [1.0, 1.0], device_of, **sections)
    assert caught.value.hint


def test_op_that_cannot_run_on_its_device_is_refused():
    with pytest.raises(CheckError, match="'op1' cannot run on 'gpu1'"):
        run(chain(2), joined(2), [1.0, np.inf], [0, 1])


# ── sameness ─────────────────────────────────────────────────────────────────────────────────────

DIGEST = """
import hashlib, sys
import numpy as np
from simulate.test_simulate_models import random_problem
from hocket.plan.plan import Plan
from hocket.simulate import bottleneck, critical_path, simulate
digest = hashlib.sha256()
for mode in ("shared", "queued", "parallel"):
    problem = random_problem(3, mode)
    device_of = np.random.default_rng(5).integers(0, 4, problem.graph.num_ops)
    timeline = simulate(problem, Plan().placing(device_of))
    digest.update(repr(critical_path(timeline, problem)).encode())
    digest.update(bottleneck(timeline, problem).encode())
    for name, value in sorted(vars(timeline).items()):
        digest.update(name.encode() + np.asarray(value).tobytes())
print(digest.hexdigest())
"""


def test_simulate_is_the_same_in_every_process():
    tests = str(Path(__file__).parents[1])
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={"PYTHONPATH": tests, "PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1


IMPORTS = """
import sys
import hocket.simulate
assert "numba" not in sys.modules, "numba is imported before it is needed"
assert hocket.simulate.kernels_are_compiled() in (True, False)
"""


def test_importing_the_simulator_does_not_import_the_compiler():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)


def test_kernels_are_compiled_after_a_simulation():
    run(chain(1), joined(1), [1.0], [0])
    assert kernels_are_compiled()
