"""Plan again with op times that were measured while a plan ran."""

from __future__ import annotations

from hocket.api.planned import Planned, plan_graph
from hocket.base.errors import UsageError
from hocket.cost.calibrate import calibrate
from hocket.cost.profile import Profile
from hocket.plan.files import SavedPlan
from hocket.plan.sections import Parallel
from hocket.plan.transformer_plan import is_transformer_plan


def planned_again(saved: Planned | SavedPlan, profile: Profile) -> Planned:
    """Return the best plan for a plan's problem with the op times of ``profile``.

    A plan that splits the batch was timed at the size of a microbatch, so its times are fitted for
    all sizes. Raises `UsageError` for a plan of a transformer's shape.
    """
    require_single_ops(saved)
    problem = saved.problem
    fitted = None
    if saved.plan.get(Parallel) is not None:
        kind = next((k for k in problem.cluster.kinds if k.name == profile.device_kind), None)
        if kind is None:
            raise UsageError(
                f"the profile is for {profile.device_kind!r}, and {problem.cluster.name} has none",
                hint="measure on the devices of the plan",
            )
        fitted = calibrate(profile, kind)
    return plan_graph(
        problem.graph, problem.cluster, transfers=problem.transfers,
        objective="throughput" if problem.objective == "throughput" else "step",
        profile=profile if fitted is None else None, calibration=fitted,
    )  # fmt: skip


def require_single_ops(saved: Planned | SavedPlan) -> None:
    """Refuse a plan that was not made from the times of single ops."""
    if is_transformer_plan(saved.plan):
        raise UsageError(
            "the plan is for a transformer's shape, which has no times of single ops",
            hint="refine plans of hocket plan",
        )
