"""Prove the structure of a plan legal: what can be checked without simulating it.

Every op is placed once on a device that can run it, groups stay together, and the planned order
contains each device's ops once and contradicts no dependency. O(ops + reads).
`hocket.simulate.verify` adds what needs the simulator: memory and in-place updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray
from hocket.base.errors import CheckError
from hocket.graph.graph import Phase
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem


@dataclass(frozen=True)
class Violation:
    """One broken rule, with the op and the device where it breaks."""

    rule: str
    message: str
    op: str = ""
    device: str = ""


def require_structure(plan: Plan, problem: Problem) -> None:
    """Raise `CheckError` with the first violations of structure, if there are any."""
    raise_violations(list(structure_violations(plan, problem)), plan.planner)


def raise_violations(found: list[Violation], planner: str) -> None:
    """Raise `CheckError` that lists the first few violations; do nothing where there are none."""
    if not found:
        return
    shown = "; ".join(violation.message for violation in found[:3])
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    raise CheckError(f"{shown}{more}", where=f"plan of {planner}" if planner else "plan")


def structure_violations(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """All broken rules of structure; later rules assume that the earlier ones hold."""
    yield from _identity(plan, problem)
    if plan.device_of is None:
        yield Violation("placed", "the plan places no op")
        return
    wrong = list(_placement(plan.device_of, problem))
    yield from wrong
    if wrong:
        return
    yield from _can_run(plan.device_of, problem)
    yield from _groups(plan.device_of, problem)
    yield from _order(plan, plan.device_of, problem)


def contiguity_violations(device_of: IntArray, problem: Problem) -> Iterator[Violation]:
    """Forward paths that leave a device and come back to it, one per device."""
    graph = problem.graph
    src, dst = graph.edges
    is_forward = graph.op_phase == Phase.FORWARD
    inner = is_forward[src] & is_forward[dst]
    pairs = list(zip(src[inner].tolist(), dst[inner].tolist(), strict=True))
    home = device_of.tolist()
    # Per op, the devices (as bits) that some path to it has left. Edges come by their reader, so
    # all that is known of a producer is known before it is asked for.
    left = [0] * graph.num_ops
    found: set[int] = set()
    for producer, reader in pairs:
        left[reader] |= left[producer]
        if home[producer] != home[reader]:
            left[reader] |= 1 << home[producer]
        if left[reader] >> home[reader] & 1 and home[reader] not in found:
            found.add(home[reader])
            op, name = graph.op_names[reader], problem.cluster.device_names[home[reader]]
            yield Violation("contiguous", f"a path leaves {name!r} and is back at {op!r}", op, name)


def _identity(plan: Plan, problem: Problem) -> Iterator[Violation]:
    for what, planned, actual in (
        ("graph", plan.graph_hash, problem.graph.content_hash),
        ("cluster", plan.cluster_hash, problem.cluster.content_hash),
    ):
        if planned and planned != actual:
            yield Violation(
                "identity",
                f"the plan was made for another {what} ({planned[:12]}…, this is {actual[:12]}…)",
            )


def _placement(device_of: IntArray, problem: Problem) -> Iterator[Violation]:
    names, num_devices = problem.graph.op_names, problem.cluster.num_devices
    if len(device_of) != len(names):
        yield Violation("placed", f"{len(device_of)} placements for {len(names)} ops")
        return
    for op in np.flatnonzero((device_of < 0) | (device_of >= num_devices)):
        yield Violation(
            "placed",
            f"op {names[op]!r} is on device {device_of[op]}, but there are {num_devices}",
            op=names[op],
        )


def _can_run(device_of: IntArray, problem: Problem) -> Iterator[Violation]:
    seconds = problem.costs.op_s[problem.costs.device_row[device_of], np.arange(len(device_of))]
    for op in np.flatnonzero(~np.isfinite(seconds)):
        name, device = problem.graph.op_names[op], problem.cluster.devices[device_of[op]].name
        yield Violation("can run", f"op {name!r} cannot run on {device!r}", name, device)


def _groups(device_of: IntArray, problem: Problem) -> Iterator[Violation]:
    graph = problem.graph
    grouped = np.flatnonzero(graph.group >= 0)
    if not len(grouped):
        return
    groups, first = np.unique(graph.group[grouped], return_index=True)
    home = dict(zip(groups.tolist(), grouped[first].tolist(), strict=True))
    leader = np.array([home[group] for group in graph.group[grouped].tolist()])
    for op, first_op in zip(grouped, leader, strict=True):
        if device_of[op] != device_of[first_op]:
            device = problem.cluster.devices[device_of[op]].name
            other = problem.cluster.devices[device_of[first_op]].name
            yield Violation(
                "groups",
                f"op {graph.op_names[op]!r} is on {device!r} but must be with "
                f"{graph.op_names[first_op]!r} on {other!r}",
                graph.op_names[op],
                device,
            )


def _order(plan: Plan, device_of: IntArray, problem: Problem) -> Iterator[Violation]:
    names = problem.graph.op_names
    if plan.order is not None and plan.priority is not None:
        yield Violation("order", "the plan has both an order and priorities")
    if plan.priority is not None and (
        len(plan.priority) != len(names) or np.any(np.isnan(plan.priority))
    ):
        yield Violation("order", "priorities must be one number per op")
    if plan.order is None:
        return
    if len(plan.order) != problem.cluster.num_devices:
        yield Violation(
            "order", f"{len(plan.order)} orders for {problem.cluster.num_devices} devices"
        )
        return
    broken = False
    for device, sequence in enumerate(plan.order):
        name = problem.cluster.devices[device].name
        expected = np.flatnonzero(device_of == device)
        if not np.array_equal(np.sort(sequence), expected):
            broken = True
            odd = np.setxor1d(sequence, expected)
            op = names[odd[0]] if len(odd) and 0 <= odd[0] < len(names) else ""
            yield Violation(
                "order", f"the order of {name!r} is not its ops, each once ({op!r})", op, name
            )
    if not broken:
        yield from _precedence(plan.order, problem)


def _precedence(order: tuple[IntArray, ...], problem: Problem) -> Iterator[Violation]:
    """Dependencies and planned order together must have no cycle."""
    if all(np.all(np.diff(sequence) > 0) for sequence in order):
        return  # ascending positions of a topological order contradict nothing
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    num_ops = problem.graph.num_ops
    src, dst = problem.graph.edges
    before = np.concatenate([src, *(sequence[:-1] for sequence in order)])
    after = np.concatenate([dst, *(sequence[1:] for sequence in order)])
    matrix = coo_array((np.ones(len(before), dtype=bool), (before, after)), (num_ops, num_ops))
    count, label = connected_components(matrix, directed=True, connection="strong")
    if count == num_ops:
        return
    sizes = np.bincount(label)
    op = int(np.flatnonzero(sizes[label] > 1)[0])
    name = problem.graph.op_names[op]
    yield Violation(
        "precedence",
        f"in the planned order op {name!r} would have to run before what it reads",
        name,
    )
