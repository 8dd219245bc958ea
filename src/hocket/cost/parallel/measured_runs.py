"""Read tables of measured training runs: CSV files with one run per row and columns by name.

A column is a field of the model, of the parallel config or of the training program, or a result:
``step_s`` or ``step_ms``, ``memory_gib``, ``oom``. Common short names such as ``tp`` are accepted.
An unknown column is an error, since a misspelt name would silently select a default value.
O(cells).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.fields import choice, flag, is_number, located, number, shown, text, wrong
from hocket.base.regular import is_file, read_regular
from hocket.cost.parallel.software import Attention, Selective, Software
from hocket.cost.parallel.softwares import find_software
from hocket.transformer import ParallelConfig, Transformer
from hocket.transformer.config_data import KEYS, config_from_data
from hocket.transformer.files import find_model, model_from_dict, model_to_dict

MAX_FILE_BYTES = 16_000_000
MAX_ROWS = 10_000
"""Most rows of a table: each becomes a model and a config, a thousand times the size of its text.
"""
_MOST = 1e6
"""Largest number of seconds or GiB."""
DEFAULTS: Mapping[str, Any] = {"vocabulary": 51_200, "sequence": 2048}
"""Sizes of models in tables without these columns."""
_ALIASES = {
    "tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert",
    "vp": "chunks", "mbs": "microbatch", "gbs": "global_batch", "sp": "sequence_parallel",
    "seq": "sequence", "vocab": "vocabulary", "ffn": "mlp_width", "hidden_size": "hidden",
    "num_layers": "layers", "num_heads": "heads", "zero_stage": "zero", "gpus": "num_devices",
    "n_gpus": "num_devices", "iter_time_s": "step_s", "iter_time_ms": "step_ms",
}  # fmt: skip
_PROGRAM = Software(name="defaults")
_CHOICES = {"attention": get_args(Attention), "selective": get_args(Selective)}
_MODEL_KEYS = {f.name for f in fields(Transformer)} - {"name", "source", "experts", "latent"}
_CONFIG_KEYS = {*KEYS, "global_batch"} - {"layers", "shares"}
_PROGRAM_KEYS = {f.name for f in fields(Software)} - {"name", "overheads"}
_RUN_KEYS = {
    "row", "model", "cluster", "software", "release", "stages", "num_devices", "step_s", "step_ms",
    "memory_gib", "oom",
}  # fmt: skip
_TEXTS = ("row", "model", "cluster", "software", "release")
_KNOWN = _MODEL_KEYS | _CONFIG_KEYS | _PROGRAM_KEYS | _RUN_KEYS
_FLAGS = {
    "tied_embeddings", "learned_positions", "biases", "dropout", "sequence_parallel", "oom",
    *(name for name in _PROGRAM_KEYS if isinstance(getattr(_PROGRAM, name), bool)),
}  # fmt: skip
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A training run with its measured step time and memory, or that it ran out of memory."""

    model: Transformer
    config: ParallelConfig
    software: Software
    step_s: float | None = None
    memory_bytes: float | None = None
    """Peak of the fullest device as its driver reports it."""
    is_oom: bool = False
    """True if the run ran out of memory."""
    table: str = ""
    row: str = ""
    """Name of the run in its table, shown to users."""
    cluster: str = ""
    """A name in `hocket.cost.validation.SITES`."""
    release: str = ""
    """Release of the program if a table has several; predictions ignore it."""


def read_runs(
    path: str | Path, software: Software | None = None, **defaults: Any
) -> list[MeasuredRun]:
    """Read the runs of a table; raises `InputFileError` that names the row and the column.

    ``software`` is the program of rows without one, ``defaults`` are values of columns that the
    table lacks.
    """
    path = Path(path)
    runs = []
    for number_of_row, record in enumerate(read_records(path), start=1):
        with located(f"{path}, row {number_of_row}"):
            # csv marks too many cells by the key None, too few by the value None.
            if None in record or None in record.values():
                raise InputFileError(
                    "has another number of cells than the header",
                    hint="a comma is missing or too many; texts with commas need quotes",
                )
            cells = {name: _value(name, cell.strip()) for name, cell in record.items() if cell}
            runs.append(_run({**defaults, **cells}, software, path))
    return runs


def read_records(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file by column name, without comments on sources."""
    content = read_regular(path, MAX_FILE_BYTES)
    with located(str(path)):
        if content.count(b"\n") > MAX_ROWS:
            raise InputFileError(
                f"has more than {MAX_ROWS} rows",
                hint="leave the rows that tell most; a calibration needs dozens",
            )
        try:
            lines = content.decode("utf-8-sig").splitlines(keepends=True)
            # Some headers begin with "# " themselves, so only lines that state a source or a note
            # are comments.
            reader = csv.DictReader(
                line for line in lines if not line.startswith(("# source", "# note"))
            )
            columns = [_column(title) for title in reader.fieldnames or ()]
            reader.fieldnames = columns
            records = list(reader)
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputFileError(f"cannot be read as CSV: {error}") from None
        twice = next((name for name in columns if columns.count(name) > 1), None)
        if twice is not None:
            raise InputFileError(f"two columns mean {twice!r}")
        if not {"step_s", "step_ms", "memory_gib"}.intersection(columns):
            raise InputFileError("has no column 'step_s', 'step_ms' or 'memory_gib'")
    return records


def _column(title: str) -> str:
    """Name of the field that a column title stands for."""
    plain = title.strip().lower().removeprefix("# ").replace(" ", "_")
    name = _ALIASES.get(plain, plain)
    if name not in _KNOWN:
        hint = did_you_mean(name[:60], sorted(_KNOWN | set(_ALIASES)))
        raise InputFileError(f"unknown column {shown(title)}", hint=hint)
    return name


def _value(name: str, cell: str) -> Any:
    """A cell as a truth value, a number, a list of numbers or text."""
    if name in _FLAGS:
        return flag(_TRUTH.get(cell.lower(), cell), name)
    if name in _TEXTS:
        return cell
    for kind in (int, float):
        try:
            return [kind(part) for part in cell.split()] if name == "stages" else kind(cell)
        except ValueError:
            continue
    return cell


def _run(cells: Mapping[str, Any], software: Software | None, path: Path) -> MeasuredRun:
    return MeasuredRun(
        model=_model(cells, path.parent),
        config=_config(cells),
        software=_program(cells, software),
        step_s=_number(cells, {"step_s": 1.0, "step_ms": 1e-3}, 1e-9),
        memory_bytes=_number(cells, {"memory_gib": 2.0**30}, 0),
        is_oom=cells.get("oom", False),
        table=path.stem,
        **{name: cells.get(name, "") for name in ("row", "cluster", "release")},
    )


def _model(cells: Mapping[str, Any], folder: Path) -> Transformer:
    stated = {name: cells[name] for name in _MODEL_KEYS if name in cells}
    if "model" not in cells:
        return model_from_dict({**DEFAULTS, **stated}, default_name="gpt")
    name = text(cells["model"], "model")
    known = find_model(str(folder / name) if is_file(folder / name) else name)
    return model_from_dict({**model_to_dict(known), **stated}) if stated else known


def _config(cells: Mapping[str, Any]) -> ParallelConfig:
    stated = {name: cells[name] for name in _CONFIG_KEYS if name in cells}
    order = "interleaved" if cells.get("chunks", 1) != 1 else "1f1b"
    config = config_from_data(
        {"schedule": order, "layers": cells.get("stages"), **stated}, "the parallel config"
    )
    # Uneven batches are refused, because the formulas assume equal microbatches.
    if config.global_batch % (config.data * config.microbatch):
        raise wrong("global_batch", config.global_batch, "a multiple of data x microbatch")
    if cells.get("num_devices", config.num_devices) != config.num_devices:
        raise wrong("num_devices", cells["num_devices"], f"{config.num_devices}, as degrees say")
    return config


def _program(cells: Mapping[str, Any], default: Software | None) -> Software:
    """The training program of a row, with the fields that the row states."""
    program = default
    if program is None or "software" in cells:
        program = find_software(text(cells.get("software", ""), "software"))
    stated = {name: cells[name] for name in _PROGRAM_KEYS if name in cells}
    for name, value in stated.items():
        usual = getattr(_PROGRAM, name)
        if name in _CHOICES:
            choice(value, name, _CHOICES[name])
        elif is_number(value) != (is_number(usual) or usual is None):
            raise wrong(name, value, f"a value like {usual!r}")
    return replace(program, **stated)


def _number(cells: Mapping[str, Any], units: Mapping[str, float], least: float) -> float | None:
    """The first of the columns with their units that a row has; None if it has none."""
    found = (unit * number(cells[name], name, least, _MOST) for name, unit in units.items()
             if name in cells)  # fmt: skip
    return next(found, None)
