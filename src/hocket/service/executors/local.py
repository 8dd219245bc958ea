"""Runs attempts as processes of this machine, each under a supervisor that outlives the daemon.

All state is in folders (`attempt_folder`), so a new executor on the same folder sees the attempts
of an earlier one. A supervisor is alive exactly while its lock is held; while it lives, a result is
ignored, whoever wrote it. A supervisor that died without a result takes its commands with it.
Processes that it left behind are in the control group of the attempt, or have its mark in the
environment. They are killed until none is found, and only then is the attempt called lost. A
supervisor without a heartbeat is killed. Jobs can replace the files of others that run as the same
user, also the lock, so a free lock counts only if no process of the supervisor is found.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hocket.base import config
from hocket.base.errors import RunError, UsageError
from hocket.fleet.rounds.state import FleetDevice
from hocket.processes import system
from hocket.processes.start import start_module
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.attempt_folder import DAMAGED, Result
from hocket.service.executors.attempts import CANNOT_START, Attempts, ended
from hocket.service.executors.cgroups import Cgroup
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    STARTING,
    Assignment,
    AttemptName,
    Poll,
    Status,
)
from hocket.service.executors.folders import FolderExecutor
from hocket.service.executors.local_devices import with_cuda
from hocket.service.executors.supervisor import INHERITED
from hocket.service.plain_file import open_plain

SUPERVISOR_DELAY_S = 5.0
"""Seconds after the grace at which a supervisor that has not ended its attempt is killed as stuck.
"""
SILENCE_S = 60.0
"""Seconds without a heartbeat after which a supervisor is killed and its attempt is lost."""
MAX_LOOK_S = 2.0
"""Maximum seconds that one poll adds to a silence: after the machine or the daemon was suspended,
supervisors must get time to show that they live.
"""
COMPLAINTS = "supervisor.err"
MAX_END_LOOKS, END_LOOK_S = 200, 0.05
MAX_SUPERVISORS = 3
"""Maximum number of tries to start a supervisor if none of them begins."""


class _Silence(NamedTuple):
    """Time for which a supervisor was seen without a new heartbeat."""

    beat: int
    silent_s: float
    looked_s: float


class LocalExecutor(FolderExecutor):
    """An `Executor` for this machine; ``folder`` is used by it alone and keeps its state."""

    def __init__(
        self, folder: Path, devices: tuple[FleetDevice, ...], *, log_limit_bytes: int = 1 << 30
    ) -> None:
        if sys.platform != "linux":
            raise UsageError(
                "local jobs need Linux", hint="run them on Ray or Slurm: --on ray, --on slurm"
            )
        super().__init__(Attempts(Path(os.path.realpath(folder)), log_limit_bytes))
        self._devices = devices
        self._supervisors: dict[AttemptName, list[subprocess.Popen[bytes]]] = {}
        self._num_supervisors: dict[AttemptName, int] = {}
        """Number of supervisor starts that were tried for each attempt."""
        self._silences: dict[AttemptName, _Silence] = {}
        self._commands: list[set[bytes]] | None = None
        """Command line of each process of this machine, read at most once per poll."""

    def start(self, assignment: Assignment) -> None:
        """Begin an attempt, unless one of this name was begun, stopped or forgotten before."""
        name = assignment.name
        if not self._attempts.accept(with_cuda(assignment)):
            return
        settled = (files.STOP, files.BEGUN, files.RESULT)
        is_settled = any((self._attempts.path(name) / one).exists() for one in settled)
        if name not in self._supervisors and not is_settled:
            try:
                self._start_supervisor(name)
            except OSError as error:
                raise RunError(f"cannot start attempt {name}: {error}") from None

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """End an attempt within ``grace_s``; one that has not begun never will."""
        try:
            if not self._attempts.ask_to_stop(name, grace_s):
                return
        finally:
            # If the stop file could not be written, the supervisor uses the grace of its job.
            self._signal_supervisor(self._attempts.path(name), signal.SIGTERM)
        self._end_within(name, grace_s + SUPERVISOR_DELAY_S)

    def kill_all(self) -> None:
        """Kill all attempts that have a folder, also those of earlier states."""
        for name in self._attempts.names():
            if not (self._attempts.path(name) / files.RESULT).exists():
                self.kill(name)

    def poll(self) -> Poll:
        """Statuses of all attempts; also kills processes that outlived their supervisor."""
        self._commands = None
        found = [self._status(name) for name in self._attempts.names()]
        self._reap()
        return Poll(
            attempts=[*self._attempts.refused(), *filter(None, found)], devices=self._devices
        )

    def close(self) -> None:
        """Close handles; supervisors and their attempts continue to run."""
        for handles in self._supervisors.values():
            for handle in handles:
                # The next daemon finds the supervisor by its folder. If this process lives on, the
                # thread prevents a zombie.
                threading.Thread(target=handle.wait, daemon=True).start()
        self._supervisors.clear()

    def _look_at(self, name: AttemptName, folder: Path) -> Status:
        lock = files.try_lock(folder)
        if lock is not None and self._is_supervised(name, folder):
            # It is about to begin or to exit, or a job put another file in place of its lock.
            os.close(lock)
            try:
                return self._look_at_supervised(name, folder)
            except DAMAGED:
                return Status(name=name, phase=RUNNING, detail="its files are damaged")
        if lock is None:
            return self._look_at_supervised(name, folder)
        with _closing(lock):
            result = None
            # Unreadable result: remaining processes are killed first, then the attempt is lost.
            with contextlib.suppress(*DAMAGED):
                result = files.read_result(folder)
            result = result or self._end_without_supervisor(name, folder)
            if result is None:
                has_begun = (folder / files.BEGUN).exists()
                return Status(name=name, phase=RUNNING if has_begun else STARTING)
            # On a full disk the result is determined again later, with the same outcome.
            with contextlib.suppress(OSError):
                files.write_result(folder, result)
            return ended(name, result)

    def _look_at_supervised(self, name: AttemptName, folder: Path) -> Status:
        # The supervisor has not ended its attempt in time, for example because it is stopped.
        if self._outlived_grace(name, folder, SUPERVISOR_DELAY_S):
            self._signal_supervisor(folder, signal.SIGKILL)
        self._fence_silent(name, folder)
        is_running = (folder / files.RUNNING).exists()
        return Status(name=name, phase=RUNNING if is_running else STARTING)

    def _is_supervised(self, name: AttemptName, folder: Path) -> bool:
        """True if a supervisor of an attempt runs, whatever jobs did to the files of its folder."""
        if name in self._supervisors:
            return any(handle.poll() is None for handle in self._supervisors[name])
        if _first_place(folder) != str(folder):
            # Of a state that was set aside: an attempt of the present one may have this name.
            return False
        # An earlier daemon started it. No supervisor without a handle can be new since the look.
        if self._commands is None:
            self._commands = [_command_of(one.pid) for one in system.processes()]
        return any(_supervises(command, folder) for command in self._commands)

    def _end_without_supervisor(self, name: AttemptName, folder: Path) -> Result | None:
        if (folder / files.BEGUN).exists():
            return self._sweep(folder)
        if (folder / files.STOP).exists():
            return Result(-signal.SIGTERM, "stopped before it began")
        if any(handle.poll() is None for handle in self._supervisors.get(name, ())):
            return None
        if self._num_supervisors.get(name, 0) >= MAX_SUPERVISORS:
            return Result(
                CANNOT_START, f"its supervisor could not be started: {_last_line(folder)}"
            )
        self._start_supervisor(name)
        return None

    def _sweep(self, folder: Path) -> Result | None:
        """Kill processes that a dead supervisor left; returns a result when none is found."""
        mark = files.mark_of(folder)
        group = _group_of(folder, mark)
        if group is not None:
            if not group.kill():
                return None
            group.remove()
        elif not system.end_marked(mark):
            return None
        detail = _last_line(folder) or "it was killed"
        return Result(-signal.SIGKILL, f"its supervisor died: {detail}", is_lost=True)

    def _fence_silent(self, name: AttemptName, folder: Path) -> None:
        """Kill a supervisor that has shown no heartbeat for too long."""
        beat, now_s = files.last_beat(folder), time.monotonic()
        before = self._silences.get(name)
        if before is None or before.beat != beat:
            self._silences[name] = _Silence(beat, 0.0, now_s)
            return
        silent_s = before.silent_s + min(now_s - before.looked_s, MAX_LOOK_S)
        self._silences[name] = _Silence(beat, silent_s, now_s)
        if silent_s > SILENCE_S:
            self._signal_supervisor(folder, signal.SIGKILL)

    def _signal_supervisor(self, folder: Path, number: signal.Signals) -> None:
        # A damaged file names no process that could be signalled.
        with contextlib.suppress(OSError, *DAMAGED):
            begun = files.read_json(folder / files.BEGUN)
            if begun is None or begun["boot"] != system.boot():
                return
            one = system.Process(begun["pid"], begun["start_ticks"], 0)
            if _supervises(_command_of(one.pid), folder):
                system.send(one, number)

    def _start_supervisor(self, name: AttemptName) -> None:
        folder = self._attempts.path(name)
        self._num_supervisors[name] = self._num_supervisors.get(name, 0) + 1
        complaints_end = open_plain(folder / COMPLAINTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(complaints_end, "ab") as complaints:
            handle = start_module(
                "hocket.service.executors.supervisor",
                [str(folder)],
                output=complaints,
                folder="/",
                environment=_for_supervisors(config.environment_anywhere()),
            )
        self._supervisors.setdefault(name, []).append(handle)

    def _reap(self) -> None:
        """Wait for ended supervisors, so that none stays as a zombie."""
        for name, handles in list(self._supervisors.items()):
            codes = [handle.poll() for handle in handles]
            if None not in codes and not self._attempts.path(name).exists():
                del self._supervisors[name]
                self._num_supervisors.pop(name, None)
        self._silences = {
            name: one for name, one in self._silences.items() if self._attempts.path(name).exists()
        }


def _command_of(pid: int) -> set[bytes]:
    """Words of the command line of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        return set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    return set()


def _supervises(command: set[bytes], folder: Path) -> bool:
    """True if this is the command line of the attempt's supervisor; its number in ``begun.json``
    can be forged."""
    return {b"hocket.service.executors.supervisor", _first_place(folder).encode()} <= command


def _first_place(folder: Path) -> str:
    """Path of an attempt's folder when it was made, before its state was perhaps set aside."""
    return re.sub("/damaged-[^/]*(?=/attempts/)", "", str(folder))


def _group_of(folder: Path, mark: str) -> Cgroup | None:
    """The control group of an attempt; None without a valid file.

    A job could write another group into the file, to have the processes of others killed.
    """
    with contextlib.suppress(*DAMAGED):
        content = files.read_json(folder / files.CGROUP)
        if content is not None:
            folders = {name: str(path) for name, path in dict(content["folders"]).items()}
            group = Cgroup(int(content["version"]), folders)
            return group if group.is_of(mark) else None
    return None


def _for_supervisors(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a supervisor, hardly more than that of its job.

    The job may be able to read it, so it must not contain secrets of the daemon.
    """
    wanted = INHERITED | {"PYTHONPATH"}
    return {
        name: text for name, text in environment.items() if name in wanted or name.startswith("LC_")
    }


def end_set_aside(state_folder: Path) -> None:
    """End attempts of states that were set aside, because their devices now belong to this
    fleet."""
    for folder in sorted(state_folder.glob("damaged-*/attempts")):
        if not _all_ended(LocalExecutor(folder, ())):
            raise RunError(
                "jobs of the state that was set aside cannot be ended",
                hint="end their processes, then serve again",
                where=str(folder),
            )


def _all_ended(executor: LocalExecutor) -> bool:
    for _ in range(MAX_END_LOOKS):
        executor.kill_all()
        if all(status.phase in (EXITED, LOST) for status in executor.poll().attempts):
            return True
        time.sleep(END_LOOK_S)
    return False


def _last_line(folder: Path) -> str:
    """Last line of a supervisor's errors; empty if there is none."""
    path = folder / COMPLAINTS
    with contextlib.suppress(OSError, IndexError), open(open_plain(path), errors="replace") as file:
        return file.read(1 << 20).strip().splitlines()[-1][:500]
    return ""


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)
