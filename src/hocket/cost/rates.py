"""Rates that were measured or fitted on single machines, read from ``rates.toml``.

Each table of the file states its source; the modules of this package read the tables by name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

RATES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
)
"""Tables of ``rates.toml`` by name."""
