"""Values that the templates show; control characters are already removed from their texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from markupsafe import Markup

from hocket.view.fleet_live import colour_of

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[Row]):
    """The first rows of a table, and how many more there are."""

    rows: tuple[Row, ...]
    num_more: int = 0


@dataclass(frozen=True, kw_only=True)
class Stat:
    """A number at the head of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class JobName:
    """A job as it is named everywhere."""

    number: int
    name: str
    team: str = ""

    @property
    def colour(self) -> int:
        """Its colour in the picture."""
        return colour_of(self.number)


@dataclass(frozen=True, kw_only=True)
class WaitingRow:
    """A job in the queue."""

    job: JobName
    gang: int
    since: str
    start: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunningRow:
    """A job that holds devices."""

    job: JobName
    devices: str
    since: str
    done: float | None
    """Finished fraction of its work; None if its total is unknown."""
    progress: str
    end: str


@dataclass(frozen=True, kw_only=True)
class ShareRow:
    """Time that a job got, against what its shares promised."""

    job: JobName
    phase: str
    target: str
    received: str
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceLine:
    """A device and who is on it."""

    name: str
    device_type: str
    state: str
    jobs: tuple[JobName, ...]


@dataclass(frozen=True, kw_only=True)
class EndedRow:
    """A job that ended lately."""

    job: JobName
    status: str
    ended: str
    message: str


@dataclass(frozen=True, kw_only=True)
class LivePage:
    """Parts of the page that are updated without a reload."""

    title: str
    trouble: str
    """Problem that keeps jobs from being run; empty for none."""
    stats: tuple[Stat, ...]
    picture: Markup
    picture_note: str
    window: str
    devices: Listing[DeviceLine]
    waiting: Listing[WaitingRow]
    running: Listing[RunningRow]
    shares: Listing[ShareRow]
    ended: Listing[EndedRow]
    paused: Listing[JobName]
