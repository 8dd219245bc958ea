"""Parallel configs of a transformer: programs, limits, the search, single configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.api.planned import best_of, find_cluster
from hocket.api.planners import compare_candidates
from hocket.base.errors import unknown_name
from hocket.cost.parallel.coefficients import (
    NAMES,
    Coefficients,
    read_coefficients,
    write_coefficients,
)
from hocket.cost.parallel.options import with_options
from hocket.cost.parallel.softwares import DEFAULT_SOFTWARE, SOFTWARES, find_software, usual_dtype
from hocket.hardware.cluster import Cluster
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.config_file import read_configuration
from hocket.planners.parallel.forecast import SPARE, forecast_of
from hocket.planners.parallel.pools import accelerators
from hocket.planners.parallel.search_limits import PROGRAMS, fixed_limits, requested_limits
from hocket.planners.parallel.simulated_calibration import (
    MOST_LAYERS,
    MOST_SIMULATED,
    calibrated,
    part_batch,
    part_of,
)
from hocket.planners.parallel.transformer_search import default_limits, plan_of, single
from hocket.transformer import SCHEDULES, Transformer
from hocket.transformer.files import find_model, is_shape

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison

__all__ = [
    "DEFAULT_SOFTWARE",
    "MOST_LAYERS",
    "MOST_SIMULATED",
    "NAMES",
    "PROGRAMS",
    "SOFTWARES",
    "Coefficients",
    "accelerators",
    "calibrated",
    "find_cluster",
    "find_software",
    "forecast_of",
    "is_shape",
    "limited",
    "make_training",
    "part_batch",
    "part_of",
    "plan_of",
    "plan_parallel",
    "read_coefficients",
    "read_configuration",
    "single",
    "usual_dtype",
    "with_options",
    "write_coefficients",
    "written_files",
]


def plan_parallel(
    model: str | Path | Transformer,
    on: str | Path | Cluster,
    batch: int,
    *,
    software: str | None = None,
    coefficients: Coefficients | None = None,
) -> TransformerPlan:
    """Divide the training of a transformer over a cluster: data x tensor x pipeline.

    ``model`` is a preset, a file (see `hocket.transformer.files.find_model`) or a shape; ``batch``
    counts sequences per step. Raises `NoFeasiblePlanError` where nothing fits.
    """
    problem = make_training(model, on, batch, software=software, coefficients=coefficients)
    return TransformerPlan(problem, plan_of(compare_candidates(problem)))


def make_training(
    model: str | Path | Transformer,
    on: str | Path | Cluster,
    batch: int,
    *,
    software: str | None = None,
    options: Sequence[str] = (),
    dtype: str | None = None,
    coefficients: Coefficients | None = None,
    spare: float | None = None,
) -> Problem:
    """The training of a model on a cluster, by default in the first type that all devices have.

    ``options`` set the program (``async-tp``, ``hsdp=8``); ``spare`` is the share of memory that
    stays free, a few percent unless it is given.
    """
    cluster = find_cluster(on)
    program = with_options(find_software(software or DEFAULT_SOFTWARE), options)
    return Problem(
        work=TransformerTraining(
            model=model if isinstance(model, Transformer) else find_model(str(model)),
            global_batch=batch,
            software=replace(program, dtype=dtype or usual_dtype(program, cluster)),
            coefficients=coefficients or Coefficients(),
        ),
        cluster=cluster,
        spare=SPARE if spare is None else spare,
    )


def limited(
    problem: Problem,
    *,
    fixed: str = "",
    schedules: Sequence[str] = (),
    max_tensor: int | None = None,
) -> Problem:
    """The problem with limits on what is tried, within what its program can run.

    ``fixed`` is text such as ``tensor=8,recompute=full``.
    """
    limits = default_limits(problem)
    if max_tensor is not None:
        limits = replace(limits, max_tensor=max_tensor)
    for name in schedules:
        if name not in SCHEDULES:
            raise unknown_name("schedule", name, SCHEDULES)
    if schedules:
        limits = replace(limits, schedules=tuple(s for s in SCHEDULES if s in schedules))
    limits = requested_limits(fixed_limits(limits, fixed), problem.training.software.name)
    return replace(problem, limits=limits)


def written_files(
    comparison: Comparison, plan: Plan, output: Path | None, report: Path | None
) -> list[Path]:
    """Write the plan and the HTML report of a comparison's winner, where they are wanted."""
    from hocket.base.atomic import write_together
    from hocket.plan.files import plan_bytes
    from hocket.view.parallel_report import parallel_report_html
    from hocket.view.report import report_html

    contents: dict[str | Path, bytes] = {}
    if output is not None:
        contents[output] = plan_bytes(output, comparison.problem, plan)
    if report is not None and isinstance(comparison.problem.work, TransformerTraining):
        page = parallel_report_html(TransformerPlan(comparison.problem, plan), comparison)
        contents[report] = page.encode()
    elif report is not None:
        planned = best_of(comparison)
        page = report_html(*planned.pictured(), planned.timeline, comparison)
        contents[report] = page.encode()
    write_together(contents)
    return [Path(path) for path in contents]
