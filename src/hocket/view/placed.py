"""Placements as ``--json`` prints them."""

from __future__ import annotations

from typing import Any

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.simulate.analysis import bottleneck, channel_busy_s, critical_path
from hocket.simulate.timeline import Timeline
from hocket.simulate.verify import violations


def shown(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """JSON of ``hocket show``."""
    return {
        "planner": plan.planner,
        "step_s": timeline.makespan_s,
        "peak_bytes": device_peaks(problem, timeline),
        "placement": device_names(problem, plan),
    }


def simulated(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """JSON of ``hocket simulate``."""
    span_s = timeline.makespan_s or 1.0
    names, links = problem.cluster.device_names, problem.costs.routes.channel_names
    link_s = channel_busy_s(timeline, problem)
    return {
        "planner": plan.planner,
        "transfers": problem.transfers,
        "step_s": timeline.makespan_s,
        "predicted_step_s": plan.claims.step_s,
        "peak_bytes": device_peaks(problem, timeline),
        "feasible": not violations(plan, problem, timeline),
        "device_busy": dict(zip(names, (timeline.busy_s / span_s).tolist(), strict=True)),
        "link_busy": dict(zip(links, (link_s / span_s).tolist(), strict=True)),
        "transfers_sent": len(timeline.transfer_tensor),
        "bottleneck": bottleneck(timeline, problem),
    }


def explained(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """JSON of ``hocket explain``."""
    tensors, graph = timeline.transfer_tensor, problem.graph
    return {
        "step_s": timeline.makespan_s,
        "bottleneck": bottleneck(timeline, problem),
        "critical_path": [
            {
                "kind": step.kind,
                "name": graph.op_names[step.index]
                if step.kind == "op"
                else graph.tensor_names[tensors[step.index]],
                "start_s": step.start_s,
                "end_s": step.end_s,
                "reason": step.reason,
                "wait_s": step.wait_s,
            }
            for step in critical_path(timeline, problem)
        ],
    }


def device_peaks(problem: Problem, timeline: Timeline) -> dict[str, int]:
    """Peak memory by device."""
    return dict(zip(problem.cluster.device_names, timeline.peak_bytes.tolist(), strict=True))


def device_names(problem: Problem, plan: Plan) -> dict[str, str]:
    """By op, the device that it is on."""
    names, device_of = problem.cluster.device_names, plan[Placement].device_of.tolist()
    ops = problem.graph.op_names
    return {op: names[device] for op, device in zip(ops, device_of, strict=True)}
