"""Prove a parallel plan legal: its structure, its schedule, and memory as the simulator sees it."""

from __future__ import annotations

from dataclasses import replace

from hocket.base.errors import CheckError
from hocket.plan.parallel import ParallelPlan
from hocket.plan.parallel_verify import memory_violations, parallel_structure_violations
from hocket.plan.verify import Violation
from hocket.planners.parallelism.rules import broken_rules
from hocket.simulate.pipeline import simulate_pipeline


def parallel_violations(plan: ParallelPlan) -> list[Violation]:
    """All broken rules; later ones are looked at where the earlier ones hold."""
    found = list(parallel_structure_violations(plan))
    found += [Violation("division", rule) for rule in broken_rules(plan.model, plan.division)]
    if found:
        return found
    try:
        timeline = simulate_pipeline(plan.schedule, plan.costs)
    except CheckError as error:
        return [Violation("schedule", error.message)]
    # What the file predicts is a claim; what its costs and schedule give is what counts.
    peaks = tuple(timeline.peak_bytes.tolist())
    return list(memory_violations(replace(plan, peak_bytes=peaks)))
