"""How long an answer will take on this machine, measured in pieces before anything is served.

All parts compute at once, again and again, each on the core that its worker will have and after a
short rest as a worker has between requests: what they take from each other is in their times. A
round is over when every group has the copies that an answer waits for. Reaching the workers is
timed apart, with as many workers that compute nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import InputFileError
from hocket.classes.artefact import Folder
from hocket.classes.combine import OddsCalibration
from hocket.classes.serving.front_end import FrontEnd, ServeOptions, cores_of
from hocket.classes.session import INPUT, OUTPUT, infer, open_session
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
    cores = cores_of(folder.table, options)
    spent_s = _rounds_s(folder, cores)
    quorum = options.quorum or folder.table.quorum
    busy_s = float(np.median([enough_s(folder.table, quorum, cores, each) for each in spent_s]))
    overhead_s = _reaching_s(folder, options)
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


def _rounds_s(folder: Folder, cores: Sequence[int | None]) -> FloatArray:
    """``[round, part]``: seconds of every part, all cores at work at once."""
    table = folder.table
    sessions = [open_part(model, table, index) for index, model in enumerate(folder.models)]
    example = np.zeros((1, *table.input_shape), dtype=table.input_dtype)
    spent_s = np.zeros((_RUNS, len(sessions)))
    together = threading.Barrier(len(set(cores)))

    def work(core: int | None) -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})  # of this thread alone
        mine = [index for index, place in enumerate(cores) if place == core]
        try:
            for number in range(-_WARM_UPS, _RUNS):
                time.sleep(_REST_S)
                together.wait()
                for index in mine:
                    start_ns = time.perf_counter_ns()
                    infer(sessions[index], example)
                    if number >= 0:
                        spent_s[number, index] = (time.perf_counter_ns() - start_ns) * 1e-9
        except BaseException:
            together.abort()
            raise

    with ThreadPoolExecutor(len(set(cores))) as pool:
        running = [pool.submit(work, core) for core in sorted(set(cores), key=str)]
    errors = [error for each in running if (error := each.exception()) is not None]
    # Those that waited for the one that failed only say that it is gone.
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return spent_s


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
