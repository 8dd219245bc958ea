"""Limits of attempts: memory, CPU time, GPUs and the Unix user, as far as this machine has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from service.local_attempts import (
    NAME,
    WAITS,
    assignment,
    folder_of,
    left_of,
    python,
    status_of,
    supervisor_of,
    wait_for_end,
    wait_for_text,
)

from hocket.service.executors import cgroups
from hocket.service.executors.attempt_folder import read_result, write_assignment
from hocket.service.executors.cgroups import AttemptLimits, Cgroup, describe_limits, find_cgroups
from hocket.service.executors.executor import EXITED, LOST, RUNNING, AttemptName
from hocket.service.executors.supervisor import run_attempt

MIB = 2**20
GREEDY = """
import time
print("ready", flush=True)
held = []
for _ in range(400):
    held.append(bytearray(8 * 2**20))
    time.sleep(0.01)
time.sleep(60)
"""
needs_cgroups = pytest.mark.skipif(
    find_cgroups() is None, reason="no control group can be made here"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs jobs as other users")


# ── version 2, against a tree of plain files ──


def fake_tree(tmp_path, controllers="cpu memory pids"):
    root = tmp_path / "cgroup"
    own = root / "system.slice" / "hocket.service"
    own.mkdir(parents=True)
    (root / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.controllers").write_text(controllers)
    itself = tmp_path / "self"
    itself.write_text("0::/system.slice/hocket.service\n")
    return own, str(root), str(itself)


def test_version_2_gets_limits_and_ends_as_a_whole(tmp_path):
    own, root, itself = fake_tree(tmp_path)
    found = find_cgroups(root, itself)
    assert (found.version, found.can) == (2, ("memory", "cpu"))
    for folder in (own, own / "hocket"):
        assert (folder / "cgroup.subtree_control").read_text() == "+memory +cpu"
    group = found.make("a mark", AttemptLimits(64 * MIB, 1.5, (0,)))
    (folder,) = map(Path, set(group.folders.values()))
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {
        "cpu.max": "150000 100000", "memory.max": str(64 * MIB),
        "memory.oom.group": "1", "memory.swap.max": "0",
    }  # fmt: skip
    assert found.make("another mark", AttemptLimits()).folders != group.folders

    (folder / "cgroup.procs").write_text("")
    assert group.num_memory_kills() == 0
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert group.num_memory_kills() == 2
    assert group.kill(), "nothing is in it"
    stranger = python_that_sleeps()
    try:
        (folder / "cgroup.procs").write_text(f"{stranger.pid}\n")
        assert not group.kill()
        assert (folder / "cgroup.kill").read_text() == "1"
        assert stranger.wait(60) == -9
    finally:
        stranger.kill()
    (entry,) = group.entries()
    os.write(entry, b"0")
    os.close(entry)
    assert (folder / "cgroup.procs").read_text().startswith("0")


def python_that_sleeps():
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])


def test_version_2_whose_group_holds_the_daemon_is_left_by_it_first(tmp_path, monkeypatch):
    own, root, itself = fake_tree(tmp_path)
    write, busy = cgroups._write, []

    def refusing(folder, name, text):
        if folder == str(own) and not (own / "hocket-daemon" / "cgroup.procs").exists():
            busy.append(name)
            raise OSError(16, "Device or resource busy")
        write(folder, name, text)

    monkeypatch.setattr(cgroups, "_write", refusing)
    found = find_cgroups(root, itself)
    assert busy == ["cgroup.subtree_control"]
    assert (own / "hocket-daemon" / "cgroup.procs").read_text() == str(os.getpid())
    # From there, as supervisors look, the same groups are found.
    (tmp_path / "self").write_text("0::/system.slice/hocket.service/hocket-daemon\n")
    assert find_cgroups(root, itself) == found


def test_without_controllers_or_rights_there_are_no_groups(tmp_path, monkeypatch):
    _, root, itself = fake_tree(tmp_path, controllers="pids")
    assert find_cgroups(root, itself) is None
    assert find_cgroups(str(tmp_path / "nothing"), itself) is None
    _, root, itself = fake_tree(tmp_path / "other")

    def refuse(folder, name, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cgroups, "_write", refuse)
    assert find_cgroups(root, itself) is None
    assert "watched" in describe_limits(None)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (cgroups.Cgroups(2, {"memory": "x", "cpu": "x"}), "CPU time limited, GPUs hidden by CUDA"),
        (
            cgroups.Cgroups(1, {"memory": "x", "devices": "x"}),
            "CPU time not limited, GPUs enforced",
        ),
    ],
)
def test_the_doctor_says_what_is_enforced(found, words):
    assert words in describe_limits(found)


def test_gpus_are_counted_by_their_place_on_the_bus(tmp_path):
    for bus, minor in (("0000:41:00.0", 0), ("0000:01:00.0", 3), ("0000:81:00.0", 1)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: X\nDevice Minor: \t {minor}\n")
    pattern = str(tmp_path / "*" / "information")
    assert cgroups.hidden_gpus((1,), pattern) == [3, 1]
    assert cgroups.hidden_gpus((0, 1, 2), pattern) == []


def test_a_gpu_whose_number_cannot_be_read_is_not_hidden(tmp_path):
    for bus, text in (("0000:01:00.0", "Device Minor: 0"), ("0000:41:00.0", "no number")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text)
    assert cgroups.hidden_gpus((0,), str(tmp_path / "*" / "information")) == []


# ── what this machine has ──


@needs_cgroups
def test_an_attempt_above_its_memory_limit_dies_alone(executor, tmp_path):
    other = AttemptName(8, 1)
    executor.start(
        assignment(tmp_path, *python(WAITS), name=other, devices=("v100-1",),
                   log_file=tmp_path / "other", memory_bytes=512 * MIB)
    )  # fmt: skip
    wait_for_text(tmp_path / "other", "ready")
    executor.start(assignment(tmp_path, *python(GREEDY), memory_bytes=96 * MIB))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, -9)
    assert "memory limit of 96 MiB" in status.detail
    assert status_of(executor, other).phase == RUNNING
    group = Cgroup(**json.loads((folder_of(tmp_path) / "cgroup.json").read_text()))
    assert not any(os.path.exists(folder) for folder in group.folders.values())


@needs_cgroups
def test_an_attempt_has_failed_though_only_a_child_was_killed_at_the_limit(executor, tmp_path):
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {GREEDY!r}])"
    executor.start(assignment(tmp_path, *python(parent), memory_bytes=96 * MIB))
    status = wait_for_end(executor)
    assert (status.phase, status.exit_code) == (EXITED, -9)
    assert "one of its processes was killed" in status.detail
    assert "memory limit of 96 MiB" in status.detail


def test_memory_is_watched_where_there_is_no_group(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "find_cgroups", lambda: None)
    folder = folder_of(tmp_path)
    folder.mkdir(parents=True)
    write_assignment(folder, assignment(tmp_path, *python(GREEDY), memory_bytes=96 * MIB))
    pid = os.fork()
    if pid == 0:
        try:
            run_attempt(folder)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    result = read_result(folder)
    assert not (folder / "cgroup.json").exists()
    assert result.exit_code == -9
    assert "memory limit of 96 MiB" in result.detail


@needs_cgroups
def test_cpu_time_is_limited(executor, tmp_path):
    busy = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\n"
    busy += "print(time.process_time())\n"
    executor.start(assignment(tmp_path, *python(busy), cpus=0.2))
    assert wait_for_end(executor).exit_code == 0
    assert float(wait_for_text(tmp_path / "log")) < 1.0


@needs_cgroups
def test_what_a_killed_supervisor_left_is_found_by_its_group(executor, tmp_path):
    """Also what has thrown its environment away, which no mark finds."""
    hides = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.execve('/bin/sleep',"
    hides += " ['sleep', '60'], {})\nprint('ready', flush=True)\ntime.sleep(60)"
    executor.start(assignment(tmp_path, *python(hides)))
    wait_for_text(tmp_path / "log", "ready")
    group = Cgroup(**json.loads((folder_of(tmp_path) / "cgroup.json").read_text()))
    deadline_s = time.monotonic() + 30
    while len(group.processes()) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(group.processes()) == 2
    os.kill(supervisor_of(tmp_path), 9)
    assert wait_for_end(executor).phase == LOST
    assert group.processes() == []
    assert not any(os.path.exists(folder) for folder in group.folders.values())
    assert left_of(tmp_path) == []


@needs_root
def test_commands_run_as_the_user_of_their_job(executor, tmp_path):
    show = "import os; print(os.getuid(), os.getgroups(), os.environ['USER'], os.getcwd())"
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    executor.start(assignment(tmp_path, "/usr/bin/python3", "-c", show, unix_user="nobody"))
    status = wait_for_end(executor)
    text = (tmp_path / "log").read_text()
    assert status.exit_code == 0, text
    assert text.split()[0] == "65534"
    assert "nobody" in text
    executor.forget(NAME)
    unknown = AttemptName(9, 1)
    executor.start(assignment(tmp_path, "true", name=unknown, unix_user="not-a-user"))
    assert "no Unix user 'not-a-user'" in wait_for_end(executor, unknown).detail
