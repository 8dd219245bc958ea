"""Read measured training runs from a CSV file: one run per row, columns by name.

Published tables use different names for the same column, so several names are accepted for each.
Known columns that the predictor does not need (TFLOP/s, dates, notes) are skipped. Any other column
is an error, since a misspelt name would silently select a default value.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.fields import shown
from hocket.base.jsonfile import read_bounded
from hocket.cost.parallel.software import Software
from hocket.transformer import RECOMPUTES, ParallelConfig, Recompute, Transformer

MAX_FILE_BYTES = 10_000_000
MAX_COUNT = 10**9
MAX_SECONDS = 1e6
DEFAULT_VOCABULARY = 51_200
_NAMES: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tp", "tensor parallelism", "tensor_parallel"),
    "pipeline": ("pp", "pipeline parallelism", "pipeline_parallel"),
    "data": ("dp", "data parallelism", "data_parallel"),
    "context": ("cp", "context parallelism"),
    "chunks": ("v", "vp", "virtual_pipeline"),
    "microbatch": ("mbs", "micro batch", "micro_batch"),
    "global_batch": ("gbs", "batch", "global batch"),
    "hidden": ("hidden size", "hidden_size"),
    "layers": ("# layers", "num_layers"),
    "heads": ("attention heads", "num_attention_heads"),
    "kv_heads": (),
    "mlp_width": ("ffn",),
    "sequence": ("seq", "sequence length", "seq_length"),
    "vocabulary": ("vocab",),
    "recompute": (),
    "zero": ("zero_stage",),
    "sequence_parallel": ("sp",),
    "num_devices": ("n_gpus", "# gpus", "devices", "gpus"),
    "step_s": ("iter_time_s", "iteration time (s)"),
    "step_ms": ("iter_time_ms", "iteration time (ms)"),
}
_PASSED_OVER = frozenset(
    {
        "model", "name", "gpu", "system", "scheme", "note", "notes", "date", "source_line",
        "precision", "oom", "params_billion", "parameters (billion)", "model_parallel_size",
        "mem_gb_max", "tflops_per_gpu", "aggregate_pflops", "pct_of_peak", "mfu_pct",
        "days_for_300b_tokens", "memory_gb", "table", "row", "cluster", "software", "stages",
        "dropout", "gradient_bytes",
    }
)  # fmt: skip
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
_COLUMN = {alias: name for name, others in _NAMES.items() for alias in (name, *others)}
_REQUIRED = (
    "tensor", "pipeline", "data", "microbatch", "global_batch", "hidden", "layers", "heads",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One measured run of a file."""

    model: Transformer
    config: ParallelConfig
    software: Software
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of a file, and the number of rows that were skipped."""

    runs: tuple[PublishedRun, ...]
    num_skipped: int
    """Rows without a time, or whose product of degrees differs from the stated devices."""


def read_runs(
    path: str | Path, software: Software, recompute: Recompute = "full", sequence: int = 2048
) -> Runs:
    """Read the measured runs of a CSV file.

    ``software`` is that of all runs; ``recompute`` and ``sequence`` are used if the file has no
    value.
    """
    where = str(path)
    lines = _lines(path)
    reader = csv.reader(lines)
    try:
        header, *rows = [row for row in reader if row]
    except (ValueError, csv.Error):
        raise InputFileError(
            "holds no table", hint="the first line names columns", where=where
        ) from None
    columns = _columns(header, where)
    found = [
        _run(_row(columns, row, f"row {number}", where), software, recompute, sequence)
        for number, row in enumerate(rows, start=1)
    ]
    runs = tuple(run for run in found if run is not None)
    return Runs(runs=runs, num_skipped=len(found) - len(runs))


def _lines(path: str | Path) -> Iterator[str]:
    data = read_bounded(path, MAX_FILE_BYTES, lambda head: b"," in head, "a CSV table")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"byte {error.start} is not UTF-8", hint="save the file as UTF-8", where=str(path)
        ) from None
    # Some headers begin with "# " themselves, so only lines that state a source are comments.
    return (
        line
        for line in io.StringIO(text, newline=None)
        if not line.startswith(("# source", "# note"))
    )


def _columns(header: list[str], where: str) -> list[str]:
    columns = []
    for title in header:
        plain = title.strip().lower()
        if plain not in _COLUMN and plain not in _PASSED_OVER:
            raise InputFileError(
                f"unknown column {shown(title)}",
                hint=did_you_mean(plain[:60], _COLUMN),
                where=where,
            )
        columns.append(_COLUMN.get(plain, plain))
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise InputFileError(f"two columns mean {twice!r}", where=where)
    missing = [name for name in _REQUIRED if name not in columns]
    if missing or not {"step_s", "step_ms"}.intersection(columns):
        raise InputFileError(
            f"has no column {(missing or ['step_s'])[0]!r}",
            hint=f"needed: {', '.join(_REQUIRED)} and step_s or step_ms",
            where=where,
        )
    return columns


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _MeasuredRow:
    """Cells of one row by column name, with the row's position for error messages."""

    values: Mapping[str, str]
    place: str
    where: str

    def text(self, name: str) -> str:
        return self.values.get(name, "").strip()

    def error(self, name: str, expected: str) -> InputFileError:
        return InputFileError(
            f"{name} of {self.place} is {shown(self.text(name))}",
            hint=f"expected {expected}",
            where=self.where,
        )

    def count(self, name: str, default: int | None = None, low: int = 1) -> int:
        text = self.text(name)
        if not text and default is not None:
            return default
        if not text.isdecimal() or len(text) > 10 or not low <= int(text) <= MAX_COUNT:
            raise self.error(name, f"a whole number of {low} or more")
        return int(text)

    def flag(self, name: str) -> bool:
        text = self.text(name).lower()
        if text not in _FLAGS:
            raise self.error(name, "true or false")
        return _FLAGS[text]

    def seconds(self) -> float | None:
        name, scale = ("step_s", 1.0) if self.text("step_s") else ("step_ms", 1e-3)
        if not self.text(name):
            return None
        try:
            value = float(self.text(name)) * scale
        except ValueError:
            value = math.nan
        if not 0 < value <= MAX_SECONDS:
            raise self.error(name, "a time above 0")
        return value


def _row(columns: list[str], cells: list[str], place: str, where: str) -> _MeasuredRow:
    if len(cells) != len(columns):
        raise InputFileError(
            f"{place} has {len(cells)} cells for {len(columns)} columns",
            hint="a comma is missing or too many; texts with commas need quotes",
            where=where,
        )
    return _MeasuredRow(dict(zip(columns, cells, strict=True)), place, where)


def _run(
    row: _MeasuredRow, software: Software, recompute: Recompute, sequence: int
) -> PublishedRun | None:
    step_s = row.seconds()
    if step_s is None:
        return None
    config = _config(row, recompute)
    if row.text("num_devices") and row.count("num_devices") != config.num_devices:
        return None
    if config.global_batch % (config.data * config.microbatch):
        raise row.error("global_batch", "a multiple of data x microbatch")
    return PublishedRun(
        model=_model(row, sequence), config=config, software=software, step_s=step_s
    )


def _config(row: _MeasuredRow, recompute: Recompute) -> ParallelConfig:
    stated = row.text("recompute") or recompute
    if stated not in RECOMPUTES:
        raise row.error("recompute", f"one of {', '.join(RECOMPUTES)}")
    chunks, zero = row.count("chunks", 1), row.count("zero", 0, low=0)
    if zero > 3:
        raise row.error("zero", "0, 1, 2 or 3")
    return ParallelConfig(
        tensor=row.count("tensor"),
        pipeline=row.count("pipeline"),
        data=row.count("data"),
        context=row.count("context", 1),
        chunks=chunks,
        microbatch=row.count("microbatch"),
        global_batch=row.count("global_batch"),
        schedule="interleaved" if chunks > 1 else "1f1b",
        recompute=stated,
        zero=zero,
        sequence_parallel=row.flag("sequence_parallel"),
    )


def _model(row: _MeasuredRow, sequence: int) -> Transformer:
    hidden, heads = row.count("hidden"), row.count("heads")
    if hidden % heads:
        raise row.error("heads", f"a divisor of hidden, which is {hidden}")
    return Transformer(
        name=f"{row.place} of {Path(row.where).name}",
        hidden=hidden,
        layers=row.count("layers"),
        heads=heads,
        kv_heads=row.count("kv_heads", heads),
        head_width=hidden // heads,
        mlp_width=row.count("mlp_width", 4 * hidden),
        mlp="gelu",
        vocabulary=row.count("vocabulary", DEFAULT_VOCABULARY),
        sequence=row.count("sequence", sequence),
        tied_embeddings=True,
        learned_positions=True,
        biases=True,
        dropout=True,
    )
