"""Memory of the fullest device for millions of configs of a transformer, in closed form.

State follows Rajbhandari et al. 2020 (ZeRO); activations follow Korthikanti et al. 2022;
microbatches in flight follow each schedule's warm-up. Whatever depends on few values is a small
table; a config is then a few look-ups and products: O(configs), about 20 ns each.
`stage_memory` is the same for one config with all its stages, of any size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.columns import columns_of
from hocket.cost.parallel.memory_tables import memory_tables
from hocket.cost.parallel.overheads import (
    DEFAULT_OVERHEADS,
    FORMULAS_ONLY,
    GIVEN_BACK,
    MemoryOverheads,
    fit_overheads,
)
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.stage_memory import StageMemory, stage_memory
from hocket.transformer import ParallelConfigs, Transformer

__all__ = [
    "DEFAULT_OVERHEADS",
    "FORMULAS_ONLY",
    "GIVEN_BACK",
    "ConfigMemory",
    "MemoryOverheads",
    "StageMemory",
    "fit_overheads",
    "memory",
    "stage_memory",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class ConfigMemory:
    """Bytes on the fullest device of each config; overheads are in the total only."""

    state_bytes: FloatArray
    """Weights, gradients and optimizer state, and layers that ZeRO holds whole for a while."""
    activation_bytes: FloatArray
    """Activations of the layers for microbatches in flight, and of one layer in recomputation."""
    edge_bytes: FloatArray
    """Activations of the embedding or the logits."""
    total_bytes: FloatArray
    """Everything, with overheads."""


def memory(
    model: Transformer,
    configs: ParallelConfigs,
    software: Software,
    overheads: MemoryOverheads | None = None,
) -> ConfigMemory:
    """Memory of the fullest device of each config; overheads are the program's unless given.

    Stages are even; where layers do not divide, the first stages have one more. The first and the
    last rank of each pipeline are looked at: one of them is the fullest.
    """
    from hocket.cost.parallel.memory_kernel import fill

    overheads = overheads or software.overheads
    num = len(configs)
    result = ConfigMemory(**{field.name: np.empty(num) for field in fields(ConfigMemory)})
    if num:
        tables = memory_tables(
            model,
            software,
            int(configs.tensor.max()),
            int(configs.pipeline.max()),
            int(configs.chunks.max()),
        )
        figures = (
            overheads.constant_bytes,
            overheads.state_factor,
            overheads.activation_factor,
        )
        columns = columns_of(configs)
        fill(columns, tables, figures, *(getattr(result, f.name) for f in fields(ConfigMemory)))
    return result
