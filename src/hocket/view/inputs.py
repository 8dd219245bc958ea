"""Data of a plan's inputs for ``--json``: graphs, clusters, profiles, calibrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.base.arrays import FloatArray
from hocket.base.units import format_seconds
from hocket.cost.parallel.coefficients import NAMES, Coefficients
from hocket.cost.profile import Profile
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.hardware.write import cluster_to_dict
from hocket.view.wording import picked

if TYPE_CHECKING:
    from hocket.cost.calibrate import FamilyError
    from hocket.cost.measured_steps import StepRun


def graph_data(graph: Graph, file: Path) -> dict[str, Any]:
    """Size of a captured or generated graph, and totals over its ops."""
    return {
        "file": file,
        "name": graph.name,
        "ops": graph.num_ops,
        "tensors": graph.num_tensors,
        "level": graph.meta.get("level", "op"),
        "bytes": graph.bytes_by_role(),
        "flops": graph.flops.sum(),
        "hash": graph.content_hash,
    }


def cluster_data(cluster: Cluster, file: Path | None) -> dict[str, Any]:
    """A detected or probed cluster in the form of its file."""
    return {"file": file, "cluster": cluster_to_dict(cluster)}


def profile_data(profile: Profile, file: Path) -> dict[str, Any]:
    """Numbers of timed ops, and ops without a time."""
    return {
        "file": file,
        "device_kind": profile.device_kind,
        "entries": len(profile.entries),
        "missing": profile.missing,
    }


def calibration_data(device_kind: str, errors: Sequence[FamilyError], file: Path) -> dict[str, Any]:
    """Errors of the fitted efficiencies for each family of ops."""
    families = {row.family: picked(row, "measured_s", "predicted_s", "error") for row in errors}
    return {"file": file, "device_kind": device_kind, "families": families}


def measured_run_lines(runs: Sequence[StepRun]) -> list[str]:
    """Text table of predicted and measured steps, one line per run."""
    lines = [f"{'model':<24}{'device types':<20}{'predicted':>12}{'measured':>12}{'error':>9}"]
    for run in runs:
        predicted, measured = (format_seconds(s) for s in (run.predicted_s, run.measured_s))
        error = run.predicted_s / run.measured_s - 1
        types = ", ".join(run.device_types)
        lines.append(f"{run.model:<24}{types:<20}{predicted:>12}{measured:>12}{error:>+9.1%}")
    return lines


def coefficients_data(
    coefficients: Coefficients,
    file: Path,
    num_skipped: int,
    before: FloatArray,
    after: FloatArray,
) -> dict[str, Any]:
    """Fitted coefficients, and errors on the runs to which they were fitted."""
    return {
        "file": file,
        "runs": len(after),
        "skipped": num_skipped,
        "coefficients": picked(coefficients, *NAMES),
        "mean_error_before": abs(before).mean(),
        "mean_error_after": abs(after).mean(),
        "errors": after,
    }
