"""Splitting a classifier by class; imports PyTorch."""

from __future__ import annotations

from hocket.classes.on_fleet import train_on_fleet
from hocket.classes.report import write_split_report
from hocket.classes.settings import ANY_NUMBER, USUAL_RATES, NetTraining, SplitRequest
from hocket.classes.side_by_side import train_side_by_side
from hocket.classes.split import split
from hocket.classes.text import split_text

__all__ = [
    "ANY_NUMBER",
    "USUAL_RATES",
    "NetTraining",
    "SplitRequest",
    "split",
    "split_text",
    "train_on_fleet",
    "train_side_by_side",
    "write_split_report",
]
