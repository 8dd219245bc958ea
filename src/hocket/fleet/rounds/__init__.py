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
from hocket.fleet.rounds.state import FleetDevice, FleetState, Job, PairTable, Rules, new_state
from hocket.fleet.rounds.step import step

__all__ = [
    "Actions",
    "AddDevices",
    "Cancel",
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
    "Resume",
    "Rules",
    "Start",
    "Stop",
    "Submit",
    "Tick",
    "new_state",
    "step",
]
