"""Divisions of a transformer: programs, limits, the search, one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hocket.api.planned import find_cluster
from hocket.cost.parallel.coefficients import (
    NAMES,
    Coefficients,
    read_coefficients,
    write_coefficients,
)
from hocket.cost.parallel.options import with_options
from hocket.cost.parallel.softwares import DEFAULT_SOFTWARE, SOFTWARES, find_software, usual_dtype
from hocket.hardware.cluster import Cluster
from hocket.plan.divided import DividedTraining
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners.parallelism.configuration import read_configuration
from hocket.planners.parallelism.limits import fixed_limits
from hocket.planners.parallelism.outlook import SPARE, outlook_of
from hocket.planners.parallelism.programs import PROGRAMS, Abilities, asked_limits
from hocket.planners.parallelism.recheck import RecheckEffort
from hocket.planners.parallelism.search import default_limits, plan_of, search, single
from hocket.transformer import Transformer
from hocket.transformer.files import find_model

__all__ = [
    "DEFAULT_SOFTWARE",
    "NAMES",
    "PROGRAMS",
    "SOFTWARES",
    "Abilities",
    "Coefficients",
    "RecheckEffort",
    "asked_limits",
    "default_limits",
    "find_software",
    "fixed_limits",
    "make_training",
    "outlook_of",
    "plan_of",
    "plan_parallel",
    "read_coefficients",
    "read_configuration",
    "search",
    "single",
    "usual_dtype",
    "with_options",
    "write_coefficients",
]


def plan_parallel(
    model: str | Path | Transformer,
    on: str | Path | Cluster,
    batch: int,
    *,
    software: str | None = None,
    coefficients: Coefficients | None = None,
) -> DividedTraining:
    """Divide the training of a transformer over a cluster: data x tensor x pipeline.

    ``model`` is a preset, a file (see `hocket.transformer.files.find_model`) or a shape; ``batch``
    counts sequences per step. Raises `NoFeasiblePlanError` where nothing fits.
    """
    problem = make_training(model, on, batch, software=software, coefficients=coefficients)
    return DividedTraining(problem, plan_of(search(problem)))


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
    """What is trained on what; without ``dtype``, in the first type that all devices have.

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
