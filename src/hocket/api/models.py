"""Shapes of transformers, by name and as files."""

from __future__ import annotations

from hocket.transformer import SCHEDULES
from hocket.transformer.counts import parameter_counts
from hocket.transformer.files import (
    check_model,
    find_model,
    is_config_file,
    preset_names,
    require_depth,
)
from hocket.transformer.hf_cache import PREFIX, cached_names

__all__ = [
    "PREFIX",
    "SCHEDULES",
    "cached_names",
    "check_model",
    "find_model",
    "is_config_file",
    "parameter_counts",
    "preset_names",
    "require_depth",
]
