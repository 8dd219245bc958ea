"""How long an answer will take on this machine, measured in pieces before anything is served.

Every part computes in a worker of its own, on the core that it will have, again and again and after
a short rest as between requests; only its own time counts, and what parts take from each other is
in it. A round is over when every group has the copies that an answer waits for. Reaching the
workers is timed apart, with as many workers that compute nothing.
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
from hocket.classes.combine import OddsCalibration
from hocket.classes.serving.front_end import START_S, FrontEnd, ServeOptions, cores_of
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
    """The median time of an answer."""
    options = options or ServeOptions()
    for index, model in enumerate(folder.models):
        open_part(model, folder.table, index)
    spent_s = _rounds_s(folder, options)
    overhead_s = _reaching_s(folder, options)
    cores, quorum = cores_of(folder.table, options), options.quorum or folder.table.quorum
    busy_s = float(np.median([enough_s(folder.table, quorum, cores, each) for each in spent_s]))
    part_s = tuple(float(each) for each in np.median(spent_s, axis=0))
    num_cores = len(options.cores or os.sched_getaffinity(0))
    return LatencyOutlook(part_s, overhead_s, num_cores, busy_s + overhead_s)


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


def _rounds_s(folder: Folder, options: ServeOptions) -> FloatArray:
    """``[round, part]``: seconds that every worker computes."""
    everyone = replace(options, quorum=folder.table.redundancy, restarts=False, deadline_s=START_S)
    example = np.zeros(folder.table.input_shape, dtype=folder.table.input_dtype)
    with FrontEnd(folder, everyone) as front_end:
        for _ in range(_WARM_UPS + _RUNS):
            time.sleep(_REST_S)
            front_end.predict(example)
        return front_end.compute_s(_RUNS)


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


def _reaching_s(folder: Folder, options: ServeOptions) -> float:
    """Median of an answer of workers that compute nothing."""
    parts = tuple(
        replace(part, classes=(index,), calibration=OddsCalibration())
        for index, part in enumerate(folder.table.parts)
    )
    names = tuple(map(str, range(len(parts))))
    groups = tuple((index,) for index in range(len(parts)))
    table = replace(folder.table, class_names=names, groups=groups, held=groups, parts=parts,
                    redundancy=1)  # fmt: skip
    empty = replace(folder, table=table, models=(b"",) * len(parts))
    example = np.zeros(table.input_shape, dtype=table.input_dtype)
    with FrontEnd(empty, replace(options, quorum=1, restarts=False)) as front_end:
        return _median_s(lambda: front_end.predict(example))


def _median_s(run: Any) -> float:
    spent: Sequence[int] = []
    for _ in range(_RUNS):
        time.sleep(_REST_S)
        start = time.perf_counter_ns()
        run()
        spent = [*spent, time.perf_counter_ns() - start]
    return float(np.median(spent)) * 1e-9
