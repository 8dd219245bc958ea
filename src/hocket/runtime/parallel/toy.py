"""A division at toy size: the same structure on few processes and a model of a few thousand
parameters."""

from __future__ import annotations

from dataclasses import replace

from hocket.plan.sections.schedule import Schedule
from hocket.transformer import Division, Transformer

_MAX_STAGES_ALONE = 4
"""Pipeline ranks where there is no other kind of parallelism; with one there are two."""
_MAX_KEPT_ACTIONS = 512
"""A schedule with no more actions per device is kept as it is."""


def toy_of(
    model: Transformer, division: Division, schedule: Schedule
) -> tuple[Transformer, Division, Schedule]:
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


def toy_division(division: Division) -> Division:
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


def _layers(division: Division, small: Division) -> tuple[int, ...]:
    """One layer per stage; where the division is uneven, stages take turns with two."""
    uneven = division.layers is not None and len(set(division.layers)) > 1
    return tuple(2 if uneven and stage % 2 else 1 for stage in range(small.num_stages))


def _shorter(division: Division, small: Division, schedule: Schedule) -> Schedule:
    """A schedule of the same kind for fewer ranks; one of its own making becomes a named one.

    One that folds its stages and splits nothing becomes a looped one.
    """
    from hocket.planners.parallelism.schedules import make_schedule

    names = ("1f1b" if small.pipeline == 1 else division.schedule, "interleaved", "zb-h1")
    made = [make_schedule(n, small.pipeline, 2 * small.pipeline, small.chunks) for n in names]
    # How replicas agree follows from whether backwards are split, so that must stay as it is.
    alike = (found for found in made if found.splits_backward == schedule.splits_backward)
    return next(alike)
