"""Runs attempts as batch jobs of Slurm, each under a supervisor on the first of its nodes.

hocket decides, Slurm carries out: a job asks for exactly the nodes and slots of its attempt, once,
and its name (``hocket-JOB-ATTEMPT``) is looked up before it is submitted. The script of all jobs is
one constant; what to run stands in a folder (`attempt_folder`) on a file system that all nodes
share. How an attempt ended is told by its folder; Slurm tells what never got so far. A job that was
submitted twice, by a daemon that died in between, runs once: its second supervisor finds the first.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.errors import UsageError
from hocket.fleet.rounds.state import Device
from hocket.service.executors import attempt_folder as files
from hocket.service.executors import slurm_commands as slurm
from hocket.service.executors.attempt_folder import Order, Result
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
from hocket.service.executors.slurm_commands import Job, UnreachableError
from hocket.service.executors.slurm_nodes import Node, devices_per_node, parse_nodes

SUPERVISOR_DELAY_S = 15.0
"""A job that has not ended so long after its grace is ended by Slurm."""
LOCK_PATIENCE_S = 120.0
"""A machine that is gone loses its locks on a shared file system after so long."""
CANNOT_START = 126

_SCRIPT = '#!/bin/sh\nexec "$@"\n'
_SUBMITTED = "submitted.json"
"""In the folder of an attempt: Slurm took it, under this id."""
_GIVEN_UP = "given_up.json"
"""In the folder of an attempt: Slurm lost sight of it, so whatever ends it now is no failure."""
_FOLDER_NAME = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


class SlurmExecutor:
    """An `Executor` for a Slurm cluster; ``folder`` is its own and seen by all nodes.

    ``options`` are given to every sbatch (``--partition=...``); ``kinds`` are the features that
    name kinds of devices, where the first of a node does not.
    """

    def __init__(
        self,
        folder: Path,
        *,
        options: Sequence[str] = (),
        kinds: Collection[str] = (),
        log_limit_bytes: int = 1 << 30,
    ) -> None:
        slurm.require_slurm()
        self._folder = Path(os.path.realpath(folder))
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._forgotten = self._folder / "forgotten"
        self._forgotten.mkdir(exist_ok=True)
        self._script = self._folder / "batch.sh"
        self._script.write_text(_SCRIPT)
        self._fleet = _identity(self._folder)
        self._options = tuple(options)
        self._kinds = tuple(kinds)
        self._log_limit_bytes = log_limit_bytes
        self._nodes: dict[str, Node] = {}
        self._jobs: dict[AttemptName, list[Job]] = {}
        self._deadline_s: dict[AttemptName, float] = {}
        self._refused: dict[AttemptName, str] = {}

    def start(self, assignment: Assignment) -> None:
        """Submit an attempt, unless one of this name was submitted, stopped or forgotten before."""
        name = assignment.name
        folder = self._path(name)
        try:
            if name.attempt <= self._last_forgotten(name.job):
                self._refused[name] = "an attempt of this name, or a later one, ended before"
                return
            folder.mkdir(mode=0o700, exist_ok=True)
            if not (folder / files.ASSIGNMENT).exists():
                files.write_assignment(folder, assignment, log_limit_bytes=self._log_limit_bytes)
            # Where Slurm does not answer, the next poll tries again.
            with contextlib.suppress(UnreachableError):
                self._jobs = slurm.jobs_of(self._fleet)
                self._submit(name)
        except OSError as error:
            self._refused[name] = f"cannot be started: {error.strerror or error}"

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """Have an attempt ended; one that has not begun never will."""
        folder = self._path(name)
        if name.attempt <= self._last_forgotten(name.job) and not folder.exists():
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        earlier_s = files.asked_grace_s(folder)
        # Asked again, a supervisor has only what is left of the time that it was given first.
        if earlier_s is None or grace_s < earlier_s:
            files.ask_to_stop(folder, grace_s)
        deadline_s = time.monotonic() + grace_s + SUPERVISOR_DELAY_S
        self._deadline_s[name] = min(self._deadline_s.get(name, deadline_s), deadline_s)
        self._jobs = slurm.jobs_of(self._fleet)
        slurm.cancel_waiting(self._jobs.get(name, ()))
        slurm.ask_to_end(self._jobs.get(name, ()))

    def kill(self, name: AttemptName) -> None:
        """End an attempt now."""
        self.stop(name, 0.0)

    def poll(self) -> Poll:
        """What became of all attempts; raises `RunError` while Slurm does not answer."""
        self._jobs = slurm.jobs_of(self._fleet)
        self._nodes = parse_nodes(slurm.show_nodes(), self._kinds, self._nodes)
        refused = [
            Status(name=name, phase=EXITED, exit_code=CANNOT_START, detail=detail)
            for name, detail in self._refused.items()
        ]
        names = [name for name in self._names() if name not in self._refused]
        found = [self._status(name) for name in names]
        return Poll(attempts=[*refused, *filter(None, found)], devices=self._devices())

    def forget(self, name: AttemptName) -> None:
        """Remove the folder of an attempt that ended; its name stays refused."""
        self._refused.pop(name, None)
        self._deadline_s.pop(name, None)
        if name.attempt > self._last_forgotten(name.job):
            files.write_json(self._forgotten / str(name.job), {"attempt": name.attempt})
        shutil.rmtree(self._path(name), ignore_errors=True)

    def close(self) -> None:
        """Nothing is held: Slurm has the jobs."""

    # ── names ────────────────────────────────────────────────────────────────────────────────────

    def _path(self, name: AttemptName) -> Path:
        return self._folder / str(name)

    def _names(self) -> list[AttemptName]:
        matches = (_FOLDER_NAME.fullmatch(entry) for entry in os.listdir(self._folder))
        return sorted(AttemptName(int(match[1]), int(match[2])) for match in matches if match)

    def _last_forgotten(self, job: int) -> int:
        content = files.read_json(self._forgotten / str(job))
        return -1 if content is None else int(content["attempt"])

    def _devices(self) -> tuple[Device, ...]:
        return tuple(device for node in self._nodes.values() for device in node.devices)

    # ── jobs of Slurm ────────────────────────────────────────────────────────────────────────────

    def _submit(self, name: AttemptName) -> None:
        """Hand an attempt to Slurm where it is not there already; ``_jobs`` is fresh."""
        folder = self._path(name)
        if name in self._jobs or any((folder / mark).exists() for mark in _NEVER_AGAIN):
            return
        order = files.read_order(folder)
        if order is None:
            return
        per_node = devices_per_node(order.devices)
        if not self._nodes.keys() >= per_node.keys():
            self._nodes = parse_nodes(slurm.show_nodes(), self._kinds, self._nodes)
        obstacle = _obstacle(order, per_node, self._nodes)
        if obstacle is not None:
            files.write_result(folder, obstacle)
            return
        supervisor = [sys.executable, "-m", "hocket.service.executors.slurm_batch", str(folder)]
        try:
            number = slurm.submit(
                name,
                self._fleet,
                folder,
                slurm.parts_of(per_node, self._nodes),
                (*self._options, f"--signal=B:TERM@{max(round(order.grace_s), 1)}"),
                (str(self._script), *supervisor),
            )
        except UsageError as error:
            files.write_result(folder, Result(CANNOT_START, f"Slurm: {error.message}"))
            return
        files.write_json(folder / _SUBMITTED, {"id": number})

    def _status(self, name: AttemptName) -> Status | None:
        """Slurm was asked before the folder is looked at: the last word is the folder's."""
        folder = self._path(name)
        try:
            result = files.read_result(folder) or self._end(name, folder, self._jobs.get(name, []))
            if result is not None:
                return _told(name, result, files.read_json(folder / _GIVEN_UP))
            is_running = (folder / files.RUNNING).exists()
        except FileNotFoundError:
            return None
        return Status(name=name, phase=RUNNING if is_running else STARTING)

    def _end(self, name: AttemptName, folder: Path, jobs: list[Job]) -> Result | None:
        """The end of an attempt that did not write one itself; None where it goes on."""
        if any(not job.has_ended for job in jobs):
            self._hurry(name, folder, jobs)
            return None
        was_stopped = (folder / files.STOP).exists()
        if was_stopped and not (folder / files.BEGUN).exists():
            return _kept(folder, Result(-signal.SIGTERM, "stopped before it began"))
        if not jobs and not (folder / _SUBMITTED).exists():
            self._submit(name)
            return files.read_result(folder)
        state = jobs[0].state if jobs else "no longer known"
        if self._still_runs(name, folder, state):
            return None
        if was_stopped and not (folder / _GIVEN_UP).exists():
            return _kept(folder, Result(-signal.SIGKILL, f"ended by Slurm: {state}"))
        files.ask_to_stop(folder, 0.0)
        return _kept(folder, Result(-signal.SIGKILL, f"lost by Slurm: {state}", is_lost=True))

    def _still_runs(self, name: AttemptName, folder: Path, state: str) -> bool:
        """Whether an attempt that Slurm does not run any more lives on; it is asked to end.

        Devices of a node that failed are given to nobody, so nobody need wait for it. Elsewhere
        the supervisor's lock tells, which a machine that is gone holds for a while.
        """
        if state == "NODE_FAIL" or not _is_locked(folder):
            return False
        if not (folder / _GIVEN_UP).exists():
            files.write_json(folder / _GIVEN_UP, {"detail": f"lost by Slurm: {state}"})
            files.ask_to_stop(folder, 0.0)
        now_s = time.monotonic()
        return now_s < self._deadline_s.setdefault(name, now_s + LOCK_PATIENCE_S)

    def _hurry(self, name: AttemptName, folder: Path, jobs: list[Job]) -> None:
        """Have Slurm end what did not do as it was asked in time."""
        grace_s = files.asked_grace_s(folder)
        if grace_s is None:
            return
        now_s = time.monotonic()
        if now_s > self._deadline_s.setdefault(name, now_s + grace_s + SUPERVISOR_DELAY_S):
            slurm.cancel(jobs)


_NEVER_AGAIN = (_SUBMITTED, files.BEGUN, files.STOP, files.RESULT)
"""Files of an attempt that must not be submitted."""


def _identity(folder: Path) -> str:
    """What tells jobs of this fleet from those of another, for as long as its folder is there."""
    path = folder / "fleet.json"
    content = files.read_json(path)
    if content is None:
        content = {"id": f"hocket-{secrets.token_hex(8)}"}
        files.write_json(path, content)
    return str(content["id"])


def _obstacle(
    order: Order, per_node: Mapping[str, int], nodes: Mapping[str, Node]
) -> Result | None:
    """Why an attempt cannot be given to Slurm; lost where another node would do."""
    for node, count in per_node.items():
        if node not in nodes:
            return Result(CANNOT_START, f"node {node!r} does not work now", is_lost=True)
        if count > nodes[node].num_devices:
            return Result(CANNOT_START, f"node {node!r} has not so many devices", is_lost=True)
    if len(per_node) > 1 and order.processes == "per-device":
        hint = 'use processes = "one" and srun'
        return Result(CANNOT_START, f"no process per device on several nodes of Slurm: {hint}")
    return None


def _kept(folder: Path, result: Result) -> Result:
    files.write_result(folder, result)
    return result


def _is_locked(folder: Path) -> bool:
    """Whether the supervisor of an attempt lives."""
    lock = files.try_lock(folder)
    if lock is not None:
        os.close(lock)
    return lock is None


def _told(name: AttemptName, result: Result, given_up: Mapping[str, Any] | None) -> Status:
    if result.is_lost or (given_up is not None and result.exit_code != 0):
        detail = str((given_up or {}).get("detail", result.detail))
        return Status(name=name, phase=LOST, detail=detail)
    return Status(name=name, phase=EXITED, exit_code=result.exit_code, detail=result.detail)
