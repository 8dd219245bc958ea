"""Files of parallel plans: written atomically, read strictly, complete enough to simulate again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base.arrays import IntArray
from hocket.base.atomic import write_atomically
from hocket.base.checked import checked
from hocket.base.errors import InputFileError
from hocket.base.fields import located, shown
from hocket.base.jsonfile import dump_json, looks_like_json, read_bounded, read_json
from hocket.hardware.files import cluster_from_dict, cluster_to_dict
from hocket.plan.parallel import PARALLEL_SCHEMA, ParallelPlan, StageCosts
from hocket.plan.parallel_verify import require_parallel_structure
from hocket.plan.plan import PLAN_SCHEMA
from hocket.plan.schedule import Schedule, Work
from hocket.transformer import Division, Transformer
from hocket.transformer.files import check_model
from hocket.transformer.shape import Experts

if TYPE_CHECKING:
    from hocket.plan.parallel_schema import ParallelPlanFile, ScheduleContent

MAX_PLAN_BYTES = 256 * 2**20
MAX_SEARCHED_BYTES = 2 * 2**30
"""A plan of any kind may be asked for what it is."""
LETTERS = {
    Work.FORWARD: "F",
    Work.BACKWARD: "B",
    Work.INPUT_GRADIENT: "I",
    Work.WEIGHT_GRADIENT: "W",
}
_WORKS = {letter: int(work) for work, letter in LETTERS.items()}
_STATED_SCHEMA = re.compile(rb'"schema"\s*:\s*"(hocket\.[a-z_/0-9]{1,40})"')
_ACTION = re.compile(r"([FBIW])([0-9]{1,9})\.([0-9]{1,9})")


def write_parallel_plan(path: str | Path, plan: ParallelPlan) -> None:
    """Write a plan; equal plans give equal bytes."""
    write_atomically(path, parallel_plan_bytes(plan))


def parallel_plan_bytes(plan: ParallelPlan) -> bytes:
    """What `write_parallel_plan` writes."""
    return dump_json(parallel_plan_to_dict(plan))


def read_parallel_plan(path: str | Path) -> ParallelPlan:
    """Read a plan; raises `InputFileError` for a file that is not one or contradicts itself."""
    return parallel_plan_from_dict(read_json(path, max_bytes=MAX_PLAN_BYTES), str(path))


def holds_parallel_plan(path: str | Path) -> bool:
    """Whether a file says that it is a parallel plan; False for one that cannot be read."""
    return PARALLEL_SCHEMA in stated_schemas(path)


def holds_placement(path: str | Path) -> bool:
    """Whether a file says that it is the plan of a placement; False for one that cannot be read."""
    return PLAN_SCHEMA in stated_schemas(path)


def stated_schemas(path: str | Path) -> set[str]:
    """What a file says that it is: its schema, and those of parts that it carries.

    Only its bytes are looked at: inside a text of JSON the quotes would be escaped.
    """
    try:
        data = read_bounded(path, MAX_SEARCHED_BYTES, looks_like_json)
    except InputFileError:
        return set()
    return {schema.decode() for schema in _STATED_SCHEMA.findall(data)}


def parallel_plan_to_dict(plan: ParallelPlan) -> dict[str, Any]:
    """The content of a plan's file."""
    from hocket import __version__

    return {
        "schema": PARALLEL_SCHEMA,
        "generator": f"hocket {__version__}",
        "model": asdict(plan.model),
        "cluster": {"hash": plan.cluster.content_hash, "content": cluster_to_dict(plan.cluster)},
        "division": asdict(plan.division),
        "dtype": plan.dtype,
        "devices": [list(names) for names in plan.devices],
        "schedule": {
            "name": plan.schedule.name,
            "num_microbatches": plan.schedule.num_microbatches,
            "device_of_stage": plan.schedule.device_of_stage.tolist(),
            "actions": [" ".join(words) for words in schedule_words(plan.schedule)],
        },
        "costs": {name: list(values) for name, values in vars(plan.costs).items()},
        "predicted": {"step_s": plan.step_s, "peak_bytes": list(plan.peak_bytes)},
        "notes": dict(plan.notes),
    }


def parallel_plan_from_dict(data: object, where: str) -> ParallelPlan:
    """The plan of a file's content; ``where`` names the file in errors."""
    content = _validated(data, where)
    cluster = cluster_from_dict(content.cluster.content, where)
    if content.cluster.hash != cluster.content_hash:
        raise InputFileError(
            "the cluster inside is not the one that the plan was made for",
            hint="plan again for this cluster",
            where=where,
        )
    experts = content.model.experts
    model = Transformer(
        **{**dict(content.model), "experts": Experts(**dict(experts)) if experts else None}
    )
    with located(where):
        check_model(model)
    division = dict(content.division)
    if content.division.layers is not None:
        division["layers"] = tuple(content.division.layers)
    plan = ParallelPlan(
        model=model,
        cluster=cluster,
        division=Division(**division),
        devices=tuple(tuple(names) for names in content.devices),
        schedule=_schedule(content.schedule, where),
        dtype=content.dtype,
        costs=StageCosts(**{name: tuple(values) for name, values in dict(content.costs).items()}),
        step_s=content.predicted.step_s,
        peak_bytes=tuple(content.predicted.peak_bytes),
        notes=content.notes,
    )
    require_parallel_structure(plan, where)
    return plan


# ── schedules as words ───────────────────────────────────────────────────────────────────────────


def schedule_words(schedule: Schedule) -> Iterator[list[str]]:
    """The actions of each device, as the file writes them."""
    for device in range(schedule.num_devices):
        own = slice(schedule.start[device], schedule.start[device + 1])
        yield [
            f"{LETTERS[Work(work)]}{stage}.{microbatch}"
            for work, stage, microbatch in zip(
                schedule.work[own].tolist(),
                schedule.stage[own].tolist(),
                schedule.microbatch[own].tolist(),
                strict=True,
            )
        ]


def _schedule(content: ScheduleContent, where: str) -> Schedule:
    starts, columns = [0], []
    for device, line in enumerate(content.actions):
        columns.append(_actions(line, device, where))
        starts.append(starts[-1] + len(columns[-1]))
    actions = np.concatenate([*columns, np.zeros((0, 3), dtype=np.int32)])
    return Schedule(
        name=content.name,
        num_microbatches=content.num_microbatches,
        device_of_stage=np.array(content.device_of_stage, dtype=np.int32),
        start=np.array(starts, dtype=np.int32),
        work=np.ascontiguousarray(actions[:, 0]),
        stage=np.ascontiguousarray(actions[:, 1]),
        microbatch=np.ascontiguousarray(actions[:, 2]),
    )


def _actions(line: str, device: int, where: str) -> IntArray:
    rows = []
    for word in line.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise InputFileError(
                f"schedule.actions[{device}] has {shown(word)}",
                hint="expected words such as F0.3: a letter of F, B, I, W, stage, microbatch",
                where=where,
            )
        rows.append((_WORKS[match[1]], int(match[2]), int(match[3])))
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


# ── checks of the file ───────────────────────────────────────────────────────────────────────────


def _validated(data: object, where: str) -> ParallelPlanFile:
    from hocket.plan.parallel_schema import ParallelPlanFile

    if not isinstance(data, dict) or data.get("schema") != PARALLEL_SCHEMA:
        raise InputFileError(
            f"this is not a {PARALLEL_SCHEMA} file",
            hint="make one with hocket parallel",
            where=where,
        )
    return checked(ParallelPlanFile, data, where, hint="make the plan again with hocket parallel")
