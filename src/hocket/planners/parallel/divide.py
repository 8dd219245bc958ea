"""The joint search over transformer shapes as a planner: imported when used, not before."""

from __future__ import annotations

from dataclasses import replace

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem


def divide(problem: Problem, plan: Plan) -> Plan:
    """Data x tensor x pipeline: every config by a closed form, the best few hundred simulated."""
    from hocket.planners.parallel.transformer_search import compare_configs, plan_of

    found = plan_of(compare_configs(problem))
    return replace(plan, sections=found.sections, claims=found.claims, notes=found.notes)
