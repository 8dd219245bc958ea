"""Read a `ParallelConfig` from a table of a file; unknown keys and wrong values are errors."""

from __future__ import annotations

from typing import Any

from hocket.base import fields
from hocket.transformer.parallel_config import RECOMPUTES, SCHEDULES, ParallelConfig

MAX_DEGREE = 1_000_000
MAX_BATCH = 2**31 - 1
COUNTS = ("tensor", "pipeline", "data", "context", "expert", "chunks", "microbatch")
"""Fields that are whole numbers from 1 up."""
CHOICES: dict[str, tuple[str, ...]] = {"schedule": SCHEDULES, "recompute": RECOMPUTES}
KEYS = (*COUNTS, *CHOICES, "sequence_parallel", "zero", "layers", "shares")
"""All fields but the batch."""


def config_from_data(data: object, path: str, global_batch: int | None = None) -> ParallelConfig:
    """Read a config from a table; missing keys are 1 or off. The batch is an argument or a key."""
    required = () if global_batch is not None else ("global_batch",)
    table = fields.record(data, path, required=required, optional=KEYS)
    stated = {key: _value(key, entry, f"{path}.{key}") for key, entry in table.items()}
    return ParallelConfig(**{"global_batch": global_batch, **stated})


def _value(key: str, entry: object, place: str) -> Any:
    if key == "global_batch":
        return fields.integer(entry, place, 1, MAX_BATCH)
    if key in COUNTS:
        return fields.integer(entry, place, 1, MAX_DEGREE)
    if key in CHOICES:
        return fields.choice(entry, place, CHOICES[key])
    if key == "sequence_parallel":
        return fields.flag(entry, place)
    if key == "zero":
        return fields.integer(entry, place, 0, 3)
    if entry is None:
        return None
    # An explicit stage may have no layer (embedding alone), but every replica needs a sample.
    least, most = (1, MAX_BATCH) if key == "shares" else (0, MAX_DEGREE)
    return tuple(fields.int_column(entry, place, least, most).tolist())
