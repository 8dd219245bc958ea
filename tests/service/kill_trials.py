"""Daemons that are killed at random moments under load, and a checker that trusts only the kernel.

Each job takes a lock on every device that it was given and one on its own number, for as long as it
lives. A lock that is taken already means that a device was given twice, or that a job ran twice;
the job writes that down. It counts its steps in a file and saves every few, and when it is asked to
stop; its next attempt goes on from what was saved and writes down what was not. Whoever submits
remembers what was answered. One daemon in five is killed while it starts.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("killable_daemon.py")
SECONDS = (0.05, 0.3, 0.8, 1.5)
"""How long jobs run."""
STEP_S = 0.05
JOB = """
import fcntl, os, signal, sys, time
folder, seconds = sys.argv[1], float(sys.argv[2])
job, attempt = os.environ["HOCKET_JOB"], os.environ["HOCKET_ATTEMPT"]
def opened(name, flags=0):
    return os.open(folder + "/" + name, os.O_RDWR | os.O_CREAT | flags)
log, did, saved = opened("log", os.O_APPEND), opened("did-" + job), opened("saved-" + job)
def write(text):
    os.write(log, text.encode() + b"\\n")
write(f"begin {job}-{attempt}")
held = []
for name in ["job-" + job, *os.environ["HOCKET_DEVICES"].split(",")]:
    held.append(opened(name))
    try:
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        write(f"overlap {job}-{attempt} {name}")
def save(*_):
    os.ftruncate(saved, steps)
    if _:
        os._exit(1)
steps = os.fstat(saved).st_size
write(f"lost {job}-{attempt} {os.fstat(did).st_size - steps}")
signal.signal(signal.SIGTERM, save)
while steps * STEP_S < seconds:
    time.sleep(STEP_S)
    steps += 1
    os.ftruncate(did, steps)
    if steps % 10 == 0:
        save()
save()
""".replace("STEP_S", str(STEP_S))


@dataclass
class Findings:
    """What the trials showed."""

    kills: int = 0
    kills_while_starting: int = 0
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
    failures: int = 0
    """Attempts that failed, where none should."""
    num_attempts: int = 0
    lost_work_s: list[float] = field(default_factory=list)
    """Of each attempt that lost any."""

    @property
    def is_sound(self) -> bool:
        """Whether all that was promised held, but for the time to come back."""
        wrong = (self.lost, self.overlaps, self.begun_twice, self.not_succeeded, self.failures)
        return not any(wrong)

    def __str__(self) -> str:
        back_s = sorted(self.back_s)
        return (
            f"{self.kills} kills ({self.kills_while_starting} while starting), "
            f"{len(self.accepted)} jobs accepted, {self.num_attempts} attempts; lost "
            f"{len(self.lost)}, devices or jobs run twice {len(self.overlaps)}, attempts begun "
            f"twice {len(self.begun_twice)}, failed {self.failures}, jobs that did not succeed "
            f"{len(self.not_succeeded)}; work lost {sum(self.lost_work_s) / self.kills:.3f} s per "
            f"kill, at most {max(self.lost_work_s, default=0.0):.2f} s at once; back in "
            f"{back_s[len(back_s) // 2]:.2f} s, at most {back_s[-1]:.2f} s "
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


class Killer:
    """Kills a daemon after a while, and knows when it did."""

    def __init__(self, served: Served, after_s: float) -> None:
        self.killed_s = 0.0
        self._served = served
        self._timer = threading.Timer(after_s, self._kill)
        self._timer.start()

    def _kill(self) -> None:
        self.killed_s = time.monotonic()
        self._served.process.kill()

    def join(self) -> None:
        """Wait until nothing of the daemon is left."""
        self._timer.join()
        self._served.end()


def run_trials(folder: Path, trials: int, seed: int = 0) -> Findings:
    """Kill as many daemons on one folder; then let all jobs end and check."""
    state, marks = folder / "state", folder / "marks"
    marks.mkdir(parents=True)
    chance, findings = random.Random(seed), Findings()
    # Compiles what is not compiled yet, before anybody is killed.
    served = Served(state)
    assert served.next_line() is not None
    while findings.kills < trials:
        killer = Killer(served, chance.uniform(0.0, 1.0))
        _submit_until_it_dies(served, marks, findings, chance)
        killer.join()
        findings.kills += 1
        if findings.kills < trials and chance.random() < 0.25:
            killer = Killer(Served(state), chance.uniform(0.0, 1.5))
            killer.join()
            findings.kills += 1
            findings.kills_while_starting += 1
        served = Served(state)
        _check_back(served, findings, killer.killed_s)
    _wait_for_all(served, findings)
    served.end(signal.SIGTERM)
    check_log(findings, (marks / "log").read_text().splitlines())
    return findings


def _check_back(served: Served, findings: Findings, killed_s: float) -> None:
    ready = served.next_line()
    assert ready is not None, "the next daemon starts"
    findings.start_cpu_s.append(ready["cpu_s"])
    jobs = served.ask(what="jobs")
    findings.back_s.append(time.monotonic() - killed_s)
    assert jobs is not None
    _check_accepted(findings, jobs["jobs"])


def _submit_until_it_dies(
    served: Served, marks: Path, findings: Findings, chance: random.Random
) -> None:
    while True:
        nth = len(findings.accepted)
        # The same key and job again where the last daemon died before it answered.
        command = [sys.executable, "-I", "-S", "-c", JOB, str(marks), str(SECONDS[nth % 4])]
        spec = {"name": f"key-{nth}", "command": command, "gang": 1 + nth % 3 % 2, "grace_s": 5.0}
        answer = served.ask(what="submit", spec=spec, key=f"key-{nth}")
        if answer is None:
            return
        assert "error" not in answer, answer
        findings.accepted[f"key-{nth}"] = answer["number"]
        time.sleep(chance.uniform(0.0, 0.3))


def _check_accepted(findings: Findings, jobs: list[list[Any]]) -> None:
    found = {name: number for number, name, _, _ in jobs}
    for key, number in findings.accepted.items():
        if found.get(key) != number and key not in findings.lost:
            findings.lost.append(key)
    assert len(found) == len(jobs), "a key made two jobs"


def _wait_for_all(served: Served, findings: Findings) -> None:
    until_s = time.monotonic() + 60.0 + 2.0 * len(findings.accepted)
    while True:
        answer = served.ask(what="jobs")
        assert answer is not None
        jobs = answer["jobs"]
        left = [f"{name} {status}" for _, name, status, _ in jobs if status != "succeeded"]
        ended = all(entry.endswith(("failed", "cancelled")) for entry in left)
        if ended or time.monotonic() > until_s:
            findings.not_succeeded = left
            findings.failures = sum(failures for *_, failures in jobs)
            return
        time.sleep(0.2)


def check_log(findings: Findings, lines: list[str]) -> None:
    """Note what jobs wrote down."""
    begun = Counter(line for line in lines if line.startswith("begin"))
    findings.num_attempts = len(begun)
    findings.begun_twice = sorted(line for line, times in begun.items() if times > 1)
    findings.overlaps = [line for line in lines if line.startswith("overlap")]
    steps = [int(line.split()[-1]) for line in lines if line.startswith("lost")]
    findings.lost_work_s = [STEP_S * num for num in steps if num > 0]
