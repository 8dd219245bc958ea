"""A transformer's shape, and its parallel configs."""

from hocket.transformer.parallel_config import (
    RECOMPUTES,
    SCHEDULES,
    ParallelConfig,
    ParallelConfigs,
    Recompute,
    ScheduleName,
)
from hocket.transformer.shape import Experts, MlpKind, Transformer

__all__ = [
    "RECOMPUTES",
    "SCHEDULES",
    "Experts",
    "MlpKind",
    "ParallelConfig",
    "ParallelConfigs",
    "Recompute",
    "ScheduleName",
    "Transformer",
]
