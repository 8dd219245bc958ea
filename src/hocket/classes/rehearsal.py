"""How long an answer will take on this machine, measured in pieces before anything is served.

The workers that will serve compute again and again, after a short rest as between requests; only
the time of each part counts, and what parts take from each other is in it. A round is over when
every group has the copies that an answer waits for. Reaching the workers is timed apart, by asking
them for no computing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import InputFileError
from hocket.classes.artefact import Folder
from hocket.classes.serving.front_end import FrontEnd, ServeOptions, cores_of
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
    spent_s = np.array([each for _, each in _probes(front_end, example)])
    overhead_s = float(np.median([took_s for took_s, _ in _probes(front_end, None)]))
    cores, quorum = cores_of(table, options), options.quorum or table.quorum
    busy_s = float(np.median([enough_s(table, quorum, cores, each) for each in spent_s]))
    part_s = tuple(float(each) for each in np.median(spent_s, axis=0))
    num_cores = len(options.cores or os.sched_getaffinity(0))
    return LatencyOutlook(part_s, overhead_s, num_cores, busy_s + overhead_s)


def _probes(
    front_end: FrontEnd, inputs: np.ndarray[Any, Any] | None
) -> list[tuple[float, FloatArray]]:
    found = []
    for _ in range(_WARM_UPS + _RUNS):
        time.sleep(_REST_S)
        found.append(front_end.probe(inputs))
    return found[_WARM_UPS:]


def check_parts(folder: Folder) -> None:
    """Raise `InputFileError` for a part that takes or gives anything else than its table says."""
    for index, model in enumerate(folder.models):
        open_part(model, folder.table, index)


def enough_s(
    table: PartTable, quorum: int, cores: Sequence[int | None], spent_s: FloatArray
) -> float:
    """When every group has its copies, where parts on one core follow each other."""
    ends_s, busy_s = [], dict.fromkeys(cores, 0.0)
    for core, each in zip(cores, spent_s, strict=True):
        busy_s[core] += float(each)
        ends_s.append(busy_s[core])
    by_group: list[list[float]] = [[] for _ in table.groups]
    for groups, end_s in zip(table.held, ends_s, strict=True):
        for group in groups:
            by_group[group].append(end_s)
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
