"""Whether this machine has room for all ranks of a run on its processor."""

from __future__ import annotations

import torch

from hocket.base.errors import UsageError
from hocket.base.units import format_bytes
from hocket.hardware.detect import PROCESS_BYTES, available_bytes
from hocket.runtime.parallel.model import Embedding, Head, TransformerBlock
from hocket.transformer import ParallelConfig, Transformer

_MAX_PROCESSES = 64
_INSTEAD = (
    "compare the division with one device at toy size (--check-only), or export the plan and start "
    "it where it is to run (hocket export … --to torch)"
)


def require_memory(model: Transformer, division: ParallelConfig, dtype: torch.dtype) -> None:
    """Refuse a run that would fill the memory of this machine with its states alone."""
    if division.num_devices > _MAX_PROCESSES:
        raise UsageError(
            f"the plan takes {division.num_devices} devices; on one machine at most "
            f"{_MAX_PROCESSES} processes are started",
            hint=_INSTEAD,
        )
    needed = state_bytes(model, division, dtype) + division.num_devices * PROCESS_BYTES
    available = available_bytes()
    if needed > available:
        raise UsageError(
            f"training {model.name} here takes {format_bytes(needed)} for weights, gradients and "
            f"optimizer alone, and {format_bytes(available)} are free",
            hint=_INSTEAD,
        )


def state_bytes(model: Transformer, division: ParallelConfig, dtype: torch.dtype) -> int:
    """Weights, gradients and both moments of Adam of all ranks together."""
    whole = 1 if division.zero == 3 else division.data
    moments = 1 if division.zero else division.data
    return num_parameters(model) * dtype.itemsize * 2 * (whole + moments)


def num_parameters(model: Transformer) -> int:
    """Parameters that are held, with a copy of tied embeddings."""
    with torch.device("meta"):
        modules = [
            (Embedding(model), 1),
            (TransformerBlock(model, "none"), model.layers),
            (Head(model), 1),
        ]
    return sum(times * sum(p.numel() for p in m.parameters()) for m, times in modules)
