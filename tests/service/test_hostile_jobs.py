"""Jobs that are up to no good: what they can reach of the service whose user they run as."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from service.fleet_terminal import SECRET, fleet_in
from service.rest_service import is_problem

from hocket.base.errors import InputFileError
from hocket.service.daemon.log import Log
from hocket.service.errors import NotFoundError
from hocket.service.executors import isolation
from hocket.service.executors.bounded_log import BoundedLog
from hocket.service.store import Store

SPY = """
import json, os, pathlib, signal, subprocess, sys
state = pathlib.Path(sys.argv[1])
supervisor, daemon = os.getppid(), json.loads((state / "endpoint.json").read_text())["pid"]

def read(path):
    try:
        return pathlib.Path(path).read_bytes().decode("latin-1")
    except OSError:
        return ""

def can_signal(pid, number):
    try:
        os.kill(pid, number)
        return True
    except OSError:
        return False

command = [sys.executable, "-m", "hocket", "fleet", "token", "add", "spy", "--state", str(state)]
asked = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
escaped = subprocess.run(["setsid", "-f", *command], capture_output=True, text=True)
found = {
    "environments": [read(f"/proc/{pid}/environ") for pid in (supervisor, daemon)],
    "memories": [read(f"/proc/{pid}/maps") for pid in (supervisor, daemon)],
    "signals": [can_signal(pid, 0) for pid in (supervisor, daemon, os.getpid())],
    "files": {str(path): read(path) for path in state.rglob("*") if path.is_file()},
    "asked": [asked.returncode, asked.stdout, asked.stderr],
    "escaped": escaped.stdout,
}
print(json.dumps(found))
"""


def test_a_job_finds_no_way_to_the_service(tmp_path, capsys):
    with fleet_in(tmp_path, capsys) as fleet:
        login = fleet.serve()["login"]
        token = fleet.ask("token", "add", "ann")["token"]
        job = tmp_path / "job.toml"
        command = [sys.executable, "-c", SPY, str(fleet.state)]
        job.write_text(f'name = "spy"\ncommand = {json.dumps(command)}\n')
        found = json.loads(fleet.type("submit", str(job), "--follow"))
        assert fleet.ask("jobs", "--all")["jobs"][0]["owner"]
        fleet.type("cancel", "1", "77", "78", code=2)
        assert "job 1 has ended" in fleet.said
        assert "no job 78" in fleet.said
        assert fleet.type("login").startswith(login.partition("=")[0])
    code, _, errors = found["asked"]
    assert code == 5
    assert "jobs of a fleet cannot command it" in errors
    assert found["escaped"] == ""
    assert len(found["files"]) > 5
    texts = {**found["files"], **dict(enumerate(found["environments"]))}
    for secret in (token, SECRET, login.partition("=")[2]):
        assert [where for where, text in texts.items() if secret in text] == []
    if isolation.can_isolate():
        assert found["environments"] == ["", ""]
        assert found["memories"] == ["", ""]
        assert found["signals"] == [False, False, True]


# ── output that is none ──────────────────────────────────────────────────────────────────────────


def pipe(path, secret):
    os.mkfifo(path)


def link(path, secret):
    path.symlink_to(secret)


def other_name(path, secret):
    os.link(secret, path)


def socket_or_folder(path, secret):
    path.mkdir()


@pytest.fixture(params=[pipe, link, other_name, socket_or_folder])
def replaced(request, tmp_path):
    """The log of an attempt, replaced by its job."""
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    path = tmp_path / "logs" / "1" / "attempt-1.log"
    path.parent.mkdir(parents=True)
    request.param(path, secret)
    return tmp_path


def test_only_plain_files_count_as_output(replaced):
    log = Log(replaced, 1, 1)
    with pytest.raises((NotFoundError, OSError)):
        log.read(0, 100)
    with pytest.raises(OSError, match=r"plain|directory"):
        BoundedLog(str(replaced / "logs" / "1" / "attempt-1.log"), 1000)


def test_a_folder_of_logs_that_is_a_link_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "attempt-1.log").write_text("secret")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "1").symlink_to(elsewhere)
    with pytest.raises(NotFoundError):
        Log(tmp_path, 1, 1).read(0, 10)
    (tmp_path / "logs" / "1").unlink()
    assert Log(tmp_path, 1, 1).read(0, 10) == b""
    (tmp_path / "logs" / "1").mkdir()
    (tmp_path / "logs" / "1" / "attempt-1.log").write_text("before")
    assert Log(tmp_path, 1, 1).read(2, 10) == b"fore"
    assert Log(tmp_path, 1, 1).size_bytes() == 6


def test_a_pipe_in_place_of_a_log_holds_up_nobody(service):
    number = service.submit()["id"]
    service.wait_for(number, "running")
    path = service.log_path(number)
    os.mkfifo(path)
    # More than the service has threads: one that waited for the pipe would never come back.
    for _ in range(50):
        is_problem(service.client.get(f"/v1/jobs/{number}/log?follow=true"), 404)
    is_problem(service.client.get(f"/v1/jobs/{number}/log?tail=3"), 404)
    for path in ("/v1/jobs", "/metrics", "/", f"/jobs/{number}"):
        assert service.client.get(path).status_code == 200
    service.cancel_all()


# ── the state folder ─────────────────────────────────────────────────────────────────────────────


def test_a_folder_that_was_there_is_left_as_it_is(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    Store.open(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o755
    for mode in (0o775, 0o757, 0o1777):
        folder.chmod(mode)
        with pytest.raises(InputFileError, match="others may write") as refusal:
            Store.open(folder)
        assert "--state" in refusal.value.hint
        assert folder.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("name", ["fleet.db", "lock"])
def test_files_of_the_state_that_others_reach_are_refused(tmp_path, name):
    Store.open(tmp_path / "state").close()
    path = tmp_path / "state" / name
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(InputFileError, match="others") as refusal:
            Store.open(tmp_path / "state")
        assert f"chmod 600 {path}" in refusal.value.hint
    path.chmod(0o600)
    Store.open(tmp_path / "state").close()
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(InputFileError, match="no plain file"):
        Store.open(tmp_path / "state")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_others_own_is_refused(tmp_path):
    folder = tmp_path / "state"
    Store.open(folder).close()
    for path in (folder / "lock", folder):
        os.chown(path, 12345, 12345)
        with pytest.raises(InputFileError, match="another user"):
            Store.open(folder)
        os.chown(path, 0, 0)
    Store.open(folder).close()


@pytest.mark.skipif(
    not isolation.can_isolate(), reason="this kernel has no domains that scope signals"
)
def test_only_others_than_root_give_up_programs_that_change_the_user():
    program = (
        "from hocket.service.executors.isolation import enter_domain; enter_domain();"
        "print(open('/proc/thread-self/status').read())"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    (given_up,) = re.findall(r"^NoNewPrivs:\s*(\d)", told.stdout, re.M)
    assert given_up == ("0" if os.geteuid() == 0 else "1")
