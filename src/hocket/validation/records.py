"""Columns that the public files share, as values."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.transformer import Division, Transformer
from hocket.validation.tables import gpt

Record = Mapping[str, str]


def gpt_of(record: Record, *, dropout: bool = True) -> Transformer:
    """The GPT of a row."""
    return gpt(
        hidden=int(record["hidden"]),
        layers=int(record["layers"]),
        heads=int(record["heads"]),
        sequence=int(record["seq"]),
        vocabulary=int(record["vocab"]),
        dropout=dropout,
    )


def division_of(record: Record, *, recompute: str, chunks: int = 1, zero: int = 0) -> Division:
    """The division of a row."""
    return Division(
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
