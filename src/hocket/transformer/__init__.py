"""Shapes of transformers (`Transformer`), their parallel configs, and counts of both.

`files` finds models by name or file, `counts` has parameters and FLOPs, `rules` the valid configs.
"""

from hocket.transformer.parallel_config import (
    RECOMPUTES,
    SCHEDULES,
    ParallelConfig,
    ParallelConfigs,
    Recompute,
    ScheduleName,
)
from hocket.transformer.shape import Experts, Latent, MlpKind, Transformer

__all__ = [
    "RECOMPUTES",
    "SCHEDULES",
    "Experts",
    "Latent",
    "MlpKind",
    "ParallelConfig",
    "ParallelConfigs",
    "Recompute",
    "ScheduleName",
    "Transformer",
]
