"""Lower bound on the step time or maximum load of every legal plan, with its source.

The largest of several bounds, each proven where it is computed: chains of ops with the transfers
that cannot be avoided and ops that must share a device (`Heads`), work and memory of all devices
together (`Load`), and the work between heads and tails. They hold in every transfer mode, because
each assumes no more than that a transfer takes its time alone on the fastest route between two
devices. Near-linear in the size of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.base.errors import NoFeasiblePlanError
from hocket.graph.graph import Graph
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.bounds.tables import Sides, new_together, new_tree
from hocket.planners.bounds.units import BoundUnits, find_units
from hocket.planners.tables import task_table

# Device classes: devices that run every op equally fast, as the bounds see them.
#
# A bound needs the times of ops per class and, between classes, the least that a transfer can take:
# the smallest latency and the smallest time per unit of work over all pairs of different devices.
# A class with one device has no pair with itself, so a transfer inside it takes for ever.

MAX_CLASSES = 6
"""Above this all devices count as one class that runs each op as fast as the fastest of them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BoundClasses:
    """Classes of devices, and what ops and transfers take on them at least."""

    op_s: FloatArray
    """[class, op]: infinite where the op, or one that sits with it, cannot run."""
    of_device: LongArray
    """The class of each device."""
    num_devices: LongArray
    memory_bytes: LongArray
    """Usable bytes of all devices of the class together."""
    latency_s: FloatArray
    """[src class, dst class]: a lower bound for two different devices."""
    unit_s: FloatArray
    """[src class, dst class]: as `latency_s`, per unit of work."""
    work: FloatArray
    """Per tensor: what a transfer of it has to move."""


def find_classes(problem: Problem, units: BoundUnits) -> BoundClasses:
    """The classes of a problem's devices; raises where some op can run nowhere."""
    tasks = task_table(problem)
    class_of = _class_of(problem)
    count = int(class_of.max()) + 1
    op_s = np.array([tasks.op_s[class_of == index].min(axis=0) for index in range(count)])
    memory_bytes = np.maximum(tasks.memory_bytes - _unread(problem, units), 0)
    latency_s = _least(tasks.latency_s, class_of)
    return BoundClasses(
        op_s=_op_s_of_units(problem, units, op_s),
        of_device=class_of,
        num_devices=np.bincount(class_of, minlength=count).astype(np.int64),
        memory_bytes=np.bincount(class_of, weights=memory_bytes, minlength=count).astype(np.int64),
        latency_s=latency_s,
        unit_s=np.where(np.isinf(latency_s), 0.0, _least(tasks.unit_s, class_of)),
        work=tasks.work,
    )


def _class_of(problem: Problem) -> LongArray:
    """The class of each device, densely numbered."""
    _, class_of = np.unique(problem.costs.device_row, return_inverse=True)
    if class_of.max(initial=0) >= MAX_CLASSES:
        return np.zeros(len(class_of), dtype=np.int64)
    return class_of.astype(np.int64)


def _unread(problem: Problem, units: BoundUnits) -> LongArray:
    unread = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    unread[0] = units.unread_bytes
    return unread


def _op_s_of_units(problem: Problem, units: BoundUnits, op_s: FloatArray) -> FloatArray:
    """Infinite for all ops of a unit where it is infinite for one of them."""
    able = np.ones((len(op_s), units.count), dtype=np.bool_)
    for row, seconds in enumerate(op_s):
        able[row, units.of_op[~np.isfinite(seconds)]] = False
    num_able = np.count_nonzero(able, axis=0)
    stuck = np.flatnonzero(num_able[units.of_op] == 0)
    if len(stuck):
        raise NoFeasiblePlanError(
            f"no device can run op {problem.graph.op_names[stuck[0]]!r} with the ops that must "
            "sit with it",
            hint="add a device of a kind that can run it",
        )
    return np.where(able[:, units.of_op], op_s, np.inf)


def _least(matrix: FloatArray, class_of: LongArray) -> FloatArray:
    """[src class, dst class]: the smallest entry of two different devices."""
    count = int(class_of.max()) + 1
    between = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(between, np.inf)
    least = np.full((count, count), np.inf)
    np.minimum.at(least, (class_of[:, None], class_of[None, :]), between)
    return least


# Load: the work of all ops distributed as evenly as times and memory allow.
#
# Give every class k of devices a weight w_k per second of each device, so that the weights of all
# devices add up to 1, and a price m_k per byte. In any plan that fits, the busiest device works at
# least as long as the weighted mean of all devices, and at least as long as that plus the prices of
# the bytes held less the prices of all memory, which is not positive. Unit by unit that is at least
#
#     sum over units of min over k (w_k · seconds on k + m_k · bytes)  -  sum over k of m_k · memory
#
# whatever the weights and prices are: any choice proves a bound. The best choice is the dual of the
# linear programme that splits units between classes; it is approached by Kelley's cutting planes:
# each step prices the units, sees which class each would choose, and solves a tiny programme over
# all choices seen. O(steps · classes · units).

_MAX_STEPS = 60
_CLOSE = 1e-4
"""Stop when the programme promises less than this share more."""
_MAX_PRICE = 1e4
"""Of all held bytes together, in units of the work of all ops: keeps the first steps finite."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Load:
    """The bounds from load, and the weights that prove the first of them."""

    work_s: float
    """The work of all devices together."""
    memory_s: float
    """The same with memory counted; 0 where memory cannot matter."""
    contention_s: float
    """More long units than devices: some device runs several of them."""
    weight: FloatArray
    """Per class: the weight of a second of each of its devices."""


def find_load(units: BoundUnits, classes: BoundClasses) -> Load:
    """The bounds from load."""
    seconds = np.array([np.bincount(units.of_op, row, units.count) for row in classes.op_s])
    held_bytes, memory_bytes = units.held_bytes, classes.memory_bytes
    nothing = np.zeros_like(held_bytes)
    work_s, weight = _best_weights(seconds, nothing, np.zeros_like(memory_bytes), classes)
    memory_s = 0.0
    total = held_bytes.sum()
    if memory_bytes.min() < total <= memory_bytes.sum() and len(seconds) > 1:
        memory_s, _ = _best_weights(seconds, held_bytes, memory_bytes, classes)
    contention_s = _contention_s(seconds.min(axis=0), int(classes.num_devices.sum()))
    return Load(work_s=work_s, memory_s=memory_s, contention_s=contention_s, weight=weight)


def shared_work_s(op_s: FloatArray, weight: FloatArray) -> FloatArray:
    """Per op: what it adds, at least, to the weighted mean of the devices' work."""
    shared: FloatArray = _weighted(op_s, weight).min(axis=0)
    return shared


def _weighted(seconds: FloatArray, weight: FloatArray) -> FloatArray:
    # Infinite times stay infinite where the weight is 0.
    return np.where(np.isfinite(seconds), seconds, 0.0) * weight[:, None] + np.where(
        np.isfinite(seconds), 0.0, np.inf
    )


def _best_weights(
    seconds: FloatArray, held_bytes: LongArray, memory_bytes: LongArray, classes: BoundClasses
) -> tuple[float, FloatArray]:
    """The largest bound found, in seconds, and its weights."""
    num_devices = classes.num_devices.astype(np.float64)
    num_classes = len(seconds)
    scale_s = float(seconds.min(axis=0).sum())
    total = float(held_bytes.sum())
    weight = np.full(num_classes, 1.0 / num_devices.sum())
    price = np.zeros(num_classes)
    best, best_weight = 0.0, weight
    cuts: list[FloatArray] = []
    while scale_s > 0:
        cut = _cut(seconds / scale_s, held_bytes, memory_bytes, total, weight, price)
        cuts.append(cut)
        value = float(cut @ np.concatenate((weight, price)))
        if value > best:
            best, best_weight = value, weight
        if num_classes == 1 or len(cuts) == _MAX_STEPS:
            break
        promised, weight, price = _programme(np.array(cuts), num_devices, total > 0)
        if promised <= best * (1 + _CLOSE):
            break
    return best * scale_s, best_weight


def _cut(
    seconds: FloatArray,
    held_bytes: LongArray,
    memory_bytes: LongArray,
    total: float,
    weight: FloatArray,
    price: FloatArray,
) -> FloatArray:
    """Work per class, then bytes per class less its memory, when each unit takes the cheapest."""
    num_classes = len(weight)
    share = held_bytes / total if total else held_bytes.astype(np.float64)
    choice = (_weighted(seconds, weight) + price[:, None] * share).argmin(axis=0)
    chosen_s = seconds[choice, np.arange(len(choice))]
    held = np.bincount(choice, share, num_classes)
    has = memory_bytes / total if total else np.zeros(num_classes)
    return np.concatenate((np.bincount(choice, chosen_s, num_classes), held - has))


def _programme(
    cuts: FloatArray, num_devices: FloatArray, with_prices: bool
) -> tuple[float, FloatArray, FloatArray]:
    """The best weights and prices given the cuts so far, and the bound that they imply."""
    from scipy.optimize import linprog

    num_classes = len(num_devices)
    result = linprog(
        c=np.concatenate(([-1.0], np.zeros(2 * num_classes))),
        A_ub=np.hstack((np.ones((len(cuts), 1)), -cuts)),
        b_ub=np.zeros(len(cuts)),
        A_eq=np.concatenate(([0.0], num_devices, np.zeros(num_classes)))[None, :],
        b_eq=[1.0],
        bounds=[(None, None)]
        + [(0, None)] * num_classes
        + [(0, _MAX_PRICE if with_prices else 0)] * num_classes,
        method="highs",
    )
    weight = np.maximum(result.x[1 : num_classes + 1], 0.0)
    weight /= weight @ num_devices
    price = np.maximum(result.x[num_classes + 1 :], 0.0)
    return -float(result.fun), weight, price


def _contention_s(unit_s: FloatArray, num_devices: int) -> float:
    """Of the q·n + 1 longest units some of n devices runs q + 1: at least the shortest of them."""
    longest_first = np.sort(unit_s)[::-1]
    summed = np.concatenate(([0.0], np.cumsum(longest_first)))
    last = np.arange(0, len(unit_s), num_devices)
    rounds = np.arange(len(last))
    return float((summed[last + 1] - summed[last - rounds]).max(initial=0.0))


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
# that must stay with their parent run one after another behind it.
#
# The idea of ancestors that must sit together is from Papadimitriou and Yannakakis, "Towards an
# architecture-independent analysis of parallel algorithms" (1990), with transfers of different
# length as in Jain and Rajaraman (1994) and without running ops twice. O(classes · (reads · classes
# + ops · m (m + log reads))) with at most m ops put together.


@dataclass(frozen=True, eq=False, kw_only=True)
class Heads:
    """Per class and op, for any plan that puts the op on that class; infinite where none does."""

    head_s: FloatArray
    """[class, op]: the op starts no earlier."""
    tail_s: FloatArray
    """[class, op]: the step ends at least this long after the op."""

    def path_s(self, op_s: FloatArray) -> FloatArray:
        """Per op: the shortest step that any class allows it."""
        shortest: FloatArray = (self.head_s + op_s + self.tail_s).min(axis=0)
        return shortest


def find_heads(graph: Graph, units: BoundUnits, classes: BoundClasses) -> Heads:
    """Heads and tails of all ops."""
    return Heads(
        head_s=_one_side(_before(graph), graph.num_ops, units, classes, backwards=False),
        tail_s=_one_side(_after(graph), graph.num_ops, units, classes, backwards=True),
    )


def windows_s(
    part_of_op: LongArray, head_s: FloatArray, tail_s: FloatArray, work_s: FloatArray
) -> FloatArray:
    """Per part, a set of ops: the largest smallest head + sum of work + smallest tail over subsets.

    Where the work of a part is done one after another, or is the share of it that falls to each
    device, no step is shorter. The largest is reached by a subset of all ops with heads and tails
    from some value on. O(ops log ops).
    """
    from hocket.planners.bounds import kernels

    num_parts = int(part_of_op.max(initial=-1)) + 1
    sizes = np.bincount(part_of_op, minlength=num_parts)
    ptr = pointers(sizes)
    by_tail = np.lexsort((tail_s, part_of_op))
    leaf = np.empty(len(part_of_op), dtype=np.int64)
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
    """Per op, ascending: itself, what it reads, and the ops that make that."""
    reader = graph.reader
    producer = graph.tensor_producer[graph.reads]
    made = producer >= 0
    return reader[made], graph.reads[made].astype(np.int64), producer[made].astype(np.int64)


def _after(graph: Graph) -> tuple[LongArray, LongArray, LongArray]:
    """Per op, ascending: itself, what it makes, and the ops that read that."""
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
    from hocket.planners.bounds import kernels

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
WINDOW = "the work that stands between heads and tails"
MEMORY = "the work of all devices together, as memory lets it be shared out"
CONTENTION = "more long ops than devices"


@dataclass(frozen=True)
class LowerBound:
    """A number of seconds that no legal plan of a problem beats."""

    seconds: float
    why: str
    """Source of the bound, as in "limited by …"."""
    parts: Mapping[str, float]
    """All bounds that were computed, in seconds, by source."""


def lower_bound(problem: Problem) -> LowerBound:
    """The bound for what the problem wants small: the step, or the load of the busiest device.

    Raises `NoFeasiblePlanError` where some op can run on no device.
    """
    if problem.graph.num_ops == 0:
        return LowerBound(0.0, WORK, {WORK: 0.0})
    units = find_units(problem.graph)
    classes = find_classes(problem, units)
    load = find_load(units, classes)
    parts = _load_parts(load)
    if problem.objective == "latency":
        heads = find_heads(problem.graph, units, classes)
        parts |= _step_parts(heads, load, units, classes)
    # What is summed here and in the simulator is rounded at each of up to num_ops additions.
    rounding = 1 - 8 * (problem.graph.num_ops + 8) * float(np.finfo(np.float64).eps)
    parts = {why: seconds * rounding for why, seconds in parts.items()}
    why = max(parts, key=parts.__getitem__)
    return LowerBound(parts[why], why, parts)


def _load_parts(load: Load) -> dict[str, float]:
    return {WORK: load.work_s, MEMORY: load.memory_s, CONTENTION: load.contention_s}


def _step_parts(
    heads: Heads, load: Load, units: BoundUnits, classes: BoundClasses
) -> dict[str, float]:
    everything = np.zeros(len(units.of_op), dtype=np.int64)
    head_s, tail_s = heads.head_s.min(axis=0), heads.tail_s.min(axis=0)
    work_s = shared_work_s(classes.op_s, load.weight)
    return {
        PATH: float(heads.path_s(classes.op_s).max()),
        WINDOW: float(windows_s(everything, head_s, tail_s, work_s).max()),
        SERIAL: _serial_s(heads, units, classes),
    }


def _serial_s(heads: Heads, units: BoundUnits, classes: BoundClasses) -> float:
    """The unit that takes longest: its ops run one after another, wherever it is."""
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
