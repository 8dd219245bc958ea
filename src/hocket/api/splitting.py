"""Splitting a classifier by class; imports PyTorch."""

from __future__ import annotations

from hocket.classes.report import write_split_report
from hocket.classes.settings import AUTO, USUAL_RATES, NetTraining, SplitRequest
from hocket.classes.split import split
from hocket.classes.text import split_text

__all__ = [
    "AUTO",
    "USUAL_RATES",
    "NetTraining",
    "SplitRequest",
    "split",
    "split_text",
    "write_split_report",
]
