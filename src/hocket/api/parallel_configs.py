"""Plan a transformer by its shape: make the problem, limit the search, write plan and report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hocket.api.planned import best_of
from hocket.api.planners import compare_candidates
from hocket.base.atomic import write_together
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import DEFAULT_SOFTWARE, find_software, usual_dtype
from hocket.hardware.cluster import Cluster
from hocket.plan.files import plan_bytes
from hocket.plan.make import find_cluster
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.candidates import Comparison
from hocket.planners.parallel.forecast import SPARE
from hocket.planners.parallel.search_limits import fixed_limits, requested_limits
from hocket.planners.parallel.transformer_search import default_limits, plan_of
from hocket.transformer import Transformer
from hocket.transformer.files import find_model


def plan_parallel(
    model: str | Path | Transformer,
    on: str | Path | Cluster,
    batch: int,
    *,
    software: str = DEFAULT_SOFTWARE,
    coefficients: Coefficients | None = None,
) -> TransformerPlan:
    """Choose data x tensor x pipeline degrees for the training of a transformer on a cluster.

    ``model`` is a preset, a file (see `hocket.transformer.files.find_model`) or a shape; ``batch``
    counts sequences per step. Raises `NoFeasiblePlanError` where nothing fits.
    """
    program = find_software(software)
    problem = make_training(model, on, batch, program=program, coefficients=coefficients)
    return TransformerPlan(problem, plan_of(compare_candidates(problem)))


def make_training(
    model: str | Path | Transformer,
    on: str | Path | Cluster,
    batch: int,
    *,
    program: Software | None = None,
    dtype: str | None = None,
    coefficients: Coefficients | None = None,
) -> Problem:
    """Return the problem of training a model on a cluster.

    ``dtype`` defaults to the first dtype of the program that all devices support.
    """
    cluster = find_cluster(on)
    program = program or find_software(DEFAULT_SOFTWARE)
    return Problem(
        work=TransformerTraining(
            model=model if isinstance(model, Transformer) else find_model(str(model)),
            global_batch=batch,
            software=replace(program, dtype=dtype or usual_dtype(program, cluster)),
            coefficients=coefficients or Coefficients(),
        ),
        cluster=cluster,
        spare=SPARE,
    )


def limited(problem: Problem, fixed: str) -> Problem:
    """Return the problem restricted to configs with values such as ``tensor=8,recompute=full``."""
    limits = fixed_limits(default_limits(problem), fixed)
    return replace(problem, limits=requested_limits(limits, problem.training.software.name))


def save_winner(comparison: Comparison, plan: Plan, output: Path, report: Path) -> None:
    """Write the plan of a comparison's winner and its HTML report: both files or none."""
    if isinstance(comparison.problem.work, TransformerTraining):
        from hocket.view.parallel_report import parallel_report_html

        shown = TransformerPlan(comparison.problem, plan)
        page = parallel_report_html(shown, comparison, plan_file=output.name)
    else:
        page = best_of(comparison).report_html(output.name)
    content = plan_bytes(output, comparison.problem, plan)
    write_together({output: content, report: page.encode()})
