"""Running plans. Light: the command line needs the names of backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.runtime.run_options import BACKENDS, RunOptions

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.runtime.numerics_check import Agreement

__all__ = ["BACKENDS", "RunOptions", "check_config", "cpu_step_s"]


def check_config(problem: Problem, plan: Plan) -> Agreement:
    """Run a plan's config at toy size against one device; raises where they differ."""
    from hocket.plan.transformer_plan import TransformerPlan
    from hocket.runtime.numerics_check import check_parallel

    return check_parallel(TransformerPlan(problem, plan))


def cpu_step_s(problem: Problem, scale: float) -> float | None:
    """Estimated seconds of a step on this CPU; None where a GPU runs it."""
    from hocket.runtime.cpu_step_time import cpu_step_s

    return cpu_step_s(problem, scale)
