"""Compare a division with one device at toy size: the loss and every gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hocket.base.errors import CheckError
from hocket.plan.sections.schedule import Schedule
from hocket.plan.transformer_plan import TransformerPlan
from hocket.runtime.parallel.batch import token_batch, token_loss
from hocket.runtime.parallel.build import whole_model
from hocket.runtime.parallel.job import TrainingJob
from hocket.runtime.parallel.jobs import make_job
from hocket.runtime.parallel.model import TIED
from hocket.runtime.parallel.refusals import refuse_plan, str_of
from hocket.runtime.parallel.spawn import JobResult, run_jobs
from hocket.runtime.parallel.trainer import new_optimizer
from hocket.runtime.threads import torch_threads
from hocket.transformer import ParallelConfig, Transformer

# A division at toy size: the same structure on few processes and a model of a few thousand
# parameters.

_MAX_STAGES_ALONE = 4
"""Pipeline ranks where there is no other kind of parallelism; with one there are two."""
_MAX_KEPT_ACTIONS = 512
"""A schedule with no more actions per device is kept as it is."""


def toy_of(
    model: Transformer, division: ParallelConfig, schedule: Schedule
) -> tuple[Transformer, ParallelConfig, Schedule]:
    """A small model, and the division with its schedule on at most eight ranks."""
    small = toy_division(division)
    if (
        small.pipeline == division.pipeline
        and small.chunks == division.chunks
        and (len(schedule.work) <= _MAX_KEPT_ACTIONS * division.pipeline)
    ):
        microbatches = schedule.num_microbatches
    else:
        schedule = _shorter(division, small, schedule)
        microbatches = schedule.num_microbatches
    small = replace(small, global_batch=microbatches * small.microbatch * small.data)
    layers = _layers(division, small)
    return toy_model(model, sum(layers)), replace(small, layers=layers), schedule


def toy_division(division: ParallelConfig) -> ParallelConfig:
    """The division with degrees of at most two, four for a pipeline alone."""
    others = (division.tensor > 1) + (division.data > 1)
    most = _MAX_STAGES_ALONE if not others else 2
    pipeline = min(division.pipeline, most)
    return replace(
        division,
        tensor=min(division.tensor, 2),
        data=min(division.data, 2),
        pipeline=pipeline,
        chunks=min(division.chunks, 2) if pipeline > 1 else 1,
        microbatch=1,
        layers=None,
    )


def toy_model(model: Transformer, num_layers: int) -> Transformer:
    """The model with small widths; what it is made of stays."""
    return replace(
        model,
        hidden=16,
        layers=num_layers,
        heads=4,
        kv_heads=4 if model.kv_heads == model.heads else 2,
        head_width=4,
        mlp_width=24,
        vocabulary=32,
        sequence=8,
        experts=None,
    )


def _layers(division: ParallelConfig, small: ParallelConfig) -> tuple[int, ...]:
    """One layer per stage; where the division is uneven, stages take turns with two."""
    uneven = division.layers is not None and len(set(division.layers)) > 1
    return tuple(2 if uneven and stage % 2 else 1 for stage in range(small.num_stages))


def _shorter(division: ParallelConfig, small: ParallelConfig, schedule: Schedule) -> Schedule:
    """A schedule of the same kind for fewer ranks; one of its own making becomes a named one.

    One that folds its stages and splits nothing becomes a looped one.
    """
    from hocket.planners.parallel.schedules import make_schedule

    names = ("1f1b" if small.pipeline == 1 else division.schedule, "interleaved", "zb-h1")
    made = [make_schedule(n, small.pipeline, 2 * small.pipeline, small.chunks) for n in names]
    # How replicas agree follows from whether backwards are split, so that must stay as it is.
    alike = (found for found in made if found.splits_backward == schedule.splits_backward)
    return next(alike)


# The same training on one device, without any division: what a parallel run must agree with.


@dataclass(frozen=True)
class DividedReference:
    """Losses of all steps and gradients of the first."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]


def reference_run(job: TrainingJob) -> DividedReference:
    """Train the model of a job on one device with the whole batch at once."""
    # Small models run fastest on one thread, above all on a busy machine.
    with torch_threads(1):
        return _train(job)


def _train(job: TrainingJob) -> DividedReference:
    stage = whole_model(job.model, seed=job.seed, dtype=getattr(torch, job.dtype))
    parameters = dict(stage.named_parameters())
    optimizer = new_optimizer(list(parameters.values()), job.learning_rate)
    losses, gradients = [], {}
    for number in range(1, job.steps + 1):
        optimizer.zero_grad()
        sequences = range(job.division.global_batch)
        ids, targets = token_batch(job.model, sequences, seed=job.seed, step=number)
        loss = token_loss(stage(ids), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if job.model.tied_embeddings:
            _sum_tied(parameters)
        if number == 1:
            gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return DividedReference(tuple(losses), gradients)


def _sum_tied(parameters: dict[str, torch.nn.Parameter]) -> None:
    first, second = (parameters[name].grad for name in TIED)
    assert first is not None
    assert second is not None
    total = first + second
    first.copy_(total)
    second.copy_(total)


TOLERANCE = 1e-6
"""Largest difference, relative to the largest value of the tensor and never below one."""
_STEPS = 2
"""The second step's loss also tells whether the optimizer did its part."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far a division is from one device."""

    loss_error: float
    gradient_error: float
    worst: str
    """The parameter whose gradient is the furthest off."""

    @property
    def is_right(self) -> bool:
        """Whether all differences are within the tolerance; what is not a number is not."""
        return self.loss_error <= TOLERANCE and self.gradient_error <= TOLERANCE


def check_division(plan: TransformerPlan) -> Agreement:
    """Run a plan's division at toy size against one device; raises where they differ."""
    refuse_plan(plan)
    model, division, schedule = toy_of(plan.model, plan.division, plan.schedule)
    found = check_jobs([make_job(model, division, schedule)])[0]
    if not found.is_right:
        raise CheckError(
            f"PyTorch trains {str_of(plan.division)} wrongly: at toy size the loss is off by "
            f"{found.loss_error:.1e} and the gradient of {found.worst!r} by "
            f"{found.gradient_error:.1e}",
            hint="choose another schedule or ZeRO stage, and please report this",
        )
    return found


def check_jobs(jobs: Sequence[TrainingJob]) -> list[Agreement]:
    """How far jobs of the same number of ranks are from one device, in one set of processes."""
    exact = [
        replace(job, steps=_STEPS, dtype="float64", wants_gradients=True, learning_rate=1e-2)
        for job in jobs
    ]
    names = [f"rank{rank}" for rank in range(exact[0].division.num_devices)]
    results = run_jobs(exact, names)
    return [
        _agreement(reference_run(job), result) for job, result in zip(exact, results, strict=True)
    ]


def _agreement(reference: DividedReference, result: JobResult) -> Agreement:
    losses = zip(result.losses, reference.losses, strict=True)
    loss_error = _worst(abs(found - expected) for found, expected in losses)
    errors: dict[str, float] = {}
    for gradients in result.gradients.values():
        for name, found in gradients.items():
            expected = reference.gradients[name].flatten()
            difference = float((found - expected).abs().max())
            scale = max(1.0, float(expected.abs().max()))
            errors[name] = _worst((errors.get(name, 0.0), difference / scale))
    missing = reference.gradients.keys() - errors.keys()
    errors |= dict.fromkeys(missing, float("inf"))
    worst = max(errors, key=lambda name: errors[name])
    return Agreement(loss_error=loss_error, gradient_error=errors[worst], worst=worst)


def _worst(errors: Iterable[float]) -> float:
    """The largest of them; infinite where one is not a number, which compares with nothing."""
    return max(math.inf if math.isnan(error) else error for error in errors)
