"""Descriptions of jobs."""

from __future__ import annotations

from hocket.service.spec import read_spec

__all__ = [
    "read_spec",
]
