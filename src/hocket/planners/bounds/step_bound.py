"""Lower bound on the step time or maximum load of every legal plan, with its source.

The largest of several bounds, each proven where it is computed: chains of ops with unavoidable
transfers and ops that must share a device (`Heads`), the work of all devices together
(`best_weights`), and the work between heads and tails (`windows_s`). They hold in every transfer
mode, because each assumes only that a transfer takes at least its uncontended time on the fastest
route between two devices. Near-linear in the size of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.graph.coarsen import bound_ops
from hocket.graph.graph import Graph
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.bounds.bound_kernels import Sides, new_together, new_tree
from hocket.planners.devices import op_s_of_units, require_runnable
from hocket.planners.max_load.device_classes import dual_weights, least_weighted
from hocket.planners.tables import task_table

# Units: ops that no legal plan separates, and the bytes that are stored with each unit.
#
# O(ops + reads).


@dataclass(frozen=True, eq=False, kw_only=True)
class BoundUnits:
    """The units of a graph, numbered by their first ops."""

    of_op: IntArray
    """Per op: its unit."""
    count: int
    held_bytes: LongArray
    """Per unit: bytes that its device holds for it at the end of the step."""
    unread_bytes: int
    """Bytes of tensors that exist before the step and that no op reads; device 0 holds them."""


def find_units(graph: Graph) -> BoundUnits:
    """Return the units of a graph."""
    owner_op, of_op = graph.owner_op, bound_ops(graph)
    count = int(of_op.max(initial=-1)) + 1
    owned = np.flatnonzero(graph.is_held & (graph.alias_of < 0))
    is_read = owner_op[owned] >= 0
    held_bytes = np.zeros(count, dtype=np.int64)
    np.add.at(held_bytes, of_op[owner_op[owned[is_read]]], graph.tensor_bytes[owned[is_read]])
    unread_bytes = int(graph.tensor_bytes[owned[~is_read]].sum())
    return BoundUnits(of_op=of_op, count=count, held_bytes=held_bytes, unread_bytes=unread_bytes)


# Device classes: devices that run every op equally fast, as the bounds see them.
#
# A bound needs the times of ops per class and, between classes, the least that a transfer can take:
# the smallest latency and the smallest time per unit of work over all pairs of different devices.
# A class with one device has no pair with itself, so a transfer inside it takes infinitely long.

MAX_CLASSES = 6
"""Number of device types above which all devices count as one class.

That class runs each op as fast as the fastest of the devices.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class BoundClasses:
    """Classes of devices, with lower bounds on the times of ops and transfers."""

    op_s: FloatArray
    """[class, op]: seconds; infinite if the op or another of its unit cannot run there."""
    of_device: LongArray
    """Per device: its class."""
    num_devices: LongArray
    latency_s: FloatArray
    """[src class, dst class]: least latency between two different devices."""
    unit_s: FloatArray
    """[src class, dst class]: least seconds per unit of work between two different devices."""
    work: FloatArray
    """Per tensor: work of transferring it (bytes, or stated seconds)."""


def find_classes(problem: Problem, units: BoundUnits) -> BoundClasses:
    """Return the classes of a problem's devices; raises if some op can run on none."""
    tasks = task_table(problem)
    class_of = _class_of(problem)
    count = int(class_of.max()) + 1
    require_runnable(problem, units.of_op)
    device_op_s = op_s_of_units(problem, units.of_op)[problem.costs.device_row]
    latency_s = _least(tasks.latency_s, class_of)
    return BoundClasses(
        op_s=np.array([device_op_s[class_of == index].min(axis=0) for index in range(count)]),
        of_device=class_of,
        num_devices=np.bincount(class_of, minlength=count).astype(np.int64),
        latency_s=latency_s,
        # 0 times infinity would be NaN where no pair exists; the latency is infinite already.
        unit_s=np.where(np.isinf(latency_s), 0.0, _least(tasks.unit_s, class_of)),
        work=tasks.work,
    )


def _class_of(problem: Problem) -> LongArray:
    """Per device: its class, densely numbered."""
    _, class_of = np.unique(problem.costs.device_row, return_inverse=True)
    # Each class multiplies the work of the bounds.
    if class_of.max(initial=0) >= MAX_CLASSES:
        return np.zeros(len(class_of), dtype=np.int64)
    return class_of.astype(np.int64)


def _least(matrix: FloatArray, class_of: LongArray) -> FloatArray:
    """[src class, dst class]: smallest entry between two different devices."""
    count = int(class_of.max()) + 1
    between = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(between, np.inf)
    least = np.full((count, count), np.inf)
    np.minimum.at(least, (class_of[:, None], class_of[None, :]), between)
    return least


# Load: the work of all ops, split as evenly as their times allow.
#
# Give every class of devices a weight per second of each device. In any plan the busiest device
# works at least as long as the weighted mean of all devices, and the weighted work is at least the
# sum over units of the least weighted time. Any weights prove a bound; the best ones are the dual
# of the programme that splits units between classes (`dual_weights`).


def best_weights(units: BoundUnits, classes: BoundClasses) -> tuple[float, FloatArray]:
    """Return the bound from the work of all devices, and the weights per class that prove it.

    The weights of all devices sum to 1.
    """
    seconds = np.array([np.bincount(units.of_op, row, units.count) for row in classes.op_s])
    weight = dual_weights(seconds, classes.num_devices)
    # The solver's weights are normalised again, because it meets the constraint only roughly.
    weight = weight / float(weight @ classes.num_devices)
    return float(least_weighted(weight, seconds).sum()), weight


# Heads and tails: how early each op can start, and how much must follow its end.
#
# Take op j on a device of a given class. A predecessor i is either on the same device or its tensor
# was transferred; then j starts no earlier than end(i) + transfer. The same holds for any ancestor:
# if it is on another device, each path from it to j has at least one transfer. So for a start
# before some time T, every ancestor that could not arrive from elsewhere before T ran on j's
# device, one after another with all others of that kind, none before its own head. The head of j is
# the smallest T for which they fit before T: ancestors join in the order in which they force
# themselves in, until the next one need not. Nothing is assumed about transfers but their least
# time, so the bound holds for every transfer mode. Tails are heads of the reversed graph: children
# that must stay with their parent run one after another after it.
#
# The idea of ancestors that must sit together is from Papadimitriou and Yannakakis, "Towards an
# architecture-independent analysis of parallel algorithms" (1990), with transfers of different
# length as in Jain and Rajaraman (1994) and without running ops twice. O(classes · (reads · classes
# + ops · m (m + log reads))) with at most m ops put together.


@dataclass(frozen=True, eq=False, kw_only=True)
class Heads:
    """Lower bounds around each op, if it runs on a class; infinite if it cannot run there."""

    head_s: FloatArray
    """[class, op]: lower bound on the start of the op."""
    tail_s: FloatArray
    """[class, op]: lower bound on the seconds from the end of the op to the end of the step."""

    def path_s(self, op_s: FloatArray) -> FloatArray:
        """Per op: lower bound on the step, on the class where it is smallest."""
        shortest: FloatArray = (self.head_s + op_s + self.tail_s).min(axis=0)
        return shortest


def find_heads(graph: Graph, units: BoundUnits, classes: BoundClasses) -> Heads:
    """Compute heads and tails of all ops."""
    return Heads(
        head_s=_one_side(_before(graph), graph.num_ops, units, classes, backwards=False),
        tail_s=_one_side(_after(graph), graph.num_ops, units, classes, backwards=True),
    )


def windows_s(
    part_of_op: LongArray, head_s: FloatArray, tail_s: FloatArray, work_s: FloatArray
) -> FloatArray:
    """Per part (set of ops): maximum over subsets of smallest head + sum of work + smallest tail.

    This bounds the step if the part's ops run one after another, or if ``work_s`` is each op's
    fraction of the work per device. The maximum is reached by the subset of all ops whose head and
    tail are at least some values. O(ops log ops).
    """
    from hocket.planners.bounds import bound_kernels as kernels

    num_parts = int(part_of_op.max(initial=-1)) + 1
    sizes = np.bincount(part_of_op, minlength=num_parts)
    ptr = pointers(sizes)
    by_tail = np.lexsort((tail_s, part_of_op))
    leaf = np.empty(len(part_of_op), dtype=np.int64)
    # Leaves are numbered by tail within each part, as the segment tree requires.
    leaf[by_tail] = np.arange(len(part_of_op)) - np.repeat(ptr[:-1], sizes)
    longest_s = np.zeros(num_parts)
    kernels.find_windows(
        table(ptr, np.int64),
        table(np.lexsort((-head_s, part_of_op)), np.int64),
        table(leaf, np.int64),
        table(head_s, np.float64),
        table(tail_s, np.float64),
        table(work_s, np.float64),
        new_tree(int(sizes.max(initial=1))),
        longest_s,
    )
    return longest_s


def _before(graph: Graph) -> tuple[LongArray, LongArray, LongArray]:
    """Edges by reading op, as arrays: the op, the tensor that it reads, the op that makes it."""
    reader = graph.reader
    producer = graph.tensor_producer[graph.reads]
    made = producer >= 0
    return reader[made], graph.reads[made].astype(np.int64), producer[made].astype(np.int64)


def _after(graph: Graph) -> tuple[LongArray, LongArray, LongArray]:
    """Edges by producing op, as arrays: the op, the tensor that it makes, the op that reads it."""
    tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.user_ptr))
    producer = graph.tensor_producer[tensor].astype(np.int64)
    made = producer >= 0
    return producer[made], tensor[made], graph.users[made].astype(np.int64)


def _one_side(
    neighbours: tuple[LongArray, LongArray, LongArray],
    num_ops: int,
    units: BoundUnits,
    classes: BoundClasses,
    *,
    backwards: bool,
) -> FloatArray:
    from hocket.planners.bounds import bound_kernels as kernels

    op, tensor, other = neighbours
    degree = np.bincount(op, minlength=num_ops)
    work = classes.work[tensor]
    joined = np.isfinite(classes.latency_s)
    least_unit_s = classes.unit_s[joined].min() if joined.any() else 0.0
    sides = Sides(
        ptr=table(pointers(degree), np.int64),
        op=table(other, np.int64),
        work=table(work, np.float64),
        least_s=table(classes.latency_s.min() + work * least_unit_s, np.float64),
        # Backwards, each tensor goes from the later op's device to the earlier one's.
        latency_s=table(classes.latency_s.T if backwards else classes.latency_s, np.float64),
        unit_s=table(classes.unit_s.T if backwards else classes.unit_s, np.float64),
        op_s=table(classes.op_s.min(axis=0), np.float64),
        unit=table(units.of_op, np.int64),
        end_s=np.full(num_ops, np.inf),
    )
    start_s, end_s = np.empty_like(classes.op_s), np.empty_like(classes.op_s)
    together = new_together(num_ops, int(degree.max(initial=0)))
    op_s = table(classes.op_s, np.float64)
    kernels.find_heads(sides, op_s, together, start_s, end_s, backwards)
    return start_s


PATH = "the longest chain of ops and unavoidable transfers"
SERIAL = "ops that must share a device"
WORK = "the work of all devices together"
WINDOW = "the work between the earliest starts and the latest ends of ops"


@dataclass(frozen=True)
class LowerBound:
    """Seconds that no legal plan of a problem can beat, with the source of the bound."""

    seconds: float
    why: str
    """Source of the bound, as in "limited by …"."""
    parts: Mapping[str, float]
    """All computed bounds in seconds, by source."""


def lower_bound(problem: Problem) -> LowerBound:
    """Lower bound on the problem's objective: the step time, or the load of the busiest device.

    Raises `NoFeasiblePlanError` if some op can run on no device.
    """
    if problem.graph.num_ops == 0:
        return LowerBound(0.0, WORK, {WORK: 0.0})
    units = find_units(problem.graph)
    classes = find_classes(problem, units)
    work_s, weight = best_weights(units, classes)
    parts = {WORK: work_s}
    if problem.objective == "latency":
        heads = find_heads(problem.graph, units, classes)
        parts |= _step_parts(heads, weight, units, classes)
    # What is summed here and in the simulator is rounded at each of up to num_ops additions.
    rounding = 1 - 8 * (problem.graph.num_ops + 8) * float(np.finfo(np.float64).eps)
    parts = {why: seconds * rounding for why, seconds in parts.items()}
    why = max(parts, key=parts.__getitem__)
    return LowerBound(parts[why], why, parts)


def _step_parts(
    heads: Heads, weight: FloatArray, units: BoundUnits, classes: BoundClasses
) -> dict[str, float]:
    everything = np.zeros(len(units.of_op), dtype=np.int64)
    head_s, tail_s = heads.head_s.min(axis=0), heads.tail_s.min(axis=0)
    work_s = least_weighted(weight, classes.op_s)
    return {
        PATH: float(heads.path_s(classes.op_s).max()),
        WINDOW: float(windows_s(everything, head_s, tail_s, work_s).max()),
        SERIAL: _serial_s(heads, units, classes),
    }


def _serial_s(heads: Heads, units: BoundUnits, classes: BoundClasses) -> float:
    """Largest bound over units: the ops of a unit run one after another on one device."""
    sizes = np.bincount(units.of_op, minlength=units.count)
    joined = np.flatnonzero(sizes[units.of_op] > 1)
    if not len(joined):
        return 0.0
    _, part_of_op = np.unique(units.of_op[joined], return_inverse=True)
    shortest_s = np.full(int(part_of_op.max()) + 1, np.inf)
    for head_s, op_s, tail_s in zip(heads.head_s, classes.op_s, heads.tail_s, strict=True):
        times = head_s[joined], tail_s[joined], op_s[joined]
        able = np.isfinite(sum(times))
        impossible = np.bincount(part_of_op, ~able, len(shortest_s)) > 0
        found_s = windows_s(part_of_op, *(np.where(able, seconds, 0.0) for seconds in times))
        shortest_s = np.minimum(shortest_s, np.where(impossible, np.inf, found_s))
    return float(shortest_s.max())
