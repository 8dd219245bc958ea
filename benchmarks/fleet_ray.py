"""kill -9 of random nodes of a Ray cluster under a loaded fleet, through the real service.

    python benchmarks/fleet_ray.py [--trials 100] [--seed 0]

Starts a real Ray cluster (a head without devices and three nodes with two each) and
``hocket fleet serve --on ray``, keeps more jobs than devices alive, kills the raylet of a random
node that works at a random moment and starts a new node of that name; again and again. Workers hold
a lock per device and per job, so that two at once would be seen, and write down where they began.
Checked in the end: every accepted job succeeded, no device and no job was held by two, no attempt
ran twice, nothing is left running, and how much work was lost.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from service.ray_cluster import RayCluster, processes_with, ray_cluster

from hocket.errors import HocketError
from hocket.service.client import FleetClient, find_service

ROUND_S = 10.0
STEP_S = 0.1
SAVE_S = 1.0
NUM_STEPS = 100
NUM_LIVE_JOBS = 7
PATIENCE_S = 300.0
NODES = {"a": {"v100": 2}, "b": {"v100": 2}, "c": {"p100": 2}}

WORKER = f"""
import fcntl, json, os, sys, time
from hocket.service.checkpoint import write_checkpoint
from hocket.service.lease import lease
job, attempt = os.environ["HOCKET_JOB"], os.environ["HOCKET_ATTEMPT"]
def note(**what):
    with open("../../ledger", "a") as file:
        facts = {{"job": int(job), "attempt": int(attempt), "time_s": time.time(), **what}}
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
    return write_checkpoint("checkpoints", step, write)
mine = lease(save=save, save_every_s={SAVE_S}, report_every_s=0.5)
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
        options = ["--on", "ray", "--kinds", "v100,p100", "--round", str(ROUND_S)]
        self._process = subprocess.Popen([*command, *options])
        self.client: FleetClient = find_service(self.state)
        wait_until(self._answers, "the service answers")

    def _answers(self) -> bool:
        try:
            self.client.get("/v1/devices")
        except HocketError:
            return False
        return True

    def submit(self) -> None:
        command = [sys.executable, str(self._worker)]
        spec = {"name": "worker", "command": command, "total_steps": NUM_STEPS, "grace_s": 5}
        self.client.submit(spec)

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


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (answer := condition()):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited in vain until {what}")
        time.sleep(0.05)
    return answer


def trial(fleet: Fleet, cluster: RayCluster, chance: random.Random) -> list[dict[str, Any]]:
    """Kill a node; what became of the attempts on it."""
    while True:
        live = fleet.live_jobs()
        for _ in range(NUM_LIVE_JOBS - len(live)):
            fleet.submit()
        time.sleep(chance.uniform(0.0, 4.0))
        running = [job for job in fleet.live_jobs() if job["status"] in ("starting", "running")]
        nodes = sorted({device.split("/")[0] for job in running for device in job["devices"]})
        if nodes:
            break
    node = chance.choice(nodes)
    struck = [
        {"job": job["id"], "attempt": job["attempt"], "reached": fleet.progress(job["id"])}
        for job in running
        if any(device.startswith(f"{node}/") for device in job["devices"])
    ]
    began_s = time.monotonic()
    cluster.kill(node)
    for one in struck:
        number, attempt = one["job"], one["attempt"]
        one["at_s"] = time.time()
        wait_until(
            lambda number=number, attempt=attempt: fleet.attempt(number, attempt)["ended_s"],
            f"attempt {attempt} of job {number} ended",
        )
        one["over_s"] = time.monotonic() - began_s
    cluster.add(node, **NODES[node])
    return struck


def report(
    num_trials: int,
    struck: list[dict[str, Any]],
    jobs: list[dict[str, Any]],
    ledger: list[dict[str, Any]],
    num_left: int,
) -> None:
    starts = [(one["job"], one["attempt"]) for one in ledger if one["what"] == "start"]
    later = {(one["job"], one["attempt"]): one for one in ledger if one["what"] == "start"}
    pairs = [(one, later.get((one["job"], one["attempt"] + 1))) for one in struck]
    again = [(one, then) for one, then in pairs if then is not None]
    lost = [max(one["reached"] - then["step"], 0) for one, then in again]
    over_s = [one["over_s"] for one in struck]
    back_s = [then["time_s"] - one["at_s"] for one, then in again]
    rows = [
        ("nodes killed, attempts on them", f"{num_trials}, {len(struck)}"),
        ("jobs accepted", len(jobs)),
        ("jobs that did not succeed", sum(job["status"] != "succeeded" for job in jobs)),
        ("failures counted against jobs", sum(job["failures"] for job in jobs)),
        ("attempts started", len(starts)),
        ("attempts that ran twice", len(starts) - len(set(starts))),
        ("devices or jobs held by two", sum(one["what"] == "double" for one in ledger)),
        ("processes left", num_left),
        (f"steps lost per attempt (a round has {ROUND_S / STEP_S:.0f}), median and most",
         f"{statistics.median(lost):.0f}, {max(lost)}"),
        ("seconds until the attempt was known to be over, median and most",
         f"{statistics.median(over_s):.1f}, {max(over_s):.1f}"),
        ("seconds until the job ran again, median and most",
         f"{statistics.median(back_s):.1f}, {max(back_s):.1f}"),
    ]  # fmt: skip
    for what, value in rows:
        print(f"| {what} | {value} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    struck: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ray_cluster() as cluster:
        for node, devices in NODES.items():
            cluster.add(node, **devices)
        fleet = Fleet(Path(name))
        try:
            for number in range(1, arguments.trials + 1):
                struck += trial(fleet, cluster, chance)
                print(f"trial {number} of {arguments.trials}", file=sys.stderr, flush=True)
            wait_until(lambda: not fleet.live_jobs(), "all jobs ended")
            jobs, ledger = fleet.jobs(), fleet.ledger()
            left = processes_with(str(fleet.state / "jobs"))
        finally:
            fleet.close()
        report(arguments.trials, struck, jobs, ledger, len(left))


if __name__ == "__main__":
    main()
