"""Estimated time of a step where the CPU runs a plan for accelerators."""

from __future__ import annotations

import torch

from hocket.cost.roofline import estimate_costs
from hocket.hardware.detect import detect_cpu
from hocket.plan.problem import Problem

_QUICK_FLOPS = 1e12
"""A step with less is done in seconds on any CPU; rating this one takes one of them."""


def cpu_step_s(problem: Problem, scale: float) -> float | None:
    """Estimate the seconds of a step here for a part of the batch; None with a GPU or little work.

    The processes of a run share the cores, so it is all work after each other on all of them.
    """
    if problem.graph.flops.sum() * scale < _QUICK_FLOPS or torch.cuda.device_count():
        return None
    costs = estimate_costs(problem.graph, detect_cpu())
    return float(costs.op_s[0].sum()) * scale
