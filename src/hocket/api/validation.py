"""Published tables, predicted again."""

from __future__ import annotations

from hocket.validation.public import absent_tables
from hocket.validation.tables import load_tables
from hocket.validation.validate import validate

__all__ = [
    "absent_tables",
    "load_tables",
    "validate",
]
