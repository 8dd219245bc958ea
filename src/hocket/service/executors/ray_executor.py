"""Runs attempts on a Ray cluster that exists already.

Orders and outcomes are files (`attempt_folder`), and a process of its own carries them out
(`ray_driver`): Ray ends processes that lose the cluster, and the daemon must not be one of them.
While the driver is away, what was known last is told for a while; then the devices are gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hocket.errors import MissingExtraError, RunError
from hocket.fleet.rounds.state import Device
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    STARTING,
    Assignment,
    AttemptName,
    Phase,
    Poll,
    Status,
)
from hocket.service.executors.ray_driver import ATTEMPTS, NEWS

FORGOTTEN = "forgotten"
REMOVED = "removed"
DRIVER_LOG = "driver.log"

FIRST_NEWS_S = 90.0
"""How long to wait for the cluster at the start."""
RESTART_S = 2.0
"""Least time between two starts of the driver."""

_NAME = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


class RayExecutor:
    """An `Executor` on Ray; ``folder`` is its own and holds its memory.

    ``address`` is that of the cluster's head as ``ray start`` prints it, ``ray://host:port`` or
    ``host:port`` (not that of a Ray Client server), or None for the cluster that Ray finds on this
    machine. No cluster is ever started here.
    """

    def __init__(
        self,
        address: str | None,
        folder: Path,
        *,
        log_limit_bytes: int = 1 << 30,
        patience_s: float = 30.0,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError("Ray is not installed", hint="pip install 'hocket[ray]'")
        self._address = (address or "auto").removeprefix("ray://")
        self._folder = Path(os.path.realpath(folder))
        for part in ("", ATTEMPTS, FORGOTTEN):
            (self._folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_limit_bytes = log_limit_bytes
        self._patience_s = patience_s
        self._driver: subprocess.Popen[bytes] | None = None
        self._started_s = float("-inf")
        self._news: dict[str, Any] = {}
        self._refused: dict[AttemptName, str] = {}
        self._join()

    def start(self, assignment: Assignment) -> None:
        """Begin an attempt, unless one of this name was begun, stopped or forgotten before."""
        name = assignment.name
        try:
            if name.attempt <= self._last_forgotten(name.job):
                self._refused[name] = "an attempt of this name, or a later one, ended before"
                return
            folder = self._path(name)
            folder.mkdir(mode=0o700, exist_ok=True)
            if not (folder / files.ASSIGNMENT).exists():
                assignment.work_folder.mkdir(parents=True, exist_ok=True)
                files.write_assignment(folder, assignment, log_limit_bytes=self._log_limit_bytes)
        except OSError as error:
            self._refused[name] = f"cannot be started: {error.strerror or error}"

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """Have an attempt ended; one that has not begun never will."""
        folder = self._path(name)
        if name.attempt <= self._last_forgotten(name.job) and not folder.exists():
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        earlier_s = files.asked_grace_s(folder)
        if earlier_s is None or grace_s < earlier_s:
            files.ask_to_stop(folder, grace_s)

    def kill(self, name: AttemptName) -> None:
        """End an attempt now."""
        self.stop(name, 0.0)

    def poll(self) -> Poll:
        """What the driver sees, or saw last."""
        # Results before devices: the driver writes them in the other order.
        results = {name: files.read_result(self._path(name)) for name in self._names()}
        self._look_after_driver()
        running = frozenset(self._news.get("running", ()))
        refused = [
            Status(name=name, phase=EXITED, exit_code=126, detail=detail)
            for name, detail in self._refused.items()
        ]
        known = [_status(name, result, str(name) in running) for name, result in results.items()]
        return Poll(attempts=[*refused, *known], devices=self._devices())

    def forget(self, name: AttemptName) -> None:
        """Remove the folder of an attempt that ended; its name stays refused."""
        self._refused.pop(name, None)
        if files.read_result(self._path(name)) is None:
            return
        if name.attempt > self._last_forgotten(name.job):
            files.write_json(self._folder / FORGOTTEN / str(name.job), {"attempt": name.attempt})
        # In one move: a folder that lost only its result would look like an attempt to begin.
        shutil.rmtree(self._folder / REMOVED, ignore_errors=True)
        os.replace(self._path(name), self._folder / REMOVED)
        shutil.rmtree(self._folder / REMOVED, ignore_errors=True)

    def close(self) -> None:
        """End the driver; attempts go on."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if driver.stdin is not None:
            driver.stdin.close()
        try:
            driver.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()

    # ── attempts ──

    def _path(self, name: AttemptName) -> Path:
        return self._folder / ATTEMPTS / str(name)

    def _names(self) -> list[AttemptName]:
        matches = (_NAME.fullmatch(entry) for entry in os.listdir(self._folder / ATTEMPTS))
        found = (AttemptName(int(match[1]), int(match[2])) for match in matches if match)
        return sorted(name for name in found if name not in self._refused)

    def _last_forgotten(self, job: int) -> int:
        content = files.read_json(self._folder / FORGOTTEN / str(job))
        return -1 if content is None else int(content["attempt"])

    # ── the driver ──

    def _join(self) -> None:
        """Wait for the first news, so that a cluster that is not there is told at once."""
        deadline_s = time.monotonic() + FIRST_NEWS_S
        self._start_driver()
        while "devices" not in self._news:
            self._read_news()
            driver = self._driver
            if driver is None or driver.poll() is not None or time.monotonic() > deadline_s:
                self._read_news()
                trouble = self._news.get("trouble") or self._last_words()
                self.close()
                raise RunError(
                    f"cannot join the Ray cluster {self._address!r}: {trouble}",
                    hint="give the address that 'ray start --head' printed, and make this machine"
                    " a node of the cluster with 'ray start --address=HOST:PORT'",
                )
            time.sleep(0.02)

    def _start_driver(self) -> None:
        self._started_s = time.monotonic()
        module = "hocket.service.executors.ray_driver"
        with open(self._folder / DRIVER_LOG, "wb") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(self._folder), self._address],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )

    def _look_after_driver(self) -> None:
        self._read_news()
        driver = self._driver
        is_gone = driver is None or driver.poll() is not None
        if is_gone and time.monotonic() > self._started_s + RESTART_S:
            self.close()
            self._start_driver()

    def _read_news(self) -> None:
        """Take the news of our own driver; those of an earlier one are old."""
        with contextlib.suppress(ValueError):
            news = files.read_json(self._folder / NEWS) or {}
            is_own = self._driver is not None and news.get("pid") == self._driver.pid
            if is_own and ("devices" in news or not self._news):
                self._news = news

    def _devices(self) -> tuple[Device, ...]:
        if time.monotonic() > self._news["told_s"] + self._patience_s:
            return ()
        return tuple(Device(**content) for content in self._news["devices"])

    def _last_words(self) -> str:
        lines = (self._folder / DRIVER_LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "its driver said nothing"


def _status(name: AttemptName, result: files.Result | None, is_running: bool) -> Status:
    if result is None:
        phase: Phase = RUNNING if is_running else STARTING
        return Status(name=name, phase=phase)
    if result.is_lost:
        return Status(name=name, phase=LOST, detail=result.detail)
    return Status(name=name, phase=EXITED, exit_code=result.exit_code, detail=result.detail)
