"""divide: the training of a transformer as data x tensor x pipeline, as a planner like all others.

The search that it stands for is in `hocket.planners.parallelism.search` and is imported when it is
used: placements do not wait for it.
"""

from __future__ import annotations

from dataclasses import replace

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem


def divide(problem: Problem, plan: Plan) -> Plan:
    """Data x tensor x pipeline: every division by a closed form, the best few hundred simulated."""
    from hocket.planners.parallelism.search import compare_divisions, plan_of

    found = plan_of(compare_divisions(problem))
    return replace(plan, sections=found.sections, claims=found.claims, notes=found.notes)
