"""kill -9 of supervisors and commands at random moments: nothing runs twice, nothing is left."""

import os
import random
import signal
import time

from patience import wait_until
from service.local_attempts import (
    assignment,
    executor_in,
    folder_of,
    kill_everything,
    left_of,
    python,
    wait_for_end,
)

from hocket.processes import system
from hocket.service.executors.attempt_folder import BEGUN, read_json
from hocket.service.executors.executor import EXITED, LOST, AttemptName

WORKS = """
import fcntl, os, subprocess, sys, time
lock = open("device", "a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                 start_new_session=True, pass_fds=[lock.fileno()])
with open("runs", "a") as file:
    file.write(sys.argv[1] + "\\n")
time.sleep(60 if sys.argv[2] == "long" else 0.05)
"""
NUM_TRIALS = 8


def test_a_device_is_free_when_an_attempt_is_told_to_have_ended(tmp_path):
    """Attempts of one job follow one another on one device, which its processes hold by a lock."""
    chance = random.Random(5)
    executor = executor_in(tmp_path)
    try:
        outcomes = [_trial(executor, tmp_path, number + 1, chance) for number in range(NUM_TRIALS)]
    finally:
        kill_everything(tmp_path)
        executor.close()
    runs = _runs(tmp_path)
    assert len(runs) >= NUM_TRIALS // 4
    assert len(runs) == len(set(runs)), "an attempt ran twice"
    assert {LOST, EXITED} <= set(outcomes)


def _runs(tmp_path):
    path = tmp_path / "runs"
    return path.read_text().split() if path.exists() else []


def _log(tmp_path):
    path = tmp_path / "log"
    return path.read_bytes() if path.exists() else b""


def _trial(executor, tmp_path, attempt, chance):
    name = AttemptName(1, attempt)
    length = chance.choice(["long", "short"])
    work = assignment(tmp_path, *python(WORKS), str(attempt), length, name=name)
    executor.start(work)
    victim = chance.choice(["supervisor", "command", "stop"])
    begun = wait_until(lambda: read_json(folder_of(tmp_path, name) / BEGUN))
    if chance.random() < 0.5:
        wait_until(lambda: str(attempt) in _runs(tmp_path), "it runs")
    time.sleep(chance.uniform(0.0, 0.15))
    if victim == "supervisor":
        supervisor = system.Process(begun["pid"], begun["start_ticks"], 0)
        system.send(supervisor, signal.SIGKILL)
    elif victim == "command" and (left := left_of(tmp_path, name)):
        system.send(chance.choice(left), signal.SIGKILL)
    if victim != "supervisor":
        executor.stop(name, 5.0)
    executor.start(work)
    status = wait_for_end(executor, name)
    executor.start(work)
    assert not left_of(tmp_path, name)
    assert b"BlockingIOError" not in _log(tmp_path), "two had the device at once"
    executor.forget(name)
    assert os.listdir(tmp_path / "attempts") == ["forgotten"]
    return status.phase
