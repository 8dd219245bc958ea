"""What a step of a plan should take on the device that carries it out."""

from __future__ import annotations

import torch

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.runtime.launch import used_devices
from hocket.simulate import simulate


def predicted_s(problem: Problem, plan: Plan, device: torch.device) -> float | None:
    """What a step should take; None where the plan's devices are only played."""
    return None if are_played(problem, plan, device) else claimed_step_s(problem, plan)


def claimed_step_s(problem: Problem, plan: Plan) -> float:
    """A step among many where the plan knows it, else one alone."""
    claims = plan.claims
    for known_s in (claims.repeated_step_s, claims.step_s):
        if known_s is not None:
            return known_s
    return simulate(problem, plan).makespan_s


def are_played(problem: Problem, plan: Plan, device: torch.device) -> bool:
    """True if the plan's devices are of another kind than what carries it out."""
    kinds = {each.name: each.kind for each in problem.cluster.devices}
    is_cpu = device.type == "cpu"
    return any(kinds[name].is_cpu != is_cpu for name in used_devices(problem, plan))
