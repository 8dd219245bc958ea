"""How long an answer will take on this machine, measured in pieces before anything is served.

Each part is timed alone, on a core of its own after a short rest as a worker has between requests;
reaching the workers is timed with as many workers that compute nothing. `outlook.answer_s` puts the
pieces together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hocket.base.errors import InputFileError
from hocket.classes.artefact import Folder
from hocket.classes.combine import OddsCalibration
from hocket.classes.outlook import finish_s, worker_cores
from hocket.classes.serving.front_end import FrontEnd, ServeOptions
from hocket.classes.session import INPUT, OUTPUT, infer, open_session
from hocket.classes.table import PartTable

_RUNS = 60
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
    """The median time of an answer that all parts take part in."""
    options = options or ServeOptions()
    cores = len(options.cores or os.sched_getaffinity(0))
    part_s = tuple(_rested_s(folder, index) for index in range(len(folder.models)))
    overhead_s = _reaching_s(folder, options)
    busy_s = finish_s(part_s, worker_cores(len(part_s), cores))
    return LatencyOutlook(part_s, overhead_s, cores, busy_s + overhead_s)


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


def _rested_s(folder: Folder, index: int) -> float:
    """Median of one input after a rest, in which caches and clocks go cold as in a worker."""
    table = folder.table
    session = open_part(folder.models[index], table, index)
    example = np.zeros((1, *table.input_shape), dtype=table.input_dtype)
    for _ in range(5):
        infer(session, example)
    return _median_s(lambda: infer(session, example))


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
