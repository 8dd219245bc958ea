"""Data for ``--json`` of allocations, simulated fleets and predicted throughputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.fleet.allocation import Allocation
from hocket.fleet.cluster_snapshot import ClusterSnapshot
from hocket.fleet.simulator.fleet_run import FleetRun
from hocket.fleet.throughputs.planned import GangPlan
from hocket.fleet.throughputs.predict import PredictedThroughputs
from hocket.view.comparison import how_of

MOST_NAMES = 20
"""Maximum number of named jobs among those that can never run."""


def allocation_data(
    snapshot: ClusterSnapshot, answer: Allocation, solve_seconds: float
) -> dict[str, Any]:
    """Fraction of each device type that each job gets, and the objective reported by the policy."""
    allocation = {
        job: {
            device_type: share
            for device_type, share in zip(snapshot.device_types, row, strict=True)
            if share > 0.0
        }
        for job, row in zip(snapshot.ids, answer.shares.tolist(), strict=True)
    }
    return {
        "policy": answer.policy,
        "allocation": allocation,
        "objective": _finite(answer.objective),
        "bound": _finite(answer.bound),
        "gap": _finite(answer.gap),
        "solve_seconds": solve_seconds,
        "notes": allocation_notes(snapshot, answer),
    }


def allocation_notes(snapshot: ClusterSnapshot, answer: Allocation) -> dict[str, str]:
    """Notes of the policy, and the jobs that no policy can run."""
    fastest = snapshot.usable_steps_per_s.max(axis=1, initial=0.0).tolist()
    never = [job for job, speed in zip(snapshot.ids, fastest, strict=True) if speed <= 0.0]
    if not never:
        return answer.notes
    names = ", ".join(never[:MOST_NAMES]) + (", …" if len(never) > MOST_NAMES else "")
    return {**answer.notes, "cannot run": f"{names}: no device type has enough usable devices"}


def run_data(run: FleetRun) -> dict[str, Any]:
    """Figures of a simulated fleet."""
    return {
        key: _finite(value) if isinstance(value, float) else value
        for key, value in run.figures().items()
    }


def prediction_data(prediction: PredictedThroughputs) -> dict[str, Any]:
    """Inputs of the predicted throughputs of one model."""
    return {
        "job_type": prediction.throughputs.profiles[0].job_type,
        "gradient_bytes": prediction.gradient_bytes,
        "device_types": {
            step.servers.name: {
                "hardware": step.servers.hardware,
                "step_s": _finite(step.step_s),
                "peak_bytes": step.peak_bytes,
                "between_servers_bps": step.servers.between.bandwidth_bps,
                "obstacle": step.obstacle or None,
            }
            for step in prediction.steps
        },
    }


def gang_plans_data(plans: Sequence[GangPlan]) -> list[dict[str, Any]]:
    """The best plan of every gang, or the reason why none fits."""
    return [
        {
            "device_type": plan.servers.name,
            "hardware": plan.servers.hardware,
            "gang": plan.gang,
            "steps_per_s": plan.steps_per_s,
            "how": None if plan.comparison.winner is None else how_of(plan.comparison.winner),
            "why": plan.comparison.why,
        }
        for plan in plans
    ]


def _finite(value: float) -> float | None:
    """The value, or None (JSON null) if the value is infinite or NaN."""
    return value if abs(value) < float("inf") else None
