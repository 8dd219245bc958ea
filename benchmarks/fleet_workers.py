"""kill -9 of random workers and supervisors of a fleet under load, through the real service.

    python benchmarks/fleet_workers.py [--trials 100] [--seed 0]

Starts ``hocket fleet serve`` on local devices with short rounds, keeps more jobs than devices alive
and kills either the command or the supervisor of a running attempt at a random moment, again and
again. Workers hold a lock per device and per job, so that two at once would be seen, and write down
where they began. Checked in the end: every accepted job succeeded, no device and no job was held by
two, no attempt ran twice, nothing is left running, and how much work was lost.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hocket.service.client import FleetClient, find_service
from hocket.service.executors import processes
from hocket.service.executors.attempt_folder import BEGUN, RUNNING, read_json

ROUND_S = 2.0
STEP_S = 0.05
SAVE_S = 0.5
NUM_STEPS = 80
NUM_LIVE_JOBS = 6
PATIENCE_S = 180.0

WORKER = f"""
import fcntl, json, os, sys, time
from hocket.service.checkpoint import write_checkpoint
from hocket.service.lease import lease
job, attempt = os.environ["HOCKET_JOB"], os.environ["HOCKET_ATTEMPT"]
def note(**what):
    with open("../../ledger", "a") as file:
        file.write(json.dumps({{"job": int(job), "attempt": int(attempt), **what}}) + "\\n")
names = [*os.environ["HOCKET_DEVICES"].split(","), "job" + job]
held = [open(f"../../locks-{{name}}", "a") for name in names]
for file in held:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(what="double", lock=file.name)
def save(step):
    def write(folder):
        (folder / "step").write_text(str(step))
    return write_checkpoint("checkpoints", step, write)
mine = lease(save=save, save_every_s={SAVE_S}, report_every_s=0.2)
start = 0 if mine.checkpoint is None else int(open(mine.checkpoint + "/step").read())
note(what="start", step=start)
progress = os.open("progress", os.O_WRONLY | os.O_CREAT)
for step in mine.steps(start, {NUM_STEPS}):
    time.sleep({STEP_S})
    os.pwrite(progress, b"%08d" % (step + 1), 0)
note(what="end")
"""


class Fleet:
    """A service in a process of its own, and its state folder."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        self._worker = folder / "worker.py"
        self._worker.write_text(WORKER)
        command = [sys.executable, "-m", "hocket", "fleet", "serve", "--state", str(self.state)]
        options = ["--devices", "v100:2,p100:1", "--round", str(ROUND_S), "--json"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.client: FleetClient = find_service(self.state)

    def submit(self) -> int:
        command = [sys.executable, str(self._worker)]
        spec = {"name": "worker", "command": command, "total_steps": NUM_STEPS, "grace_s": 5}
        return int(self.client.submit(spec)["id"])

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

    def attempt(self, job: int, attempt: int) -> dict[str, Any]:
        attempts = self.client.get(f"/v1/jobs/{job}/attempts")["attempts"]
        return next(one for one in attempts if one["attempt"] == attempt)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def wait_until(condition: Any, what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (answer := condition()):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited in vain until {what}")
        time.sleep(0.02)
    return answer


def victim_of(fleet: Fleet, job: dict[str, Any], who: str) -> processes.Process | None:
    folder = fleet.state / "attempts" / f"{job['id']}-{job['attempt']}"
    told = read_json(folder / (BEGUN if who == "supervisor" else RUNNING))
    if told is None:
        return None
    found = told if who == "supervisor" else told["commands"][0]
    return processes.Process(found["pid"], found["start_ticks"], 0)


def trial(fleet: Fleet, chance: random.Random) -> dict[str, Any]:
    """Kill somebody; how long until the attempt was known to be over."""
    while True:
        live = fleet.live_jobs()
        for _ in range(NUM_LIVE_JOBS - len(live)):
            fleet.submit()
        # A job is given up after its fifth failure, and rightly so.
        able = [job for job in live if job["status"] == "running" and job["failures"] < 4]
        time.sleep(chance.uniform(0.0, 0.3))
        if not able:
            continue
        job, who = chance.choice(able), chance.choice(["command", "supervisor"])
        victim = victim_of(fleet, job, who)
        reached = fleet.progress(job["id"])
        if victim is not None and processes.send(victim, signal.SIGKILL):
            break
    since_s = time.monotonic()
    number, attempt = job["id"], job["attempt"]
    wait_until(lambda: fleet.attempt(number, attempt)["ended_s"], f"{number}-{attempt} ended")
    over_s = time.monotonic() - since_s
    return {"job": number, "attempt": attempt, "who": who, "reached": reached, "over_s": over_s}


def lost_steps(kills: list[dict[str, Any]], ledger: list[dict[str, Any]]) -> list[int]:
    """Steps that had to be done again after each kill."""
    starts = {(one["job"], one["attempt"]): one["step"] for one in ledger if one["what"] == "start"}
    again = [(kill, starts.get((kill["job"], kill["attempt"] + 1))) for kill in kills]
    return [max(kill["reached"] - start, 0) for kill, start in again if start is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        fleet = Fleet(Path(name))
        try:
            kills = [trial(fleet, chance) for _ in range(arguments.trials)]
            wait_until(lambda: not fleet.live_jobs(), "all jobs ended")
            jobs, ledger = fleet.jobs(), fleet.ledger()
        finally:
            fleet.close()
        report(kills, jobs, ledger, Path(name))


def report(
    kills: list[dict[str, Any]],
    jobs: list[dict[str, Any]],
    ledger: list[dict[str, Any]],
    fleet_folder: Path,
) -> None:
    starts = [(one["job"], one["attempt"]) for one in ledger if one["what"] == "start"]
    lost = lost_steps(kills, ledger)
    over_s = sorted(kill["over_s"] for kill in kills)
    left = [one for one in processes.processes() if _is_worker(one.pid, str(fleet_folder))]
    rows = [
        ("kills (commands, supervisors)", _kinds(kills)),
        ("jobs accepted", len(jobs)),
        ("jobs that did not succeed", sum(job["status"] != "succeeded" for job in jobs)),
        ("attempts started", len(starts)),
        ("attempts that ran twice", len(starts) - len(set(starts))),
        ("devices or jobs held by two", sum(one["what"] == "double" for one in ledger)),
        ("processes left", len(left)),
        ("steps lost per kill, median and most", f"{statistics.median(lost):.0f}, {max(lost)}"),
        ("steps of a round", f"{ROUND_S / STEP_S:.0f}"),
        ("seconds from kill to known end, median and most",
         f"{statistics.median(over_s):.2f}, {over_s[-1]:.2f}"),
    ]  # fmt: skip
    for what, value in rows:
        print(f"| {what} | {value} |")


def _kinds(kills: list[dict[str, Any]]) -> str:
    commands = sum(kill["who"] == "command" for kill in kills)
    return f"{len(kills)} ({commands}, {len(kills) - commands})"


def _is_worker(pid: int, folder: str) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(one.startswith(folder.encode()) and one.endswith(b"worker.py") for one in arguments)


if __name__ == "__main__":
    main()
