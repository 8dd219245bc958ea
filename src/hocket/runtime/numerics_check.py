"""Check the numerics of a parallel configuration at small size, against training on one device.

The small configuration has the same structure: the same types of parallelism with degrees of two, a
schedule of the same type, and a model of a few thousand parameters. It runs in CPU processes with
gloo. Losses and gradients in double precision must agree within `TOLERANCE` with plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from hocket.base.arrays import FloatArray
from hocket.base.errors import CheckError
from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel, Schedule
from hocket.plan.transformer_plan import TransformerPlan
from hocket.runtime.process_settings import torch_threads
from hocket.runtime.run_options import RunCallbacks, RunOptions
from hocket.runtime.run_ranks import run_ranks
from hocket.runtime.step_record import StepRecord
from hocket.runtime.transformer_model import built_in_model, token_batch
from hocket.runtime.transformer_refusals import refuse_degrees, refuse_plan, str_of
from hocket.transformer import ParallelConfig, Transformer

_MAX_STAGES_ALONE = 4
"""Maximum number of pipeline ranks without tensor or data parallelism; otherwise it is two."""
_MAX_KEPT_ACTIONS = 512
"""Maximum number of actions per device of a schedule that is used unchanged."""


def small_of(
    model: Transformer, config: ParallelConfig, schedule: Schedule
) -> tuple[Transformer, ParallelConfig, Schedule]:
    """Return a small model, and the config with its schedule on at most eight ranks."""
    small = small_config(config)
    if (
        small.pipeline == config.pipeline
        and small.chunks == config.chunks
        and (len(schedule.work) <= _MAX_KEPT_ACTIONS * config.pipeline)
    ):
        microbatches = schedule.num_microbatches
    else:
        schedule = _shorter(config, small, schedule)
        microbatches = schedule.num_microbatches
    small = replace(small, global_batch=microbatches * small.microbatch * small.data)
    layers = _layers(config, small)
    return small_model(model, sum(layers)), replace(small, layers=layers), schedule


def small_config(config: ParallelConfig) -> ParallelConfig:
    """Return the config with degrees of at most two, or four for a pipeline alone."""
    others = (config.tensor > 1) + (config.data > 1)
    most = _MAX_STAGES_ALONE if not others else 2
    pipeline = min(config.pipeline, most)
    return replace(
        config,
        tensor=min(config.tensor, 2),
        data=min(config.data, 2),
        pipeline=pipeline,
        chunks=min(config.chunks, 2) if pipeline > 1 else 1,
        microbatch=1,
        layers=None,
    )


def small_model(model: Transformer, num_layers: int) -> Transformer:
    """Return a model of the same architecture with small widths."""
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


def _layers(config: ParallelConfig, small: ParallelConfig) -> tuple[int, ...]:
    """Return the layers per stage: all one, or for uneven configs alternately one and two."""
    uneven = config.layers is not None and len(set(config.layers)) > 1
    return tuple(2 if uneven and stage % 2 else 1 for stage in range(small.num_stages))


def _shorter(config: ParallelConfig, small: ParallelConfig, schedule: Schedule) -> Schedule:
    """Return a schedule for fewer ranks that splits backward passes if ``schedule`` does.

    The candidates are the config's named schedule, interleaved 1F1B and ZB-H1, in this order.
    """
    from hocket.planners.parallel.schedules import make_schedule

    names = ("1f1b" if small.pipeline == 1 else config.schedule, "interleaved", "zb-h1")
    made = [make_schedule(n, small.pipeline, 2 * small.pipeline, small.chunks) for n in names]
    # Replicas sum gradients at another time if backward passes are split, so that must not change.
    return next(each for each in made if each.splits_backward == schedule.splits_backward)


TOLERANCE = 1e-6
"""Maximum difference, relative to the larger one of the tensor's largest value and 1."""
_STEPS = 2
"""Number of steps: the second loss also depends on the first update."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences from training on one device."""

    loss_error: float
    gradient_error: float
    worst: str
    """Name of the parameter whose gradient differs most."""

    @property
    def is_right(self) -> bool:
        """True if all differences are within the tolerance; NaN never is."""
        return self.loss_error <= TOLERANCE and self.gradient_error <= TOLERANCE


def check_parallel(plan: TransformerPlan) -> Agreement:
    """Compare a plan's configuration at small size with one device; raises `CheckError` if results
    differ."""
    refuse_plan(plan)
    refuse_degrees(plan.config)
    found = differences(small_plan(plan))
    if not found.is_right:
        raise CheckError(
            f"{str_of(plan.config)} gives wrong results: at small size the loss is off by "
            f"{found.loss_error:.1e} and the gradient of {found.worst!r} by "
            f"{found.gradient_error:.1e}",
            hint="choose another schedule or ZeRO stage, and please report this",
        )
    return found


def small_plan(plan: TransformerPlan) -> SavedPlan:
    """Return the plan with a small model on few devices."""
    model, config, schedule = small_of(plan.model, plan.config, plan.schedule)
    names = plan.cluster.device_names
    each = config.num_devices // config.pipeline
    parallel = Parallel.of_config(config, model, tuple(
        tuple(names[rank * each : (rank + 1) * each]) for rank in range(config.pipeline)
    ))  # fmt: skip
    work = replace(plan.problem.training, model=model, global_batch=config.global_batch)
    problem = replace(plan.problem, work=work)
    return SavedPlan(problem, Plan(planner=plan.plan.planner, sections=(parallel, schedule)))


def differences(saved: SavedPlan, seed: int = 0) -> Agreement:
    """Compare losses and gradients of a small plan with one device, in double precision."""
    losses: list[float] = []

    def note(number: int, record: StepRecord) -> None:
        losses.append(math.nan if record.loss is None else record.loss)

    num_ranks = saved.plan[Parallel].config.num_devices
    places = {f"rank{rank}": "cpu" for rank in range(num_ranks)}
    # SGD with lr=1 moves each parameter by its gradient, so parameters show the gradients.
    given = {
        "model": None, "dtype": "float64", "state_after": 1,
        "update": {"name": "sgd", "settings": {"lr": 1.0}},
    }  # fmt: skip
    options = RunOptions(steps=_STEPS, seed=seed, threads=1)
    report = run_ranks(saved, places, given, options, "gloo", RunCallbacks(on_step=note))
    return _agreement(reference_run(saved, seed), tuple(losses), report.state)


@dataclass(frozen=True)
class Reference:
    """Losses of all steps on one device, and parameters before and after the first step."""

    losses: tuple[float, ...]
    before: Mapping[str, FloatArray]
    after: Mapping[str, FloatArray]


def reference_run(saved: SavedPlan, seed: int = 0) -> Reference:
    """Train the model of a small plan in plain PyTorch on full batches."""
    training = saved.problem.training
    model = built_in_model(training.model, seed=seed, dtype=torch.float64)
    losses, states = [], [_state(model)]
    # Small models run fastest on one thread, above all on a busy machine.
    with torch_threads(1):
        for number in range(1, _STEPS + 1):
            sequences = range(training.global_batch)
            model.zero_grad()
            loss = model(*token_batch(training.model, sequences, seed=seed, step=number))
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad)
            losses.append(loss.item())
            states.append(_state(model))
    return Reference(tuple(losses), states[0], states[1])


def _state(model: torch.nn.Module) -> dict[str, FloatArray]:
    return {name: value.numpy().flatten().copy() for name, value in model.state_dict().items()}


def _agreement(
    reference: Reference, losses: tuple[float, ...], state: Mapping[str, FloatArray]
) -> Agreement:
    pairs = zip(losses, reference.losses, strict=True)
    loss_error = _worst(abs(found - expected) for found, expected in pairs)
    errors: dict[str, float] = {}
    for name, expected in reference.after.items():
        if name not in state:
            errors[name] = math.inf
            continue
        scale = max(1.0, float(np.abs(expected - reference.before[name]).max()))
        errors[name] = _worst([float(np.abs(state[name] - expected).max()) / scale])
    worst = max(errors, key=lambda name: errors[name])
    return Agreement(loss_error=loss_error, gradient_error=errors[worst], worst=worst)


def _worst(errors: Iterable[float]) -> float:
    """Return the largest error, counting NaN as infinite."""
    return max(math.inf if math.isnan(error) else error for error in errors)
