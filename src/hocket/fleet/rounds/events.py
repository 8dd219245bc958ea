"""Events of a fleet. Jobs are named by their number, times count in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.fleet.rounds.state import FleetDevice, Job


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Submit new jobs; their numbers are larger than those of all earlier jobs."""

    time_s: float
    jobs: tuple[Job, ...]
    living: frozenset[int] = frozenset()
    """Jobs with processes that may still run; `Leave` follows when these have ended."""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Jobs did their last step."""

    time_s: float
    numbers: tuple[int, ...]
    living: frozenset[int] = frozenset()
    """Jobs with processes that may still run; `Leave` follows when these have ended."""


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Jobs are cancelled by a user."""

    time_s: float
    numbers: tuple[int, ...]
    is_failure: bool = False
    """True if they cannot be run at all: jobs that come after their failure may start."""
    living: frozenset[int] = frozenset()
    """Jobs with processes that may still run; `Leave` follows when these have ended."""


@dataclass(frozen=True, kw_only=True)
class TimeOut:
    """Jobs have reached their time limits."""

    time_s: float
    numbers: tuple[int, ...]
    living: frozenset[int] = frozenset()
    """Jobs with processes that may still run; `Leave` follows when these have ended."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The last process of an ended job is gone, so jobs that come after it may start."""

    time_s: float
    number: int
    reason: str
    """Why the job ended, one of `STOP_REASONS`."""


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Devices take no new jobs until they are reopened. Jobs that save their work are stopped
    there; others stay until they end."""

    time_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Reopen:
    """Drained devices take jobs again."""

    time_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fail:
    """The running attempt of a job crashed."""

    time_s: float
    number: int
    attempt: int
    done_steps: float | None = None
    """Steps that a checkpoint saved; None where nothing is known, then those of the last round."""
    living: frozenset[int] = frozenset()
    """Jobs with processes that may still run; `Leave` follows when these have ended."""


@dataclass(frozen=True, kw_only=True)
class Lose:
    """An attempt that was stopped saved less than it had done."""

    time_s: float
    number: int
    saved_steps: float = 0.0
    """Steps that the next attempt begins with."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Jobs give up their devices until they are resumed."""

    time_s: float
    numbers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Paused jobs wait for devices again."""

    time_s: float
    numbers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A measurement: steps that a job has done so far, and steps in its last checkpoint."""

    time_s: float
    number: int
    attempt: int
    done_steps: float | None = None
    """None where only what is saved is known."""
    saved_steps: float | None = None
    """Steps that its last checkpoint holds; None where nothing is known."""
    replaces_guess: bool = False
    """True if nobody has stated or measured before how fast the job is."""


@dataclass(frozen=True, kw_only=True)
class GangSize:
    """Another number of devices for a job, and its steps per second with them on each device
    type."""

    number: int
    gang: int
    steps_per_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Change the number of devices of jobs."""

    time_s: float
    sizes: tuple[GangSize, ...]


@dataclass(frozen=True, kw_only=True)
class AddDevices:
    """Devices were added, or work again."""

    time_s: float
    devices: tuple[FleetDevice, ...]


@dataclass(frozen=True, kw_only=True)
class RemoveDevices:
    """Devices failed or were removed, together with the attempts on them."""

    time_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time passed; a round begins once ``time_s`` has reached the state's ``next_tick_s``."""

    time_s: float


Event = (
    Submit
    | Finish
    | Cancel
    | TimeOut
    | Leave
    | Drain
    | Reopen
    | Fail
    | Lose
    | Pause
    | Resume
    | Progress
    | Resize
    | AddDevices
    | RemoveDevices
    | Tick
)
