"""Rounds turn shares of time into jobs on devices: ``step(state, event)`` and its types."""

from __future__ import annotations

from hocket.fleet.rounds.actions import Actions, Start, Stop
from hocket.fleet.rounds.events import (
    AddDevices,
    Cancel,
    Drain,
    Event,
    Fail,
    Finish,
    Lose,
    Pause,
    Progress,
    RemoveDevices,
    Reopen,
    Resume,
    Submit,
    Tick,
    TimeOut,
)
from hocket.fleet.rounds.state import FleetDevice, FleetState, Job, PairTable, Rules, new_state
from hocket.fleet.rounds.step import step

__all__ = [
    "Actions",
    "AddDevices",
    "Cancel",
    "Drain",
    "Event",
    "Fail",
    "Finish",
    "FleetDevice",
    "FleetState",
    "Job",
    "Lose",
    "PairTable",
    "Pause",
    "Progress",
    "RemoveDevices",
    "Reopen",
    "Resume",
    "Rules",
    "Start",
    "Stop",
    "Submit",
    "Tick",
    "TimeOut",
    "new_state",
    "step",
]
