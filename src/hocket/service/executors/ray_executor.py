"""Runs attempts on a Ray cluster that exists already.

Orders and outcomes are files (`attempt_folder`), and a process of its own executes them
(`ray_driver`): Ray ends processes that lose the cluster, and the daemon must not be one of them.
While the driver is away, the last known state is reported for a while; then the devices are gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from hocket.base.errors import MissingExtraError, RunError
from hocket.fleet.rounds.state import FleetDevice
from hocket.processes.start import start_module
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.attempt_folder import DAMAGED, Result
from hocket.service.executors.attempts import CANNOT_START, Attempts, ended
from hocket.service.executors.executor import (
    RUNNING,
    STARTING,
    Assignment,
    AttemptName,
    Poll,
    Status,
)
from hocket.service.executors.ray_driver import ATTEMPTS, NEWS

DRIVER_LOG = "driver.log"

FIRST_NEWS_S = 90.0
"""Time to wait for the cluster at the start."""
RESTART_S = 2.0
"""Least time between two starts of the driver."""


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
        self._attempts = Attempts(self._folder / ATTEMPTS, log_limit_bytes, memory=self._folder)
        self._patience_s = patience_s
        self._driver: subprocess.Popen[bytes] | None = None
        self._started_s = float("-inf")
        self._news: dict[str, Any] = {}
        self._join()

    def start(self, assignment: Assignment) -> None:
        """Begin an attempt, unless one of this name was begun, stopped or forgotten before."""
        self._attempts.accept(assignment)

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """Have an attempt ended; one that has not begun never will."""
        self._attempts.ask_to_stop(name, grace_s)

    def kill(self, name: AttemptName) -> None:
        """End an attempt now."""
        self.stop(name, 0.0)

    def poll(self) -> Poll:
        """Statuses and devices by the driver's last news."""
        # Results before devices: the driver writes them in the other order.
        results = {name: self._result(name) for name in self._attempts.names()}
        self._look_after_driver()
        known = [self._status(name, result) for name, result in results.items()]
        return Poll(attempts=[*self._attempts.refused(), *known], devices=self._devices())

    def forget(self, name: AttemptName) -> None:
        """Remove the folder of an attempt that ended; its name stays refused."""
        self._attempts.forget(name, self._status(name, self._result(name)))

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

    def _result(self, name: AttemptName) -> Result | None:
        try:
            return files.read_result(self._attempts.path(name))
        except OSError:
            # Not knowing is no reason to give its devices away.
            return None
        except DAMAGED:
            return Result(CANNOT_START, "its files are damaged", is_lost=True)

    def _status(self, name: AttemptName, result: Result | None) -> Status:
        if result is not None:
            return ended(name, result)
        is_running = str(name) in self._news.get("running", ())
        return Status(name=name, phase=RUNNING if is_running else STARTING)

    # ── the driver ──

    def _join(self) -> None:
        """Wait for the first news, so that a missing cluster is reported at once."""
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
        with open(self._folder / DRIVER_LOG, "wb") as log:
            self._driver = start_module(
                "hocket.service.executors.ray_driver",
                [str(self._folder), self._address],
                output=log,
                stdin=subprocess.PIPE,
                folder="/",
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

    def _devices(self) -> tuple[FleetDevice, ...]:
        if time.monotonic() > self._news["told_s"] + self._patience_s:
            return ()
        return tuple(FleetDevice(**content) for content in self._news["devices"])

    def _last_words(self) -> str:
        lines = (self._folder / DRIVER_LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "its driver said nothing"
