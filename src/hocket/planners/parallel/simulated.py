"""Simulate candidates of parallel configs, each once, within a total budget of simulated ops."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from hocket.base.errors import CheckError
from hocket.base.units import format_bytes
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Parallel
from hocket.plan.words import in_words
from hocket.planners.candidates import Candidate, SimulatedCandidate, empty_plan
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.symmetry import is_symmetric

WHOLE = "whole"
_SIMULATED_OPS = 2_000_000
"""Approximate number of ops that one search simulates: a few seconds."""


@dataclass
class Budget:
    """Candidates simulated so far, and the rest of the simulation budget."""

    problem: Problem
    most_ops: int = _SIMULATED_OPS
    spent_ops: int = 0
    seen: dict[tuple[Parallel, Communication | None], Candidate] = field(default_factory=dict)

    @property
    def is_left(self) -> bool:
        """True if the simulation budget is not spent."""
        return self.spent_ops < self.most_ops

    def simulated(self, parallel: Parallel, planned: Communication | None = None) -> Candidate:
        """Simulate a parallel config, or return its candidate if it was simulated before."""
        known = self.seen.get((parallel, planned))
        if known is None:
            known = self.seen[parallel, planned] = simulated(self.problem, parallel, planned)
            # Symmetric configs simulate one replica for all, so only this one is charged.
            is_one = is_symmetric(self.problem, parallel)
            replicas = parallel.replicas[:1] if is_one else parallel.replicas
            passes = sum(len(replica.microbatches) for replica in replicas)
            ranks = 1 if is_one else parallel.tensor
            self.spent_ops += passes * ranks * self.problem.graph.num_ops
        return known


def simulated(
    problem: Problem, parallel: Parallel, planned: Communication | None = None
) -> Candidate:
    """Simulate a parallel config; returns a candidate with its timeline."""
    started = time.perf_counter()
    sections = (parallel,) if planned is None else (planned, parallel)
    plan = replace(empty_plan(problem, WHOLE), sections=sections)
    name = in_words(parallel)
    try:
        _, timeline = simulate_parallel(problem, parallel, planned)
    except CheckError as error:
        return Candidate(
            planner=name, plan=None, timeline=None, feasible=False, reason=error.message,
            plan_seconds=time.perf_counter() - started,
        )  # fmt: skip
    plan = plan.claiming(step_s=timeline.makespan_s, peak_bytes=tuple(timeline.peak_bytes.tolist()))
    over = np.flatnonzero(timeline.peak_bytes > problem.memory_bytes)
    reason = "; ".join(
        f"{problem.cluster.device_names[d]} needs {format_bytes(int(timeline.peak_bytes[d]))} "
        f"of {format_bytes(int(problem.memory_bytes[d]))}"
        for d in over[:2]
    )
    return SimulatedCandidate(
        planner=name, plan=plan, timeline=timeline, feasible=not len(over), reason=reason,
        plan_seconds=time.perf_counter() - started,
    )  # fmt: skip
