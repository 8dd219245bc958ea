"""Check the structure of a plan: all rules that need no simulation.

The plan must be made for this problem, decide everything that the problem needs, and have only
legal sections. `hocket.simulate.verify` adds the rules that need the simulator: memory and in-place
updates.
"""

from __future__ import annotations

from collections.abc import Iterator

from hocket.base.arrays import IntArray
from hocket.base.errors import CheckError
from hocket.graph.graph import Graph, Phase
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Placement, Schedule
from hocket.plan.training import TransformerTraining
from hocket.plan.violation import Violation


def require_structure(plan: Plan, problem: Problem) -> None:
    """Raise `CheckError` with the first violations of structure, if there are any."""
    raise_violations(list(structure_violations(plan, problem)), plan.planner)


def raise_violations(found: list[Violation], planner: str) -> None:
    """Raise `CheckError` with the first three violations, if there are any."""
    if not found:
        return
    shown = "; ".join(violation.message for violation in found[:3])
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    raise CheckError(f"{shown}{more}", where=f"plan of {planner}" if planner else "plan")


def structure_violations(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield all violations of structure.

    Stops after an illegal placement or parallel section, which later sections assume to be
    legal.
    """
    yield from _identity(plan, problem)
    yield from _undecided(plan, problem)
    for section in plan.named().values():
        wrong = list(section.verify(problem, plan))
        yield from wrong
        # Later sections index ops and devices by these, so they cannot be checked.
        if any(
            violation.rule in ("placed", "parallel", "devices", "layers") for violation in wrong
        ):
            return


def contiguity_violations(device_of: IntArray, problem: Problem) -> Iterator[Violation]:
    """Yield forward paths that leave a device and return to it, at most one per device."""
    graph = problem.graph
    src, dst = graph.edges
    is_forward = graph.op_phase == Phase.FORWARD
    inner = is_forward[src] & is_forward[dst]
    pairs = list(zip(src[inner].tolist(), dst[inner].tolist(), strict=True))
    device = device_of.tolist()
    # Per op, the devices (as bits) that some path to it has left. Edges are sorted by reader, so
    # the entry of a producer is complete before it is read.
    left = [0] * graph.num_ops
    found: set[int] = set()
    for producer, reader in pairs:
        left[reader] |= left[producer]
        if device[producer] != device[reader]:
            left[reader] |= 1 << device[producer]
        if left[reader] >> device[reader] & 1 and device[reader] not in found:
            found.add(device[reader])
            op, name = graph.op_names[reader], problem.cluster.device_names[device[reader]]
            yield Violation("contiguous", f"a path leaves {name!r} and is back at {op!r}", op, name)


def _identity(plan: Plan, problem: Problem) -> Iterator[Violation]:
    work = problem.work
    for what, planned, actual in (
        ("graph" if isinstance(work, Graph) else "training", plan.work_hash, problem.work_hash),
        ("cluster", plan.cluster_hash, problem.cluster.content_hash),
    ):
        # Plans without hashes are made by planners, not read from files.
        if planned and planned != actual:
            yield Violation(
                "identity",
                f"the plan was made for another {what} ({planned[:12]}…, this is {actual[:12]}…)",
            )


def _undecided(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield the sections that the work needs and the plan does not have."""
    is_shared = plan.get(Parallel) is not None
    if isinstance(problem.work, Graph) and plan.get(Placement) is None and not is_shared:
        yield Violation("placed", "the plan places no op")
    if isinstance(problem.work, TransformerTraining):
        if plan.get(Parallel) is None:
            yield Violation("parallel", "the plan has no parallel section")
        elif plan.get(Schedule) is None:
            yield Violation("schedule", "the plan has no schedule")
