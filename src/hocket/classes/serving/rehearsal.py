"""How long an answer will take on this machine, rehearsed before anything is served.

The workers that will serve are asked again and again, all of them, after a short rest as between
requests. An answer will be there when every group has the copies that it waits for, which the
arrivals of all workers tell, and is combined; what it takes beyond the slowest of their parts is
the cost of reaching processes, and of parts that wait for each other where cores are few.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import InputFileError
from hocket.classes.artefact import Folder
from hocket.classes.serving.front_end import FrontEnd, ServeOptions
from hocket.classes.session import INPUT, OUTPUT, open_session
from hocket.classes.table import PartTable

_RUNS = 60
_WARM_UPS = 5
_REST_S = 0.001
_KINDS = {"float32": "tensor(float)", "int64": "tensor(int64)"}
"""Types of inputs as ONNX calls them."""


@dataclass(frozen=True)
class LatencyOutlook:
    """A prediction with its pieces."""

    part_s: tuple[float, ...]
    overhead_s: float
    """Beyond the slowest part."""
    cores: int
    answer_s: float

    def to_data(self) -> dict[str, Any]:
        """As JSON can write it."""
        return asdict(self)


def rehearsed(folder: Folder, options: ServeOptions | None = None) -> LatencyOutlook:
    """The median time of an answer, by workers that are started for it."""
    check_parts(folder)
    with FrontEnd(folder, replace(options or ServeOptions(), restarts=False)) as front_end:
        return outlook_of(front_end)


def outlook_of(front_end: FrontEnd) -> LatencyOutlook:
    """The median time of an answer of workers that were started."""
    table, options = front_end.table, front_end.options
    example = np.zeros(table.input_shape, dtype=table.input_dtype)
    rounds = []
    for _ in range(_WARM_UPS + _RUNS):
        time.sleep(_REST_S)
        rounds.append(front_end.rehearse(example))
    took_s = np.array([each for each, _ in rounds[_WARM_UPS:]])
    spent_s, after_s = (
        1e-9 * np.array([[getattr(each, name) for each in made] for _, made in rounds[_WARM_UPS:]])
        for name in ("spent_ns", "after_ns")
    )
    quorum = options.quorum or table.quorum
    enough = np.median([enough_s(table, quorum, each) for each in after_s])
    combining = np.median(took_s - after_s.max(axis=1))
    answer_s, part_s = float(enough + combining), tuple(map(float, np.median(spent_s, axis=0)))
    cores = len(options.cores or os.sched_getaffinity(0))
    return LatencyOutlook(part_s, max(answer_s - max(part_s), 0.0), cores, answer_s)


def check_parts(folder: Folder) -> None:
    """Raise `InputFileError` for a part that takes or gives anything else than its table says."""
    for index, model in enumerate(folder.models):
        open_part(model, folder.table, index)


def enough_s(table: PartTable, quorum: int, after_s: FloatArray) -> float:
    """When every group has its copies, where each worker answers after some time."""
    by_group: list[list[float]] = [[] for _ in table.groups]
    for groups, each_s in zip(table.held, after_s, strict=True):
        for group in groups:
            by_group[group].append(float(each_s))
    return max(sorted(each)[min(quorum, len(each)) - 1] for each in by_group)


def open_part(model: bytes, table: PartTable, index: int) -> Any:
    """A session for a part that takes and gives what its table says; else `InputFileError`."""
    part = table.parts[index]
    session = open_session(model)
    found = [(each.name, each.type, list(each.shape)) for each in session.get_inputs()]
    found += [(each.name, each.type, list(each.shape)) for each in session.get_outputs()]
    expected = [
        (INPUT, _KINDS[table.input_dtype], [1, *table.input_shape]),
        (OUTPUT, _KINDS["float32"], [1, 1 + len(part.classes)]),
    ]
    if found != expected:
        raise InputFileError(
            f"takes and gives {found}, and the table says {expected}",
            hint="make the folder again",
            where=part.onnx,
        )
    return session
