"""Prove a parallel plan legal as far as that needs no simulator.

Degrees multiply to the devices, which exist and are used once; layers and batch divide; the costs
name every stage; the schedule does each stage's forward and backward once per microbatch on the
device of the stage. O(actions). That the order of the actions can run to its end, and that memory
holds, is checked where plans are simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from hocket.base.errors import InputFileError
from hocket.plan.parallel import ParallelPlan
from hocket.plan.schedule import Schedule, Work
from hocket.plan.verify import Violation

MAX_ACTIONS = 20_000_000
"""Stages times microbatches; more is a hostile file."""


def require_parallel_structure(plan: ParallelPlan, where: str) -> None:
    """Raise `InputFileError` with the first violations of structure, if there are any."""
    found = list(parallel_structure_violations(plan))
    if found:
        message = "; ".join(violation.message for violation in found[:3])
        raise InputFileError(message, hint="make the plan again with hocket parallel", where=where)


def parallel_structure_violations(plan: ParallelPlan) -> Iterator[Violation]:
    """All broken rules of structure."""
    yield from _degrees(plan)
    yield from _devices(plan)
    yield from _layers(plan)
    yield from _costs(plan)
    yield from _schedule(plan)


def memory_violations(plan: ParallelPlan) -> Iterator[Violation]:
    """Devices that cannot hold the predicted peak of their pipeline rank."""
    capacity = {device.name: device.memory_bytes for device in plan.cluster.devices}
    for rank, (names, peak) in enumerate(zip(plan.devices, plan.peak_bytes, strict=True)):
        name = min(names, key=lambda name: capacity[name])
        if peak > capacity[name]:
            lacking = (peak - capacity[name]) / 2**30
            message = f"pipeline rank {rank} lacks {lacking:.1f} GiB on {name!r}"
            yield Violation("memory", message, device=name)


def _degrees(plan: ParallelPlan) -> Iterator[Violation]:
    division, model = plan.division, plan.model
    per_step = division.microbatch * division.data
    if division.global_batch % per_step:
        yield Violation(
            "batch",
            f"a batch of {division.global_batch} is not a multiple of {division.data} replicas "
            f"with microbatches of {division.microbatch}",
        )
    if model.heads % division.tensor:
        yield Violation("tensor", f"{model.heads} heads cannot be divided by {division.tensor}")
    if model.sequence % division.context:
        yield Violation(
            "context", f"{model.sequence} tokens cannot be divided by {division.context}"
        )
    if division.expert > 1 and (model.experts is None or model.experts.count % division.expert):
        yield Violation("expert", f"the experts cannot be divided by {division.expert}")
    if division.sequence_parallel and division.tensor == 1:
        yield Violation("sequence parallel", "sequence parallelism needs a tensor degree above 1")


def _devices(plan: ParallelPlan) -> Iterator[Violation]:
    division = plan.division
    if len(plan.devices) != division.pipeline:
        yield Violation(
            "devices", f"{len(plan.devices)} lists of devices for {division.pipeline} ranks"
        )
    per_rank = division.num_devices // division.pipeline
    for rank, names in enumerate(plan.devices):
        if len(names) != per_rank:
            yield Violation("devices", f"rank {rank} has {len(names)} devices, not {per_rank}")
    known = set(plan.cluster.device_names)
    counts = Counter(name for names in plan.devices for name in names)
    for name, count in counts.items():
        if name not in known:
            yield Violation("devices", f"there is no device {name!r}", device=name)
        elif count > 1:
            yield Violation("devices", f"device {name!r} has {count} places", device=name)
    if len(plan.peak_bytes) != division.pipeline:
        yield Violation("devices", "predicted.peak_bytes must have an entry per pipeline rank")


def _layers(plan: ParallelPlan) -> Iterator[Violation]:
    division, layers = plan.division, plan.division.layers
    if layers is None:
        if plan.model.layers % division.num_stages:
            yield Violation(
                "layers",
                f"{plan.model.layers} layers do not divide over {division.num_stages} stages, "
                "and the plan does not say how many each has",
            )
        return
    if len(layers) != division.num_stages:
        yield Violation("layers", f"layers of {len(layers)} stages for {division.num_stages}")
    elif sum(layers) != plan.model.layers:
        yield Violation(
            "layers", f"the stages have {sum(layers)} layers, the model {plan.model.layers}"
        )


def _costs(plan: ParallelPlan) -> Iterator[Violation]:
    stages, ranks = plan.division.num_stages, plan.division.pipeline
    lengths = {
        "forward_s": stages,
        "input_gradient_s": stages,
        "weight_gradient_s": stages,
        "send_s": stages - 1,
        "activation_bytes": stages,
        "weight_gradient_bytes": stages,
        "state_bytes": ranks,
        "after_s": ranks,
    }
    for name, length in lengths.items():
        if len(getattr(plan.costs, name)) != length:
            yield Violation("costs", f"costs.{name} must have {length} entries")


# ── schedule ─────────────────────────────────────────────────────────────────────────────────────


def _schedule(plan: ParallelPlan) -> Iterator[Violation]:
    division, schedule = plan.division, plan.schedule
    if schedule.num_microbatches != division.num_microbatches:
        yield Violation(
            "schedule",
            f"the schedule is for {schedule.num_microbatches} microbatches, "
            f"the division makes {division.num_microbatches}",
        )
    elif schedule.num_stages != division.num_stages or schedule.num_devices != division.pipeline:
        yield Violation(
            "schedule",
            f"the schedule has {schedule.num_stages} stages on {schedule.num_devices} ranks, "
            f"the division {division.num_stages} on {division.pipeline}",
        )
    elif np.any(schedule.device_of_stage >= division.pipeline):
        yield Violation("schedule", "a stage is on a rank that does not exist")
    elif schedule.num_stages * schedule.num_microbatches > MAX_ACTIONS:
        yield Violation("schedule", f"there are more than {MAX_ACTIONS:,} actions")
    else:
        yield from _actions(schedule)


def _actions(schedule: Schedule) -> Iterator[Violation]:
    stage, microbatch = schedule.stage, schedule.microbatch
    if np.any(stage >= schedule.num_stages) or np.any(microbatch >= schedule.num_microbatches):
        yield Violation("schedule", "an action names a stage or a microbatch that does not exist")
        return
    device = np.repeat(np.arange(schedule.num_devices), np.diff(schedule.start))
    astray = np.flatnonzero(schedule.device_of_stage[stage] != device)
    if len(astray):
        first = astray[0]
        message = f"stage {stage[first]} is worked on by rank {device[first]}, where it is not"
        yield Violation("schedule", message)
    num_cells = schedule.num_stages * schedule.num_microbatches
    cell = stage.astype(np.int64) * schedule.num_microbatches + microbatch
    times = {work: np.bincount(cell[schedule.work == work], minlength=num_cells) for work in Work}
    backward = times[Work.BACKWARD]
    for name, wrong in (
        ("forward", times[Work.FORWARD] != 1),
        ("backward", backward + times[Work.INPUT_GRADIENT] != 1),
        ("weight gradient", backward + times[Work.WEIGHT_GRADIENT] != 1),
    ):
        bad = np.flatnonzero(wrong)
        if len(bad):
            where = divmod(int(bad[0]), schedule.num_microbatches)
            message = f"the {name} of stage {where[0]}, microbatch {where[1]} is not there once"
            yield Violation("schedule", message)
