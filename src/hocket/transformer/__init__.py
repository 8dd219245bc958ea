"""A transformer's shape, and the ways to divide its training over devices."""

from hocket.transformer.division import (
    RECOMPUTES,
    SCHEDULES,
    Division,
    Divisions,
    Recompute,
    ScheduleName,
)
from hocket.transformer.shape import Experts, MlpKind, Transformer

__all__ = [
    "RECOMPUTES",
    "SCHEDULES",
    "Division",
    "Divisions",
    "Experts",
    "MlpKind",
    "Recompute",
    "ScheduleName",
    "Transformer",
]
