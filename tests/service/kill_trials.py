"""Daemons that are killed at random moments under load, and a checker that trusts only the kernel.

Each job takes a lock on every device that it was given and one on its own number, for as long as it
lives. A lock that is taken already means that a device was given twice, or that a job ran twice;
the job writes that down. What a job did stays done, so that one which others displace comes to an
end. Whoever submits remembers what was answered.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("killable_daemon.py")
SECONDS = (0.05, 0.3, 0.8, 1.5)
"""How long jobs run."""
JOB = """
import fcntl, os, sys, time
folder, seconds = sys.argv[1], float(sys.argv[2])
job, attempt = os.environ["HOCKET_JOB"], os.environ["HOCKET_ATTEMPT"]
log = os.open(folder + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, f"begin {job}-{attempt}\\n".encode())
held = []
for name in ["job-" + job, *os.environ["HOCKET_DEVICES"].split(",")]:
    held.append(os.open(folder + "/" + name, os.O_RDWR | os.O_CREAT))
    try:
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.write(log, f"overlap {job}-{attempt} {name}\\n".encode())
with open(folder + "/done-" + job, "a+b", buffering=0) as done:
    while done.seek(0, 2) * 0.05 < seconds:
        time.sleep(0.05)
        done.write(b".")
"""


@dataclass
class Findings:
    """What the trials showed."""

    trials: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    """Keys and the numbers that they were answered with."""
    back_s: list[float] = field(default_factory=list)
    """From the kill to the first answer of the next daemon."""
    start_cpu_s: list[float] = field(default_factory=list)
    """CPU time of a daemon's start, which other programs on the machine do not change much."""
    lost: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    begun_twice: list[str] = field(default_factory=list)
    not_succeeded: list[str] = field(default_factory=list)
    num_attempts: int = 0

    def __str__(self) -> str:
        back_s = sorted(self.back_s)
        return (
            f"{self.trials} kills, {len(self.accepted)} jobs accepted, {self.num_attempts} attempts"
            f"; lost {len(self.lost)}, devices or jobs run twice {len(self.overlaps)}, attempts "
            f"begun twice {len(self.begun_twice)}, not succeeded {len(self.not_succeeded)}; back "
            f"in {back_s[len(back_s) // 2]:.2f} s, at most {back_s[-1]:.2f} s "
            f"(CPU of a start {sum(self.start_cpu_s) / len(self.start_cpu_s):.2f} s)"
        )


class Served:
    """A daemon process."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any] | None:
        """The answer; None where it died before it gave one."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.next_line()

    def next_line(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass


def run_trials(folder: Path, trials: int, seed: int = 0) -> Findings:
    """Kill as many daemons on one folder; then let all jobs end and check."""
    state, marks = folder / "state", folder / "marks"
    marks.mkdir(parents=True)
    chance, findings = random.Random(seed), Findings()
    served = Served(state)
    assert served.next_line() is not None
    for _ in range(trials):
        killer = threading.Timer(chance.uniform(0.0, 1.0), served.process.kill)
        killer.start()
        _submit_until_it_dies(served, marks, findings, chance)
        killed_s = time.monotonic()
        killer.join()
        served.end()
        findings.trials += 1
        served = Served(state)
        ready = served.next_line()
        assert ready is not None, "the next daemon starts"
        findings.start_cpu_s.append(ready["cpu_s"])
        jobs = served.ask(what="jobs")
        findings.back_s.append(time.monotonic() - killed_s)
        assert jobs is not None
        _check_accepted(findings, jobs["jobs"])
    _wait_for_all(served, findings)
    served.end(signal.SIGTERM)
    _check_log(findings, (marks / "log").read_text().splitlines())
    return findings


def _submit_until_it_dies(
    served: Served, marks: Path, findings: Findings, chance: random.Random
) -> None:
    while True:
        nth = len(findings.accepted)
        # The same key and job again where the last daemon died before it answered.
        command = [sys.executable, "-I", "-S", "-c", JOB, str(marks), str(SECONDS[nth % 4])]
        spec = {"name": f"key-{nth}", "command": command, "gang": 1 + nth % 3 % 2, "grace_s": 1.0}
        answer = served.ask(what="submit", spec=spec, key=f"key-{nth}")
        if answer is None:
            return
        findings.accepted[f"key-{nth}"] = answer["number"]
        time.sleep(chance.uniform(0.0, 0.3))


def _check_accepted(findings: Findings, jobs: list[list[Any]]) -> None:
    found = {name: number for number, name, _ in jobs}
    for key, number in findings.accepted.items():
        if found.get(key) != number and key not in findings.lost:
            findings.lost.append(key)
    assert len(found) == len(jobs), "a key made two jobs"


def _wait_for_all(served: Served, findings: Findings) -> None:
    until_s = time.monotonic() + 60.0 + 2.0 * len(findings.accepted)
    while True:
        answer = served.ask(what="jobs")
        assert answer is not None
        left = [f"{name} {status}" for _, name, status in answer["jobs"] if status != "succeeded"]
        ended = all(entry.endswith(("failed", "cancelled")) for entry in left)
        if ended or time.monotonic() > until_s:
            findings.not_succeeded = left
            return
        time.sleep(0.2)


def _check_log(findings: Findings, lines: list[str]) -> None:
    begun = [line for line in lines if line.startswith("begin")]
    findings.num_attempts = len(begun)
    findings.begun_twice = sorted({line for line in begun if begun.count(line) > 1})
    findings.overlaps = [line for line in lines if line.startswith("overlap")]
