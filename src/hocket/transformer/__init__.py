"""Shapes of transformers, and their parallel configs."""

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
