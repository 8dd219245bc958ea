"""Predicted step time of a plan on the device that runs it."""

from __future__ import annotations

import torch

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.runtime.launch import used_devices
from hocket.simulate import simulate


def predicted_s(problem: Problem, plan: Plan, device: torch.device) -> float | None:
    """Return the predicted step time; None if the plan's devices are only emulated."""
    return None if are_played(problem, plan, device) else claimed_step_s(problem, plan)


def claimed_step_s(problem: Problem, plan: Plan) -> float:
    """Return the plan's steady-state step time, else its single-step time, else a simulated one."""
    claims = plan.claims
    for known_s in (claims.repeated_step_s, claims.step_s):
        if known_s is not None:
            return known_s
    return simulate(problem, plan).makespan_s


def are_played(problem: Problem, plan: Plan, device: torch.device) -> bool:
    """True if the plan's device types are emulated: CPUs in place of GPUs, or the reverse."""
    kinds = {each.name: each.kind for each in problem.cluster.devices}
    is_cpu = device.type == "cpu"
    return any(kinds[name].is_cpu != is_cpu for name in used_devices(problem, plan))
