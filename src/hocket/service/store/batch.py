"""Rows of one commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.fleet.rounds.state import FleetState
from hocket.service.records import AttemptRecord, CheckpointRecord, EventRecord, JobRecord


@dataclass(frozen=True, kw_only=True)
class KeyRecord:
    """An idempotency key and the job that it made."""

    key: str
    body_hash: str
    job: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """New and changed rows, the state after them, and how many rows there are then."""

    state: FleetState
    jobs: Sequence[JobRecord] = ()
    attempts: Sequence[AttemptRecord] = ()
    checkpoints: Sequence[CheckpointRecord] = ()
    events: Sequence[EventRecord] = ()
    keys: Sequence[KeyRecord] = ()
    first_new_number: int = 1
    """Jobs from this number on are new: their specs are stored too."""
    last_number: int = 0
    last_sequence: int = 0
    num_attempts: int = 0
    num_checkpoints: int = 0
