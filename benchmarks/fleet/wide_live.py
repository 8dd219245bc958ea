"""A job of four devices among a stream of jobs of one, on the real daemon and local processes.

    python benchmarks/fleet/wide_live.py [--runs 20] [--policy las] [--seconds 300]

Each run serves four devices with rounds of half a second. Jobs of one device sleep for 0.3 to
0.9 s, have a time limit of 2 s, may not be stopped, and come faster than they end. After 3 s a job
of all four devices comes; devices are reserved for it after a wait of 1 s. Prints when it was told
to start at the latest, when it started, and how many later jobs overtook it. A run in which it
starts later than told has failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from hocket.fleet.rounds import FleetDevice, Rules
from hocket.service.daemon import Daemon
from hocket.service.executors.local import LocalExecutor
from hocket.service.spec import JobSpec
from hocket.service.store import Store

DEVICES = tuple(
    FleetDevice(name=f"v100-{at}", device_type="v100", server="here") for at in range(4)
)
LIMIT_S, GIVE_UP_S = 2.0, 60.0


def _sleeps(seconds: float, **more: object) -> JobSpec:
    command = (sys.executable, "-S", "-c", f"import time; time.sleep({seconds})")
    values = {"time_limit_s": LIMIT_S, "grace_s": 1.0, **more}
    return JobSpec(name="sleep", command=command, **values)  # type: ignore[arg-type]


def _reserved_s(daemon: Daemon, number: int) -> float:
    rows = daemon.state.jobs.rows
    found = rows["reserved_s"][rows["number"] == number]
    return float(found[0]) if len(found) else 0.0


def run(seed: int, policy: str) -> bool:
    """One run; True if the wide job started in time."""
    source = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "state")
        executor = LocalExecutor(Path(folder) / "state" / "attempts", DEVICES)
        rules = Rules(policy=policy, round_s=0.5, reserve_after_s=1.0)
        daemon = Daemon(store, executor, rules, ("v100",), poll_s=0.05)
        daemon.start()
        try:
            return _watched(daemon, source, seed)
        finally:
            for number in list(daemon.service_state.jobs):
                daemon.change("cancel", number)
            while daemon.service_state.attempts:
                time.sleep(0.05)
            daemon.close()
            executor.close()
            store.close()


def _watched(daemon: Daemon, source: random.Random, seed: int) -> bool:
    began_s, wide, told_s = time.monotonic(), 0, 0.0
    while time.monotonic() - began_s < GIVE_UP_S:
        daemon.submit(_sleeps(source.uniform(0.3, 0.9)))
        if not wide and time.monotonic() - began_s > 3.0:
            wide = daemon.submit(_sleeps(0.2, gang=4)).number
        if wide:
            told_s = told_s or _reserved_s(daemon, wide)
            record = daemon.job(wide)
            if record.started_s is not None:
                others = daemon.store.jobs(wide, 10_000)
                overtook = sum(
                    one.started_s is not None and one.started_s < record.started_s for one in others
                )
                waited_s, told_in_s = (
                    record.started_s - record.submitted_s,
                    told_s - record.submitted_s,
                )
                is_in_time = told_s == 0.0 or record.started_s <= told_s
                print(
                    f"run {seed:2}: started after {waited_s:5.2f} s, told at the latest "
                    f"{told_in_s:5.2f} s, {overtook} overtook: {'ok' if is_in_time else 'LATE'}",
                    flush=True,
                )
                return is_in_time
        time.sleep(source.uniform(0.02, 0.12))
    print(f"run {seed:2}: never started, told {told_s}", flush=True)
    return False


def main() -> None:
    """Run several times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--policy", default="las")
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    began_s, results = time.monotonic(), []
    for seed in range(options.runs):
        if time.monotonic() - began_s < options.seconds:
            results.append(run(seed, options.policy))
    print(f"{sum(results)} of {len(results)} runs in time")


if __name__ == "__main__":
    main()
