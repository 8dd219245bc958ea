"""Attempts for tests with real processes."""

import contextlib
import os
import signal
import sys
from pathlib import Path

from patience import wait_until

from hocket.fleet.rounds.state import FleetDevice
from hocket.processes import system
from hocket.service.executors.attempt_folder import BEGUN, mark_of, read_json
from hocket.service.executors.executor import EXITED, LOST, Assignment, AttemptName, Status
from hocket.service.executors.local import LocalExecutor

NAME = AttemptName(7, 2)
DEVICES = (
    FleetDevice(name="v100-0", device_type="v100"),
    FleetDevice(name="v100-1", device_type="v100"),
)

WAITS = "import time; print('ready', flush=True); time.sleep(60)"
OBEYS = """
import signal, sys, time
def leave(*_):
    print("leaving", flush=True); sys.exit(4)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(60)
"""
REFUSES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
WITH_GRANDCHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                         start_new_session=True)
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n{child.pid}\\n")
"""


def executor_in(tmp_path: Path, **options) -> LocalExecutor:
    return LocalExecutor(tmp_path / "attempts", DEVICES, **options)


def assignment(tmp_path: Path, *command: str, **changes) -> Assignment:
    values = {
        "name": NAME,
        "command": command,
        "environment": {},
        "work_folder": tmp_path,
        "log_file": tmp_path / "log",
        "devices": ("v100-0", "v100-1"),
        "device_type": "v100",
        "grace_s": 20.0,
    }
    return Assignment(**{**values, **changes})


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


def status_of(executor: LocalExecutor, name: AttemptName = NAME) -> Status | None:
    return next((one for one in executor.poll().attempts if one.name == name), None)


def wait_for_phase(executor: LocalExecutor, *phases: str, name: AttemptName = NAME) -> Status:
    def reached():
        status = status_of(executor, name)
        return status if status is not None and status.phase in phases else None

    return wait_until(reached, f"{name} is {' or '.join(phases)}")


def wait_for_end(executor: LocalExecutor, name: AttemptName = NAME) -> Status:
    return wait_for_phase(executor, EXITED, LOST, name=name)


def wait_for_text(path: Path, text: str = "\n") -> str:
    """What a file holds once ``text`` stands in it, in lines that are whole: a program that prints
    without a buffer may be interrupted before the end of one."""

    def whole() -> str:
        content = path.read_text() if path.exists() else ""
        return content if text in content and content.endswith("\n") else ""

    return wait_until(whole, f"{path.name} holds {text!r}")


def folder_of(tmp_path: Path, name: AttemptName = NAME) -> Path:
    return tmp_path / "attempts" / str(name)


def left_of(tmp_path: Path, name: AttemptName = NAME) -> list[system.Process]:
    """Processes of the attempt that still run."""
    return system.marked(mark_of(folder_of(tmp_path, name)))


def supervisor_of(tmp_path: Path, name: AttemptName = NAME) -> int:
    begun = wait_until(lambda: read_json(folder_of(tmp_path, name) / BEGUN))
    return begun["pid"]


def kill_everything(tmp_path: Path) -> None:
    """What a test that failed left behind."""
    for folder in (tmp_path / "attempts").glob("*-*"):
        with contextlib.suppress(ValueError):
            begun = read_json(folder / BEGUN)
            if begun is not None:
                supervisor = system.Process(begun["pid"], begun["start_ticks"], 0)
                system.send(supervisor, signal.SIGKILL)
        system.send_all(system.marked(mark_of(folder)), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    return system.process(pid) is not None


def pids(path: Path, count: int) -> list[int]:
    """Numbers of processes that were written to a file, a line each."""
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count)
    return [int(line) for line in path.read_text().split()]


def stop_here(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
