"""Two lanes for a way that takes its batch in microbatches, where they make its step shorter.

Microbatches are there because the batch does not fit at once, which is where lanes can gain. They
are tried only for kernels that leave something of device and host free: a closed form of two sums;
then both waves from the start, and with waits that keep the memory, each in one memory and in one
of each lane's own. O(simulations of seven ways).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes, Parallel
from hocket.planners.candidates import Candidate
from hocket.planners.placement.devices import workers
from hocket.planners.waves.search import within
from hocket.planners.waves.way import best_within, plan_of, simulated, with_waits
from hocket.planners.waves.why import FULL, asked

TWO_LANES = "two lanes"


def in_lanes(problem: Problem, ways: Iterable[Candidate]) -> list[Candidate]:
    """The quickest way that could be in two lanes, in them; nothing where that is no quicker."""
    began = time.perf_counter()
    able = [way for way in ways if way.step_s is not None and _can(way)]
    best = min(able, key=lambda way: way.step_s or 0.0, default=None)
    if best is None or best.plan is None or best.step_s is None:
        return []
    shares = best.plan[Parallel]
    if max(asked(problem, shares.replicas[0].microbatches[0])) >= FULL:
        return []
    most = int(problem.memory_bytes[workers(problem)].min())
    one = simulated(problem, shares)
    both = with_waits(problem, simulated(problem, shares, Lanes(lead=0)))
    tried = [both, *within(problem, one, most)]
    way = best_within(problem, tried, most)
    if way is None or way.step_s >= best.step_s:
        return []
    plan = plan_of(problem, way)
    return [
        Candidate(
            planner=TWO_LANES, plan=plan, timeline=way.timeline, feasible=True, reason="",
            plan_seconds=time.perf_counter() - began, waits_s=way.waits_s,
        )
    ]  # fmt: skip


def _can(way: Candidate) -> bool:
    """True if all replicas are one device each that keeps what several microbatches make."""
    shares = None if way.plan is None else way.plan.get(Parallel)
    if shares is None or shares.sharded:
        return False
    counts = {len(replica.microbatches) for replica in shares.replicas}
    are_plain = all(
        len(r.devices) == 1 and not r.recomputed and r.update == "device" for r in shares.replicas
    )
    return are_plain and len(counts) == 1 and min(counts) > 1
