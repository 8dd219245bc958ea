"""An executor whose processes are rows of a table: tests say what becomes of them.

It keeps the promises of `hocket.service.executors.executor.Executor`, survives daemons (hand the
same object to the next one), and raises `DoubleRunError` as soon as a device or a job runs twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hocket.fleet.rounds.state import FleetDevice
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    Assignment,
    AttemptName,
    Phase,
    Poll,
    Status,
)


class DoubleRunError(AssertionError):
    """Two attempts run on one device, or of one job."""


@dataclass
class Process:
    """One virtual attempt."""

    assignment: Assignment
    phase: Phase = RUNNING
    exit_code: int | None = None
    detail: str = ""
    num_stops: int = 0
    is_stubborn: bool = False
    """Goes on when asked to stop; only ``kill`` ends it."""


@dataclass
class FakeExecutor:
    """``devices`` may be changed at any time, as may ``processes`` through the methods below."""

    devices: tuple[FleetDevice, ...]
    processes: dict[AttemptName, Process] = field(default_factory=dict)
    fenced: set[AttemptName] = field(default_factory=set)
    """Stopped before they began: they never start."""
    history: list[tuple[str, AttemptName]] = field(default_factory=list)
    are_stubborn: bool = False
    """Whether new processes go on when asked to stop."""
    stop_exit_code: int = -15
    on_call: Callable[[str], None] | None = None
    """Called before each call of the daemon with its name: may raise."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    # ── what the daemon calls ──

    def start(self, assignment: Assignment) -> None:
        with self.lock:
            self._called("start")
            name = assignment.name
            if name in self.processes or name in self.fenced:
                return
            for other in self.running():
                mine = self.processes[other].assignment
                both_share = all(
                    "HOCKET_SPACE_SHARING" in one.environment for one in (mine, assignment)
                )
                shares = set(mine.devices) & set(assignment.devices)
                if other.job == name.job or (shares and not both_share):
                    raise DoubleRunError(f"{name} starts while {other} runs on {mine.devices}")
            self.history.append(("start", name))
            self.processes[name] = Process(assignment, is_stubborn=self.are_stubborn)

    def stop(self, name: AttemptName, grace_s: float) -> None:
        with self.lock:
            self._called("stop")
            process = self.processes.get(name)
            if process is None:
                self.fenced.add(name)
                return
            process.num_stops += 1
            self.history.append(("stop", name))
            if not process.is_stubborn:
                self.exit(name, self.stop_exit_code)

    def kill(self, name: AttemptName) -> None:
        with self.lock:
            self._called("kill")
            self.history.append(("kill", name))
            if name in self.processes:
                self.exit(name, -9)
            else:
                self.fenced.add(name)

    def poll(self) -> Poll:
        with self.lock:
            self._called("poll")
            attempts = [
                Status(name=name, phase=p.phase, exit_code=p.exit_code, detail=p.detail)
                for name, p in self.processes.items()
            ]
            return Poll(attempts=attempts, devices=self.devices)

    def forget(self, name: AttemptName) -> None:
        with self.lock:
            self._called("forget")
            self.history.append(("forget", name))
            if name in self.processes:
                assert self.processes[name].phase in (EXITED, LOST), "forgot what still runs"
                del self.processes[name]
            self.fenced.add(name)

    def close(self) -> None:
        pass

    # ── what tests call ──

    def exit(self, name: AttemptName, exit_code: int = 0) -> None:
        """The processes of an attempt end by themselves."""
        with self.lock:
            process = self.processes[name]
            if process.phase not in (EXITED, LOST):
                process.phase, process.exit_code = EXITED, exit_code

    def lose(self, name: AttemptName, detail: str = "its supervisor died") -> None:
        """The engine under an attempt dies, and the attempt with it."""
        with self.lock:
            process = self.processes[name]
            if process.phase not in (EXITED, LOST):
                process.phase, process.detail = LOST, detail

    def lose_devices(self, *names: str) -> None:
        """Devices go, with what ran there."""
        with self.lock:
            self.devices = tuple(d for d in self.devices if d.name not in names)
            for name in self.running():
                if set(self.processes[name].assignment.devices) & set(names):
                    self.lose(name, "its node died")

    def running(self) -> list[AttemptName]:
        """Attempts with a living process."""
        with self.lock:
            return [n for n, p in self.processes.items() if p.phase not in (EXITED, LOST)]

    def _called(self, what: str) -> None:
        if self.on_call is not None:
            self.on_call(what)


def fleet_devices(**num_of_kind: int) -> tuple[FleetDevice, ...]:
    """``fleet_devices(v100=2, k80=1)``: named ``v100-0`` and so on, four to a server."""
    return tuple(
        FleetDevice(
            name=f"{device_type}-{index}",
            device_type=device_type,
            server=f"{device_type}-server-{index // 4}",
        )
        for device_type, num in num_of_kind.items()
        for index in range(num)
    )
