"""Published tables, predicted again."""

from __future__ import annotations

from hocket.cost.published_files import absent_tables
from hocket.cost.published_tables import load_tables
from hocket.cost.validation import validate

__all__ = [
    "absent_tables",
    "load_tables",
    "validate",
]
