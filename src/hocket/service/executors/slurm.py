"""Runs attempts as batch jobs of Slurm, each under a supervisor on the first of its nodes.

hocket decides, Slurm executes. A Slurm job requests exactly the nodes and slots of its attempt,
once, and its name (``hocket-JOB-ATTEMPT``) is looked up before it is submitted. The script of all
jobs is one constant; what to run is in a folder (`attempt_folder`) on a file system that all nodes
share. The end of an attempt is read from its folder, or from Slurm if it never started. A job that
was submitted twice, by a daemon that died in between, runs once: its second supervisor finds the
first.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hocket.base.errors import UsageError
from hocket.fleet.rounds.state import FleetDevice
from hocket.service.executors import attempt_folder as files
from hocket.service.executors import slurm_commands as slurm
from hocket.service.executors.attempt_folder import Result
from hocket.service.executors.attempts import (
    CANNOT_START,
    Attempts,
    ended,
    is_locked,
)
from hocket.service.executors.executor import (
    RUNNING,
    STARTING,
    Assignment,
    AttemptName,
    Poll,
    Status,
)
from hocket.service.executors.folders import FolderExecutor
from hocket.service.executors.slurm_commands import SlurmJob, SlurmUnreachableError
from hocket.service.executors.slurm_nodes import SlurmNode, devices_per_node, parse_nodes

SUPERVISOR_DELAY_S = 15.0
"""Seconds after the grace at which Slurm is asked to end a job that has not ended."""
LOCK_PATIENCE_S = 120.0
"""Seconds after which a shared file system releases the locks of a machine that is gone."""
ASK_EVERY_S = 2.0
"""Interval between queries for jobs and nodes."""

_SCRIPT = '#!/bin/sh\nexec "$@"\n'
_SUBMITTED = "submitted.json"
"""File in the folder of an attempt that Slurm accepted; it contains the Slurm job id."""
_GIVEN_UP = "given_up.json"
"""File in the folder of an attempt that Slurm lost: however it ends now, it has not failed."""


class SlurmExecutor(FolderExecutor):
    """An `Executor` for a Slurm cluster; ``folder`` belongs to it alone and is visible to all
    nodes.

    ``device_types`` are the node features that name device types; by default the first feature
    does. Other options of sbatch come from its own variables, such as ``SBATCH_PARTITION``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device_types: Collection[str] = (),
        log_limit_bytes: int = 1 << 30,
    ) -> None:
        slurm.require_slurm()
        folder = Path(os.path.realpath(folder))
        super().__init__(Attempts(folder, log_limit_bytes))
        self._script = folder / "batch.sh"
        self._script.write_text(_SCRIPT)
        self._fleet = _identity(folder)
        self._device_types = tuple(device_types)
        self._nodes: dict[str, SlurmNode] = {}
        self._jobs: dict[AttemptName, list[SlurmJob]] = {}
        self._asked_s = -math.inf

    def start(self, assignment: Assignment) -> None:
        """Submit an attempt, unless one of this name was submitted, stopped or forgotten before."""
        if not self._attempts.accept(assignment):
            return
        # If Slurm does not respond, the next poll tries again.
        with contextlib.suppress(SlurmUnreachableError):
            self._submit(assignment.name)

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """End an attempt within ``grace_s``; one that has not begun never will."""
        if not self._attempts.ask_to_stop(name, grace_s):
            return
        self._end_within(name, grace_s + SUPERVISOR_DELAY_S)
        jobs = slurm.jobs_of(self._fleet).get(name, ())
        slurm.cancel_waiting(jobs)
        slurm.ask_to_end(jobs)

    def poll(self) -> Poll:
        """Statuses of all attempts; raises `RunError` while Slurm does not respond.

        Folders are read at every poll. Slurm is queried less often, because it serves others too.
        """
        if time.monotonic() >= self._asked_s + ASK_EVERY_S:
            self._jobs = slurm.jobs_of(self._fleet)
            self._nodes = parse_nodes(slurm.show_nodes(), self._device_types, self._nodes)
            self._asked_s = time.monotonic()
        found = [self._status(name) for name in self._attempts.names()]
        return Poll(
            attempts=[*self._attempts.refused(), *filter(None, found)], devices=self._devices()
        )

    def close(self) -> None:
        """Do nothing: jobs continue in Slurm."""

    def _devices(self) -> tuple[FleetDevice, ...]:
        return tuple(device for node in self._nodes.values() for device in node.devices)

    # ── jobs of Slurm ────────────────────────────────────────────────────────────────────────────

    def _submit(self, name: AttemptName) -> None:
        """Submit an attempt to Slurm if it has no job there yet."""
        folder = self._attempts.path(name)
        order = files.read_assignment(folder)
        if order is None or any((folder / mark).exists() for mark in _NEVER_AGAIN):
            return
        if name in slurm.jobs_of(self._fleet):
            return
        per_node = devices_per_node(order.devices)
        if not self._nodes.keys() >= per_node.keys():
            self._nodes = parse_nodes(slurm.show_nodes(), self._device_types, self._nodes)
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
                [f"--signal=B:TERM@{max(round(order.grace_s), 1)}"],
                (str(self._script), *supervisor),
            )
        except UsageError as error:
            files.write_result(folder, Result(CANNOT_START, f"Slurm: {error.message}"))
            return
        files.write_json(folder / _SUBMITTED, {"id": number})
        # The earlier answer of Slurm does not contain this job, which must not look like a lost
        # job.
        self._asked_s = -math.inf

    def _look_at(self, name: AttemptName, folder: Path) -> Status:
        """Status from the folder, else from the answer of Slurm, which is older."""
        result = files.read_result(folder) or self._end(name, folder, self._jobs.get(name, []))
        if result is not None:
            return _status_of(name, result, files.read_json(folder / _GIVEN_UP))
        is_running = (folder / files.RUNNING).exists()
        return Status(name=name, phase=RUNNING if is_running else STARTING)

    def _end(self, name: AttemptName, folder: Path, jobs: list[SlurmJob]) -> Result | None:
        """Result of an attempt that wrote none itself; None while it runs."""
        if any(not job.has_ended for job in jobs):
            if self._outlived_grace(name, folder, SUPERVISOR_DELAY_S):
                slurm.cancel(jobs)
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
        """True if an attempt still runs although Slurm has given it up; it is asked to stop.

        Devices of a failed node are given to nobody, so nothing has to wait for it. Otherwise the
        supervisor's lock decides, which stays held for a while if its machine is gone.
        """
        if state == "NODE_FAIL" or not is_locked(folder):
            return False
        if not (folder / _GIVEN_UP).exists():
            files.write_json(folder / _GIVEN_UP, {"detail": f"lost by Slurm: {state}"})
            files.ask_to_stop(folder, 0.0)
        return not self._is_past_deadline(name, LOCK_PATIENCE_S)


_NEVER_AGAIN = (_SUBMITTED, files.BEGUN, files.STOP, files.RESULT)
"""Files whose presence means that an attempt must not be submitted (again)."""


def _identity(folder: Path) -> str:
    """Identity of this fleet's jobs, which lasts as long as its folder."""
    path = folder / "fleet.json"
    content = files.read_json(path)
    if content is None:
        content = {"id": f"hocket-{secrets.token_hex(8)}"}
        files.write_json(path, content)
    return str(content["id"])


def _obstacle(
    order: Assignment, per_node: Mapping[str, int], nodes: Mapping[str, SlurmNode]
) -> Result | None:
    """Reason why an attempt cannot be submitted; "lost" if another node would do."""
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


def _status_of(name: AttemptName, result: Result, given_up: Mapping[str, Any] | None) -> Status:
    # An attempt that was asked to end because Slurm had given it up is not done, even if it obeyed
    # well.
    if given_up is not None and (result.exit_code != 0 or result.was_asked):
        result = result._replace(is_lost=True, detail=str(given_up["detail"]))
    return ended(name, result)
