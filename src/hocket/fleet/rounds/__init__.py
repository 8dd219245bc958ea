"""Shares of time become jobs on devices, round by round: ``step(state, event)`` and its values."""

from __future__ import annotations

from hocket.fleet.rounds.actions import Actions, Start, Stop
from hocket.fleet.rounds.events import (
    AddDevices,
    Cancel,
    Event,
    Fail,
    Finish,
    Lose,
    Pause,
    Progress,
    RemoveDevices,
    Resume,
    Submit,
    Tick,
)
from hocket.fleet.rounds.state import Device, Job, PairTable, Rules, State, new_state
from hocket.fleet.rounds.step import step

__all__ = [
    "Actions",
    "AddDevices",
    "Cancel",
    "Device",
    "Event",
    "Fail",
    "Finish",
    "Job",
    "Lose",
    "PairTable",
    "Pause",
    "Progress",
    "RemoveDevices",
    "Resume",
    "Rules",
    "Start",
    "State",
    "Stop",
    "Submit",
    "Tick",
    "new_state",
    "step",
]
