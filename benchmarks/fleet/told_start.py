"""When `explain` says that a waiting job will start, and when it does, in a live service.

    python benchmarks/fleet/told_start.py [--jobs 8] [--round 2] [--policy las]

A service with two devices runs jobs that can be stopped and go on where they were: each counts ten
steps a second, as its file says, and takes 6 to 20 s alone. They come two seconds apart; whoever
must wait asks at once. Printed: what was told, what came true, and how many were within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

JOB = """
import pathlib, sys, time
total, kept = int(sys.argv[1]), pathlib.Path(sys.argv[2])
step = int(kept.read_text()) if kept.exists() else 0
with open(kept.with_suffix(".starts"), "a") as starts:
    starts.write(f"{time.time()}\\n")
while step < total:
    time.sleep(0.1)
    step += 1
    kept.write_text(str(step))
"""


def hocket(state: Path, *words: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    command = (sys.executable, "-m", "hocket", "fleet", *words, "--state", str(state), "--json")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"hocket fleet {' '.join(words)}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def job_file(folder: Path, number: int, steps: int) -> Path:
    """A job that counts."""
    (folder / "job.py").write_text(JOB)
    kept = folder / f"job{number}.step"
    path = folder / f"job{number}.toml"
    path.write_text(
        f'name = "job {number}"\ncommand = ["{sys.executable}", "{folder / "job.py"}", "{steps}", '
        f'"{kept}"]\nresume = ["again"]\ntotal_steps = {steps}\n[throughputs]\nv100 = 10.0\n'
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--round", type=float, default=2.0)
    parser.add_argument("--policy", default="las")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        state = folder / "state"
        serve = (
            sys.executable, "-m", "hocket", "fleet", "serve", "--devices", "v100:2", "--state",
            str(state), "--round", str(options.round), "--policy", options.policy, "--port", "0",
        )  # fmt: skip
        with (folder / "serve.log").open("w") as log:
            service = subprocess.Popen(serve, stdout=log, stderr=log)
        try:
            while "serving" not in (folder / "serve.log").read_text().lower():
                if service.poll() is not None:
                    raise SystemExit((folder / "serve.log").read_text())
                time.sleep(0.2)
            rows = told_and_true(state, folder, random, options)
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait()
    off = [true_s - told_s for told_s, true_s in rows]
    print("| told to wait, s | waited, s |\n|---|---|")
    for told_s, true_s in rows:
        print(f"| {told_s:.1f} | {true_s:.1f} |")
    within = sum(abs(each) <= options.round for each in off)
    load = os.getloadavg()[0]
    print(f"\n{within} of {len(off)} within a round of {options.round:g} s, load {load:.1f}")


def told_and_true(
    state: Path, folder: Path, random: np.random.Generator, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds that each waiting job was told to wait, and that it waited."""
    told: dict[int, tuple[float, float]] = {}
    for number in range(options.jobs):
        steps = int(random.integers(60, 200))
        made = hocket(state, "submit", str(job_file(folder, number, steps)))
        asked_s = time.time()
        start_s = hocket(state, "explain", str(made["id"]))["estimated_start_s"]
        if start_s is not None:
            told[number] = (asked_s, start_s - made["submitted_s"])
        time.sleep(2.0)
    starts = {number: folder / f"job{number}.starts" for number in told}
    stop_s = time.time() + 300
    while not all(path.exists() for path in starts.values()) and time.time() < stop_s:
        time.sleep(0.5)
    return [
        (wait_s, float(starts[number].read_text().split()[0]) - asked_s)
        for number, (asked_s, wait_s) in told.items()
        if starts[number].exists()
    ]


if __name__ == "__main__":
    main()
