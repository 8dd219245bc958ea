"""Comparisons of candidates: what ``--json`` prints of them, and which other command to try."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.base.errors import InputFileError
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners.goal import num_devices
from hocket.transformer.captured import from_graph
from hocket.view.parallel import forecasts_data
from hocket.view.placed import device_peaks
from hocket.view.shared import placing, sharing

if TYPE_CHECKING:
    from hocket.planners.candidates import Candidate, Comparison

MOST_CONFIGS = 10
FEW_DEVICES = 8
"""Up to so many devices alike, shares of a batch seldom lose to configs that split ops."""


def comparison_data(comparison: Comparison, most_configs: int = MOST_CONFIGS) -> dict[str, Any]:
    """Candidates and the winner; of hundreds of parallel configs the first few."""
    if isinstance(comparison.problem.work, TransformerTraining):
        data = forecasts_data(comparison, most_configs)
        return data | {"answered_by": answered_by(comparison), "elsewhere": elsewhere(comparison)}
    data = _asked(comparison) | _compared(comparison) | _bound(comparison) | _won(comparison)
    return data | {"answered_by": answered_by(comparison), "elsewhere": elsewhere(comparison)}


def answered_by(comparison: Comparison) -> str:
    """The method behind the step times: simulated ops, or the closed form of a program."""
    work = comparison.problem.work
    if isinstance(work, TransformerTraining):
        return f"closed form of {work.software.name}, pipelines simulated"
    return "simulation of the captured ops"


def elsewhere(comparison: Comparison) -> str:
    """Hint at the other command where that could find a better plan; empty where not."""
    problem = comparison.problem
    if isinstance(problem.work, TransformerTraining):
        if len(problem.cluster.kinds) == 1:
            return ""
        return (
            "these devices are unequal: hocket plan MODEL also gives each as many samples as it is "
            "fast, which configs do not"
        )
    fits_few = comparison.winner is not None and problem.cluster.num_devices <= FEW_DEVICES
    if fits_few or not _is_transformer(problem):
        return ""
    return (
        "for a transformer on many devices hocket parallel MODEL --software NAME also splits "
        "single ops and sequences over devices, and knows more schedules of pipelines"
    )


def _is_transformer(problem: Problem) -> bool:
    """True if ``hocket parallel`` can read the model's shape from its graph."""
    try:
        from_graph(problem.graph)
    except InputFileError:
        return False
    return True


def _asked(comparison: Comparison) -> dict[str, Any]:
    graph, cluster = comparison.problem.graph, comparison.problem.cluster
    return {
        "graph": {"name": graph.name, "ops": graph.num_ops, "hash": graph.content_hash},
        "cluster": {"name": cluster.name, "hash": cluster.content_hash},
        "costs": comparison.problem.costs.sources(),
    }


def _compared(comparison: Comparison) -> dict[str, Any]:
    winner = comparison.winner
    return {
        "candidates": [_candidate(comparison, c) for c in comparison.candidates],
        "chosen": winner.planner if winner else None,
        "why": comparison.why,
    }


def _candidate(comparison: Comparison, candidate: Candidate) -> dict[str, Any]:
    timeline = candidate.timeline
    data = {
        "planner": candidate.planner,
        "feasible": candidate.feasible,
        "step_s": candidate.step_s,
        "peak_bytes": {} if timeline is None else device_peaks(comparison.problem, timeline),
        "devices": num_devices(candidate),
        "reason": candidate.reason,
        "plan_seconds": candidate.plan_seconds,
    }
    return data | _load(candidate) | sharing(comparison, candidate)


def _bound(comparison: Comparison) -> dict[str, Any]:
    if comparison.bound is None:
        return {}
    return {
        "lower_bound_s": comparison.bound.seconds,
        "lower_bound_from": comparison.bound.why,
    }


def _won(comparison: Comparison) -> dict[str, Any]:
    winner = comparison.winner
    if winner is None or winner.plan is None or winner.timeline is None:
        return {}
    data = {
        "planner": winner.planner,
        "step_s": winner.step_s,
        "gap": comparison.gap,
        "peak_bytes": device_peaks(comparison.problem, winner.timeline),
        "plan_seconds": winner.plan_seconds,
        "notes": {**winner.plan.claims.summary(), **winner.plan.notes},
    }
    return data | _load(winner) | sharing(comparison, winner) | placing(comparison, winner)


def _load(candidate: Candidate) -> dict[str, float]:
    return {} if candidate.max_load_s is None else {"max_load": candidate.max_load_s}
