"""Recent history for the live page: attempts to draw, and the jobs that ended last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hocket.service.records import AttemptRecord, JobRecord

if TYPE_CHECKING:
    from hocket.service.store import Store

# Limits of the picture and of the table of ended jobs.
MAX_ATTEMPTS = 4_000
MAX_ENDED = 15


@dataclass(frozen=True, kw_only=True)
class Lately:
    """Recent attempts and ended jobs."""

    attempts: tuple[AttemptRecord, ...] = ()
    ended: tuple[JobRecord, ...] = ()
    """Jobs, the one that ended last first."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Name by job number, for every job in `attempts`."""


def recent_history(store: Store, since_s: float) -> Lately:
    """Attempts that ended after `since_s` or still run, at most `MAX_ATTEMPTS`, and ended jobs.

    If there are more, those that ended first are left out.
    """
    held = sorted(store.held_since(since_s), key=lambda one: one.record.ended_s or float("inf"))
    return Lately(
        attempts=tuple(one.record for one in held[-MAX_ATTEMPTS:]),
        ended=tuple(store.last_ended(MAX_ENDED)),
        names={one.record.job: one.name for one in held},
    )
