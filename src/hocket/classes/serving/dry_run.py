"""Measure the time of an answer on this machine before anything is served.

The workers that will serve receive one request after another, with a short pause between them, in
the same way as real requests: an answer is combined as soon as every group has enough copies, and a
slow worker may still be busy with the previous request. The prediction is the median of these
times, which is larger than the slowest of the parts' medians. The measurement lasts at least a
second, because other load on a physical core varies over time.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hocket.base.errors import InputFileError
from hocket.classes.artefact import Folder
from hocket.classes.serving.front_end import FrontEnd, ServeOptions
from hocket.classes.session import INPUT, OUTPUT, open_session
from hocket.classes.table import PartTable

_RUNS = 60
_SPELL_S = 1.0
_WARM_UPS = 20
_REST_S = 0.001
_KINDS = {"float32": "tensor(float)", "int64": "tensor(int64)"}
"""ONNX names of the input types."""


@dataclass(frozen=True)
class LatencyForecast:
    """Predicted time of an answer and its components."""

    part_s: tuple[float, ...]
    overhead_s: float
    """Time of an answer beyond that of the slowest part."""
    cores: int
    answer_s: float

    def to_data(self) -> dict[str, Any]:
        """Return JSON-serialisable data."""
        return asdict(self)


def forecast_by_dry_run(folder: Folder, options: ServeOptions | None = None) -> LatencyForecast:
    """Median time of an answer, measured with workers started for this purpose."""
    check_parts(folder)
    with FrontEnd(folder, replace(options or ServeOptions(), restarts=False)) as front_end:
        return forecast_of(front_end)


def forecast_of(front_end: FrontEnd) -> LatencyForecast:
    """Median time of an answer, measured with the running workers of a front end."""
    table, options = front_end.table, front_end.options
    example = np.zeros(table.input_shape, dtype=table.input_dtype)
    for _ in range(_WARM_UPS):
        front_end.dry_run(example)
    took_s: list[float] = []
    spent_ns: list[list[int]] = [[] for _ in table.parts]
    until_s = time.monotonic() + _SPELL_S
    while len(took_s) < _RUNS or time.monotonic() < until_s:
        # Without a pause cores never sleep, and answers would seem faster than in real use.
        time.sleep(_REST_S)
        each_s, replies = front_end.dry_run(example)
        took_s.append(each_s)
        for index, reply in replies.items():
            spent_ns[index].append(reply.spent_ns)
    # A part for which no answer waited keeps the time that was measured when the split was made.
    part_s = tuple(
        1e-9 * float(np.median(mine)) if mine else part.latency_s
        for mine, part in zip(spent_ns, table.parts, strict=True)
    )
    answer_s = float(np.median(took_s))
    cores = len(options.cores or os.sched_getaffinity(0))
    return LatencyForecast(part_s, max(answer_s - max(part_s), 0.0), cores, answer_s)


def check_parts(folder: Folder) -> None:
    """Raise `InputFileError` for a part whose inputs or outputs differ from the table."""
    for index, model in enumerate(folder.models):
        open_part(model, folder.table, index)


def open_part(model: bytes, table: PartTable, index: int) -> Any:
    """Open a part; raises `InputFileError` if its inputs or outputs differ from the table."""
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
