"""Tables of published measurements: those shipped with hocket, and public files if present.

Shipped tables have one row per run and equal columns; lines that begin with ``#`` name sources and
assumptions.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.base.regular import read_regular
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.softwares import find_software
from hocket.transformer import ParallelConfig, Transformer
from hocket.transformer.files import find_model

# One published measurement.


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured run: its step time and memory, or that it ran out of memory."""

    table: str
    row: str
    """Name of its row in the table, shown to users."""
    model: Transformer
    config: ParallelConfig
    cluster: str
    """A name in `hocket.cost.validation.SITES`."""
    software: Software
    step_s: float | None = None
    memory_bytes: float | None = None
    """Peak of the fullest device as its driver reports it."""
    is_oom: bool = False
    """True if the run ran out of memory."""
    release: str = ""
    """Release of the program if a table has several; predictions ignore it."""


# Columns that the public files share, as values.

Record = Mapping[str, str]


def gpt_of(record: Record, *, dropout: bool = True) -> Transformer:
    """Transformer shape of a row."""
    return gpt(
        hidden=int(record["hidden"]),
        layers=int(record["layers"]),
        heads=int(record["heads"]),
        sequence=int(record["seq"]),
        vocabulary=int(record["vocab"]),
        dropout=dropout,
    )


def config_of(record: Record, *, recompute: str, chunks: int = 1, zero: int = 0) -> ParallelConfig:
    """Parallel config of a row."""
    return ParallelConfig(
        tensor=int(record["tp"]),
        pipeline=int(record["pp"]),
        data=int(record["dp"]),
        chunks=chunks,
        microbatch=int(record["microbatch"]),
        global_batch=int(record["global_batch"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        recompute=recompute,  # type: ignore[arg-type]
        zero=zero,
    )


TABLES = Path(__file__).parent / "published"
"""Folder of the shipped tables."""
MAX_TABLE_BYTES = 16_000_000
MAX_ROWS = 10_000
"""Most rows of a table: each becomes a model and a config, a thousand times the size of its text.
"""
COLUMNS = (
    "row", "cluster", "software", "gradient_bytes", "spare_gradient_bytes", "hidden", "layers",
    "heads", "vocabulary", "sequence", "dropout", "tensor", "pipeline", "data", "chunks",
    "microbatch", "global_batch", "recompute", "zero", "sequence_parallel", "stages", "step_s",
    "memory_gib", "oom",
)  # fmt: skip
"""Columns of a table; ``stages`` lists the layers of each stage, such as ``5 6 6 5``, or is empty.
"""
NAMED_COLUMNS = (
    "row", "cluster", "software", "dtype", "gradient_bytes", "model", "layers", "tensor",
    "pipeline", "context", "data", "chunks", "microbatch", "global_batch", "step_s",
)  # fmt: skip
"""Columns of a table of known models with some of their layers.

Assumed: no recomputation, sharded optimizer state, sequence parallelism with tensor parallelism.
"""


def load_tables(data_dir: str | Path | None = None) -> dict[str, list[Measured]]:
    """All tables by name; a public file in ``data_dir`` replaces the shipped part."""
    from hocket.cost.published_files import read_public

    tables = {path.stem: read_table(path) for path in sorted(TABLES.glob("*.csv"))}
    if data_dir is not None:
        tables.update(read_public(Path(data_dir)))
    return tables


def read_table(path: Path) -> list[Measured]:
    """Read the rows of one table."""
    readers = {frozenset(COLUMNS): _measured, frozenset(NAMED_COLUMNS): _measured_of_named}
    rows = []
    for record in read_records(path):
        read = readers.get(frozenset(record))
        if read is None:
            raise InputFileError("has other columns than a table has", where=str(path))
        rows.append(read(path.stem, record))
    return rows


def read_records(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file as dicts, without the comment lines."""
    content = read_regular(path, MAX_TABLE_BYTES)
    if content.count(b"\n") > MAX_ROWS:
        raise InputFileError(
            f"has more than {MAX_ROWS} rows",
            hint="leave the rows that tell most; a calibration needs dozens",
            where=str(path),
        )
    try:
        # Headers of some public files begin with "# " themselves.
        lines = content.decode().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(("# source", "# note"))]
        return list(csv.DictReader(kept))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputFileError(f"cannot be read as CSV: {error}", where=str(path)) from None


def gpt(
    *, hidden: int, layers: int, heads: int, sequence: int, vocabulary: int, dropout: bool = True
) -> Transformer:
    """Transformer shape of a GPT as Megatron trains it."""
    return Transformer(
        name=f"gpt-h{hidden}-l{layers}-a{heads}",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_width=hidden // heads,
        mlp_width=4 * hidden,
        mlp="gelu",
        vocabulary=vocabulary,
        sequence=sequence,
        tied_embeddings=True,
        learned_positions=True,
        biases=True,
        dropout=dropout,
    )


def _measured_of_named(table: str, record: Mapping[str, str]) -> Measured:
    def whole(column: str) -> int:
        return int(record[column])

    chunks, tensor = whole("chunks"), whole("tensor")
    return Measured(
        table=table,
        row=record["row"],
        model=replace(find_model(record["model"]), layers=whole("layers"), dropout=False),
        config=ParallelConfig(
            tensor=tensor,
            pipeline=whole("pipeline"),
            context=whole("context"),
            data=whole("data"),
            chunks=chunks,
            microbatch=whole("microbatch"),
            global_batch=whole("global_batch"),
            schedule="interleaved" if chunks > 1 else "1f1b",
            zero=1,
            sequence_parallel=tensor > 1,
        ),
        cluster=record["cluster"],
        software=replace(
            find_software(record["software"]),
            dtype=record["dtype"],
            gradient_bytes=int(record["gradient_bytes"]),
            # The optimizer's 32-bit copy is made when the activations, which are more, have gone.
            copies_gradients=False,
        ),
        step_s=float(record["step_s"]),
    )


def _measured(table: str, record: Mapping[str, str]) -> Measured:
    def whole(column: str) -> int:
        return int(record[column])

    def real(column: str, scale: float = 1.0) -> float | None:
        return float(record[column]) * scale if record[column] else None

    chunks = whole("chunks")
    program = find_software(record["software"])
    return Measured(
        table=table,
        row=record["row"],
        model=gpt(
            hidden=whole("hidden"),
            layers=whole("layers"),
            heads=whole("heads"),
            sequence=whole("sequence"),
            vocabulary=whole("vocabulary"),
            dropout=bool(whole("dropout")),
        ),
        config=ParallelConfig(
            tensor=whole("tensor"),
            pipeline=whole("pipeline"),
            data=whole("data"),
            chunks=chunks,
            microbatch=whole("microbatch"),
            global_batch=whole("global_batch"),
            schedule="interleaved" if chunks > 1 else "1f1b",
            recompute=record["recompute"],  # type: ignore[arg-type]
            zero=whole("zero"),
            sequence_parallel=bool(whole("sequence_parallel")),
            layers=tuple(map(int, record["stages"].split())) or None,
        ),
        cluster=record["cluster"],
        software=replace(
            program,
            gradient_bytes=whole("gradient_bytes"),
            spare_gradient_bytes=whole("spare_gradient_bytes"),
        ),
        step_s=real("step_s"),
        memory_bytes=real("memory_gib", 2**30),
        is_oom=bool(whole("oom")),
    )
