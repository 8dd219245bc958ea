"""Seconds until all processes of `hocket launch` are gone after one of its ranks is killed.

    PYTHONPATH=src:tests python benchmarks/runtime/launch_kills.py [--kills 20]

A training of two ranks is launched again and again, a rank is killed (SIGKILL) at another moment of
its steps each time, the first and the second in turns. Prints the seconds from the kill until the
command has ended and no process of it is left, its exit code, and whether it named the rank and the
last checkpoint loads.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from hocket.runtime.checkpoint import read_state

SCRIPT = Path(__file__).parents[2] / "examples/train_ranks.py"


def killed(folder: Path, number: int) -> tuple[float, bool]:
    """Seconds until all were gone, and whether all was as it must be."""
    saved = folder / f"killed-{number}"
    command = [sys.executable, "-m", "hocket", "launch", str(folder / "plan.json"), str(SCRIPT)]
    more = ["--steps", "1000000", "--save", str(saved), "--every", "2"]
    launched = subprocess.Popen(
        [*command, *more], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launched.stdout is not None
    next(line for line in launched.stdout if f" step {3 + number % 4}:" in line)
    children = psutil.Process(launched.pid).children(recursive=True)
    ranks = [c for c in children if "hocket.runtime.rank_script" in c.cmdline()]
    victim = next(rank for rank in ranks if rank.environ()["RANK"] == str(number % 2))
    time.sleep(0.003 * number)
    os.kill(victim.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    _, said = launched.communicate()
    psutil.wait_procs(children)
    seconds = time.monotonic() - killed_s
    last = max(saved.glob("step-*"), key=lambda path: int(path.name[5:]))
    is_whole = read_state(last)["loop"]["num_steps"] == int(last.name[5:])
    is_named = f"rank {number % 2} (gpu{number % 2}) was killed by signal 9 (SIGKILL)" in said
    return seconds, launched.returncode == 5 and is_named and is_whole


def main() -> None:
    """Kill a rank so many times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        plain = [sys.executable, str(SCRIPT), "--plan", str(folder / "plan.json")]
        subprocess.run([*plain, "--save", str(folder / "one")], check=True, stdout=sys.stderr)
        found = []
        for number in range(options.kills):
            found.append(killed(folder, number))
            seconds, is_right = found[-1]
            print(f"kill {number}: {seconds:.2f} s, {is_right}", flush=True)
    took_s = sorted(s for s, _ in found)
    right = sum(is_right for _, is_right in found)
    middle, most = took_s[len(took_s) // 2], took_s[-1]
    print(f"{len(found)} kills: all gone after {middle:.2f} s in the median, {most:.2f} s at most")
    print(f"exit 5, rank named, checkpoint whole: {right} of {len(found)}")


if __name__ == "__main__":
    main()
