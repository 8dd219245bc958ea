"""Traces of many origins, recognized by their header or their number of columns.

| format | how it is known | work |
|---|---|---|
| hocket | header of `trace.COLUMNS`; ``arrival_s`` and one kind of work needed | either |
| gavel | tab separated, no header, 10 columns (7 in the older form) | steps |
| gavel-generated | header ``job_id job_type scale_factor total_steps ...`` | steps |
| shockwave | tab separated, no header, 12 columns | steps |
| tiresias | header ``job_id,num_gpu,submit_time,...,model_name,duration,interval`` | seconds |
| philly | header ``duration_s,num_gpus`` or ``duration``: all jobs come at once | seconds |
| pollux | header ``name,time,application,num_replicas,batch_size`` | nominal, by application |
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.fields import shown
from hocket.base.jsonfile import read_bounded
from hocket.fleet.traces.trace import COLUMNS, USER, Trace

_MAX_BYTES = 256 * 2**20
_MAX_LINES = 1_000_000
"""Each line takes about a kilobyte while it is read, however short it is."""
_MAX_GANG = 1_000_000
_LARGEST = 1e15

POLLUX_GPU_HOURS = {
    "cifar10": 0.3, "ncf": 0.3, "bert": 3.0, "deepspeech2": 3.0, "yolov3": 30.0, "imagenet": 300.0,
}  # fmt: skip
"""GPU hours of each application. These traces do not state the work of their jobs; the values are
the middles of the sizes into which their authors sort applications (small, medium, large, very
large: powers of ten of GPU hours).
"""


@dataclass(frozen=True, kw_only=True)
class Format:
    """Columns of a trace format."""

    name: str
    columns: dict[str, int] = field(default_factory=dict)
    """Fields of hocket's own format by column."""
    num_columns: int = 0
    """Exact number of columns; 0 for at least as many as the header has."""


_BY_WIDTH = {
    10: {"job_type": 0, "total_steps": 5, "gang": 6, "weight": 7, "slo_s": 8, "arrival_s": 9},
    7: {"job_type": 0, "total_steps": 4, "arrival_s": 5, "gang": 6},
    12: {
        "job_type": 0, "total_steps": 5, "gang": 6, "mode": 7, "weight": 8, "slo_s": 9,
        "duration_s": 10, "arrival_s": 11,
    },
}  # fmt: skip
"""Traces without a header, by their number of columns: Gavel's two forms and Shockwave's."""

# Traces with a header: the columns of each format by field.
_BY_HEADER: dict[str, dict[str, str]] = {
    "gavel-generated": {
        "name": "job_id", "job_type": "job_type", "gang": "scale_factor",
        "total_steps": "total_steps", "duration_s": "v100_duration_s",
        "weight": "priority_weight", "arrival_s": "arrival_s",
    },
    "tiresias": {
        "name": "job_id", "gang": "num_gpu", "arrival_s": "submit_time", "job_type": "model_name",
        "duration_s": "duration",
    },
    "pollux": {
        "name": "name", "arrival_s": "time", "job_type": "application", "gang": "num_replicas",
    },
    "philly": {"duration_s": "duration_s", "gang": "num_gpus"},
    "yarn": {"duration_s": "duration"},
}  # fmt: skip


def read_trace(path: str | Path) -> Trace:
    """The jobs of a file in order of arrival; raises `InputFileError` with file and line."""
    data = read_bounded(path, _MAX_BYTES, lambda head: b"\0" not in head, "a trace")
    num_lines = max(data.count(b"\n"), data.count(b"\r"))
    if num_lines > _MAX_LINES:
        hint = f"at most {_MAX_LINES:,}; cut the trace"
        raise InputFileError(f"the trace has {num_lines:,} lines", hint=hint, where=str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputFileError("the file is no text", where=str(path)) from None
    rows = [row for row in _split(text, str(path)) if any(row[1])]
    if not rows:
        raise InputFileError("the trace is empty", where=str(path))
    how, has_header = _detect(rows[0][1], f"{path}:{rows[0][0]}")
    jobs = [
        _job(how, row, f"{path}:{line}", at) for at, (line, row) in enumerate(rows[has_header:])
    ]
    if not jobs:
        raise InputFileError("the trace has no jobs", where=str(path))
    return _trace(jobs, _left_out(how, rows[has_header:]))


def _left_out(how: Format, rows: list[tuple[int, list[str]]]) -> tuple[str, ...]:
    """Notes about properties of jobs that are not simulated."""
    column = how.columns.get("mode", -1)
    modes = Counter(row[column].strip() for _, row in rows) if column >= 0 else Counter()
    names = sorted(mode for mode in modes if mode != "static")
    if not names:
        return ()
    count = sum(modes[mode] for mode in names)
    return (
        f"{count} of {len(rows)} jobs change their batch size while they run "
        f"({', '.join(names)}); here they keep the first",
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    name: str
    job_type: str
    arrival_s: float
    gang: int
    weight: float
    total_steps: float
    duration_s: float
    slo_s: float
    user: str


def _split(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    # A tab in the first line tells tab-separated formats from CSV.
    is_tabbed = "\t" in text.partition("\n")[0]
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter="\t" if is_tabbed else ",", strict=True,
                        quoting=csv.QUOTE_NONE if is_tabbed else csv.QUOTE_MINIMAL)  # fmt: skip
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputFileError(str(error), where=f"{where}:{reader.line_num}") from None
        if row is None:
            return
        yield reader.line_num, row


def _detect(first: list[str], where: str) -> tuple[Format, int]:
    """Detect the format and the number of header lines."""
    header = [cell.strip() for cell in first]
    if "arrival_s" in header and set(header) <= {*COLUMNS, USER}:
        return Format(name="hocket", columns={name: header.index(name) for name in header}), 1
    for name, wanted in _BY_HEADER.items():
        if set(wanted.values()) <= set(header):
            columns = {own: header.index(column) for own, column in wanted.items()}
            return Format(name=name, columns=columns), 1
    unknown = [cell for cell in header if cell not in (*COLUMNS, USER)]
    if unknown and len(header) > 2 * len(unknown):
        raise InputFileError(
            f"unknown column {shown(unknown[0])}", hint=did_you_mean(unknown[0], COLUMNS),
            where=where,
        )  # fmt: skip
    if len(first) in _BY_WIDTH:
        width = len(first)
        return Format(name="headless", num_columns=width, columns=_BY_WIDTH[width]), 0
    raise InputFileError(
        f"no known trace has {len(first)} columns that begin with {shown(first[0])}",
        hint=f"write a CSV with the header {','.join(COLUMNS)}",
        where=where,
    )


def _job(how: Format, row: list[str], where: str, at: int) -> _Job:
    if how.num_columns and len(row) != how.num_columns:
        raise InputFileError(
            f"the line has {len(row)} columns, expected {how.num_columns}", where=where
        )

    def cell(name: str) -> str:
        column = how.columns.get(name, -1)
        if column >= len(row):
            raise InputFileError(f"the line has no {name}", where=where)
        return row[column].strip() if column >= 0 else ""

    def amount(name: str, default: float, low: float) -> float:
        return _number(cell(name), name, where, default, low)

    job_type = cell("job_type")
    gang = int(amount("gang", 1.0, 1.0))
    slo_s = amount("slo_s", math.inf, -1.0)
    duration_s = amount("duration_s", math.nan, 0.0)
    if how.name == "pollux":
        duration_s = _pollux_duration_s(job_type, gang, where)
    job = _Job(
        name=cell("name") or str(at),
        job_type=job_type,
        arrival_s=amount("arrival_s", 0.0, 0.0),
        gang=gang,
        weight=amount("weight", 1.0, 1e-9),
        total_steps=amount("total_steps", math.nan, 0.0),
        duration_s=duration_s,
        slo_s=slo_s if slo_s > 0.0 else math.inf,
        user=cell(USER),
    )
    if math.isnan(job.total_steps) and math.isnan(job.duration_s):
        hint = "give total_steps or duration_s"
        raise InputFileError("the job has no amount of work", hint=hint, where=where)
    return job


def _number(text: str, name: str, where: str, default: float, low: float) -> float:
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_whole = name != "gang" or value.is_integer()
    if not low <= value <= (_MAX_GANG if name == "gang" else _LARGEST) or not is_whole:
        device_type = "a whole number" if name == "gang" else "a number"
        hint = f"expected {device_type} from {low:g}"
        raise InputFileError(f"{name} is {shown(text)}", hint=hint, where=where)
    return value


def _pollux_duration_s(application: str, gang: int, where: str) -> float:
    if application not in POLLUX_GPU_HOURS:
        hint = f"known are {', '.join(POLLUX_GPU_HOURS)}"
        raise InputFileError(f"unknown application {shown(application)}", hint=hint, where=where)
    return POLLUX_GPU_HOURS[application] * 3600.0 / gang


def _trace(jobs: list[_Job], notes: tuple[str, ...]) -> Trace:
    jobs = sorted(jobs, key=lambda job: job.arrival_s)

    def column(name: str) -> np.ndarray:
        return np.array([getattr(job, name) for job in jobs], dtype=float)

    return Trace(
        names=tuple(job.name for job in jobs),
        job_types=tuple(job.job_type for job in jobs),
        arrival_s=column("arrival_s"),
        gang=column("gang").astype(np.int64),
        weight=column("weight"),
        total_steps=column("total_steps"),
        duration_s=column("duration_s"),
        slo_s=column("slo_s"),
        users=tuple(job.user for job in jobs) if any(job.user for job in jobs) else (),
        notes=notes,
    )
