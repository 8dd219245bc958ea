"""kill -9 of random workers and supervisors of a fleet under load, through the real service.

    python benchmarks/fleet/workers.py [--trials 100] [--seed 0]

Starts ``hocket fleet serve`` on local devices with short rounds, keeps more jobs than devices alive
and kills either the command or the supervisor of a running attempt at a random moment, again and
again. Checked in the end: every accepted job succeeded, no device and no job was held by two, no
attempt ran twice, nothing is left running, and how much work was lost.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from trials import Fleet, Load, report, wait_until

from hocket.processes import system
from hocket.service.executors.attempt_folder import BEGUN, RUNNING, read_json

LOAD = Load(round_s=2.0, step_s=0.05, save_s=0.5, num_steps=80, num_live_jobs=6)


def victim_of(fleet: Fleet, job: dict[str, Any], who: str) -> system.Process | None:
    folder = fleet.state / "attempts" / f"{job['id']}-{job['attempt']}"
    told = read_json(folder / (BEGUN if who == "supervisor" else RUNNING))
    if told is None:
        return None
    found = told if who == "supervisor" else told["commands"][0]
    return system.Process(found["pid"], found["start_ticks"], 0)


def trial(fleet: Fleet, chance: random.Random) -> dict[str, Any]:
    """Kill somebody; how long until the attempt was known to be over."""
    while True:
        live = fleet.keep_busy()
        # A job is given up after its fifth failure, and rightly so.
        able = [job for job in live if job["status"] == "running" and job["failures"] < 4]
        time.sleep(chance.uniform(0.0, 0.3))
        if not able:
            continue
        job, who = chance.choice(able), chance.choice(["command", "supervisor"])
        victim = victim_of(fleet, job, who)
        reached = fleet.progress(job["id"])
        if victim is not None and system.send(victim, signal.SIGKILL):
            break
    at_s, began_s = time.time(), time.monotonic()
    struck = {"job": job["id"], "attempt": job["attempt"], "who": who, "reached": reached}
    fleet.wait_for_end(job["id"], job["attempt"])
    return {**struck, "at_s": at_s, "over_s": time.monotonic() - began_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        fleet = Fleet(Path(name), LOAD, ["--devices", "v100:2,p100:1"])
        try:
            kills = [trial(fleet, chance) for _ in range(arguments.trials)]
            wait_until(lambda: not fleet.live_jobs(), "all jobs ended")
            jobs, ledger, num_left = fleet.jobs(), fleet.ledger(), fleet.processes_left()
        finally:
            fleet.close()
    commands = sum(kill["who"] == "command" for kill in kills)
    heading = ("kill -9 of commands, of supervisors", f"{commands}, {len(kills) - commands}")
    report(heading, kills, jobs, ledger, num_left, LOAD)


if __name__ == "__main__":
    main()
