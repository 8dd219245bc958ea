"""Memory of the fullest device for millions of configs of a transformer, in closed form.

State follows Rajbhandari et al. 2020 (ZeRO), activations follow Korthikanti et al. 2022, and
microbatches in flight follow each schedule's warm-up. Terms that depend on few fields are tabulated
first (`memory_tables`), so a config takes a few look-ups and products: O(configs), about 20 ns
each. `stage_memory` computes all stages of one config, with any numbers of layers.
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
    """Bytes on the fullest device of each config; only the total includes overheads."""

    state_bytes: FloatArray
    """Weights, gradients, optimizer state, and the layers that ZeRO gathers temporarily."""
    activation_bytes: FloatArray
    """Activations of all microbatches in flight, and of one layer being recomputed."""
    edge_bytes: FloatArray
    """Activations of the embedding and the logits on that device."""
    total_bytes: FloatArray
    """Sum of all terms, with overheads."""


def memory(
    model: Transformer,
    configs: ParallelConfigs,
    software: Software,
    overheads: MemoryOverheads | None = None,
) -> ConfigMemory:
    """Memory of the fullest device of each config; ``overheads`` defaults to the program's own.

    Stages are even; if the layers are not a multiple of the stages, the first stages get one more.
    Only the first and the last rank of each pipeline are computed, since one of them is the
    fullest.
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
