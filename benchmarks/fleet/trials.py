"""What trials that kill parts of a running fleet share: the service, its jobs, what they saw.

Workers hold a lock per device and per job, so that two at once would be seen, and write down where
they began. Used by ``workers.py``, ``ray_nodes.py`` and ``gpu_service.py``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.base.errors import HocketError
from hocket.processes import system
from hocket.service.client import FleetClient, find_service

PATIENCE_S = 300.0

_WORKER = """
import fcntl, json, os, sys, time
import hocket
round_steps, save_s, step_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
job, attempt = os.environ["HOCKET_JOB"], os.environ["HOCKET_ATTEMPT"]
def note(**what):
    with open("../../ledger", "a") as file:
        facts = {"job": int(job), "attempt": int(attempt), "time_s": time.time(), **what}
        file.write(json.dumps(facts) + "\\n")
names = [*os.environ["HOCKET_DEVICES"].split(","), "job" + job]
held = [open("../../lock-" + name.replace("/", "-"), "a") for name in names]
for file in held:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(what="double", lock=file.name)
def save(step):
    def write(folder):
        (folder / "step").write_text(str(step))
    return hocket.write_checkpoint("checkpoints", step, write)
mine = hocket.lease(save=save, save_every_s=save_s, report_every_s=save_s / 2)
start = 0 if mine.checkpoint is None else int(open(mine.checkpoint + "/step").read())
note(what="start", step=start)
progress = os.open("progress", os.O_WRONLY | os.O_CREAT)
for step in mine.steps(start, round_steps):
    time.sleep(step_s)
    os.pwrite(progress, b"%08d" % (step + 1), 0)
note(what="end")
"""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Jobs that are kept alive, and the rounds that they run in."""

    round_s: float
    step_s: float
    save_s: float
    num_steps: int
    num_live_jobs: int


class Fleet:
    """A service in a process of its own, and its state folder."""

    def __init__(self, folder: Path, load: Load, options: list[str]) -> None:
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        self.load = load
        self._worker = folder / "worker.py"
        self._worker.write_text(_WORKER)
        command = [sys.executable, "-m", "hocket", "fleet", "serve", "--state", str(self.state)]
        self._process = subprocess.Popen([*command, *options, "--round", str(load.round_s)])
        self.client: FleetClient = wait_until(lambda: connected(self.state), "the service answers")

    def keep_busy(self) -> list[dict[str, Any]]:
        """Submit jobs until enough are alive; those that are."""
        live = self.live_jobs()
        for _ in range(self.load.num_live_jobs - len(live)):
            self.submit()
        return live

    def submit(self) -> None:
        load = self.load
        numbers = [load.num_steps, load.save_s, load.step_s]
        command = [sys.executable, str(self._worker), *map(str, numbers)]
        self.client.submit(
            {"name": "worker", "command": command, "total_steps": load.num_steps, "grace_s": 5}
        )

    def jobs(self) -> list[dict[str, Any]]:
        return list(self.client.pages("/v1/jobs", "jobs"))

    def live_jobs(self) -> list[dict[str, Any]]:
        return [job for job in self.jobs() if job["ended_s"] is None]

    def ledger(self) -> list[dict[str, Any]]:
        path = self.state / "ledger"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def progress(self, job: int) -> int:
        path = self.state / "jobs" / str(job) / "progress"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for_end(self, job: int, attempt: int) -> None:
        """Until the service knows that an attempt is over."""

        def is_over() -> bool:
            attempts = self.client.get(f"/v1/jobs/{job}/attempts")["attempts"]
            return next(one for one in attempts if one["attempt"] == attempt)["ended_s"] is not None

        wait_until(is_over, f"attempt {attempt} of job {job} ended")

    def processes_left(self) -> int:
        """Workers that still run."""
        return sum(_is_worker(one.pid, str(self._worker)) for one in system.processes())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def _is_worker(pid: int, worker: str) -> bool:
    try:
        return worker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def connected(state: Path) -> FleetClient | None:
    """The service of a state folder, once it answers."""
    try:
        client = find_service(state)
        client.get("/v1/devices")
    except HocketError:
        return None
    return client


def wait_until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """What a condition says once it holds."""
    deadline_s = time.monotonic() + patience_s
    while not (answer := condition()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited in vain until {what}")
        time.sleep(0.05)
    return answer


def restarts(
    struck: list[dict[str, Any]], ledger: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Attempts that were struck, each with the beginning of the next, where that got so far."""
    starts = {(one["job"], one["attempt"]): one for one in ledger if one["what"] == "start"}
    pairs = [(one, starts.get((one["job"], one["attempt"] + 1))) for one in struck]
    return [(one, then) for one, then in pairs if then is not None]


def report(
    heading: tuple[str, object],
    struck: list[dict[str, Any]],
    jobs: list[dict[str, Any]],
    ledger: list[dict[str, Any]],
    num_left: int,
    load: Load,
) -> None:
    """Print the table; exits with 1 where a promise was broken."""
    begun = [(one["job"], one["attempt"]) for one in ledger if one["what"] == "start"]
    again = restarts(struck, ledger)
    lost = [max(one["reached"] - then["step"], 0) for one, then in again]
    back_s = [then["time_s"] - one["at_s"] for one, then in again]
    failed = [job for job in jobs if job["status"] != "succeeded"]
    num_twice = len(begun) - len(set(begun))
    doubles = [one for one in ledger if one["what"] == "double"]
    rows: list[tuple[str, object]] = [
        heading,
        ("jobs accepted, those that did not succeed", f"{len(jobs)}, {len(failed)}"),
        (f"attempts that ran twice, of {len(begun)}", num_twice),
        ("devices or jobs held by two", len(doubles)),
        ("processes left", num_left),
        (f"steps lost per attempt (a round has {load.round_s / load.step_s:.0f}), median and most",
         f"{statistics.median(lost):.0f}, {max(lost)}"),
        ("seconds until the attempt was known to be over, median and most",
         _median_and_most([one["over_s"] for one in struck])),
        ("seconds until the job ran again, median and most", _median_and_most(back_s)),
    ]  # fmt: skip
    for name, value in rows:
        print(f"| {name} | {value} |")
    if failed or num_twice or doubles or num_left:
        raise SystemExit(1)


def _median_and_most(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}, {max(values):.2f}"
