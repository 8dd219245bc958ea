"""Draining, usage, notices and interactive jobs, as their users see them."""

from __future__ import annotations

import http.server
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from typing import ClassVar

import pytest
from patience import wait_until
from service.fleet_terminal import fleet_in
from service.rest_service import is_problem

from hocket.fleet.rounds.fairness import WEEK_S, week_start_s
from hocket.service.executors.executor import AttemptName
from hocket.service.notifier import Notifier, notice_of
from hocket.service.records import AttemptRecord, JobRecord
from hocket.service.server_config import NotifyConfig
from hocket.service.spec import JobSpec
from hocket.service.store.tables import Batch
from hocket.service.usage import count_usage

pytestmark = pytest.mark.usefixtures("nobody_left")
MONDAY_S = 1794787200.0
"""2026-11-16 0:00 UTC."""


def test_a_drained_device_takes_no_new_jobs(service):
    def drain(word, name):
        return service.client.post(f"/v1/devices:{word}", json={"name": name})

    running = service.submit(throughputs={"k80": 1.0})["id"]
    service.wait_for(running, "running")
    assert drain("drain", "k80-0").json() == {"devices": ["k80-0"]}
    (device,) = [one for one in service.client.get("/v1/devices").json()["devices"]
                 if one["name"] == "k80-0"]  # fmt: skip
    assert (device["is_drained"], device["jobs"]) == (True, [running])
    waiting = service.submit(throughputs={"k80": 1.0})["id"]
    service.executor.exit(AttemptName(running, 1), 0)
    service.wait_for(running, "succeeded")
    assert service.job(waiting)["status"] == "queued"
    assert drain("reopen", "k80-0").status_code == 200
    service.wait_for(waiting, "running")
    assert "k80-0" in is_problem(drain("drain", "k80-00"), 404)["hint"]


def held(started_s, ended_s, device_type="v100", num=2, job=1):
    return AttemptRecord(
        job=job, attempt=1, devices=tuple(f"d{at}" for at in range(num)), device_type=device_type,
        token="", decided_s=started_s, started_s=started_s, ended_s=ended_s,
    )  # fmt: skip


def test_usage_is_split_by_week_user_team_and_type():
    assert week_start_s(MONDAY_S) == MONDAY_S
    assert week_start_s(MONDAY_S - 1.0) == MONDAY_S - WEEK_S
    now_s = MONDAY_S + 3600.0
    found = count_usage(
        [
            (held(MONDAY_S - 7200.0, MONDAY_S + 1800.0), "ann", "vision", "x"),
            (held(MONDAY_S, None, "k80", 1), "bob", "", "x"),
            (held(MONDAY_S, MONDAY_S + 900.0, "k80", 1), "bob", "", "x"),
            (held(0.0, MONDAY_S - 2 * WEEK_S), "ann", "vision", "x"),
        ],
        MONDAY_S - WEEK_S,
        now_s,
    )
    assert [(*row[:4], round(row.device_hours, 6)) for row in found] == [
        ("2026-W46", "ann", "vision", "v100", 4.0),
        ("2026-W47", "ann", "vision", "v100", 1.0),
        ("2026-W47", "bob", "", "k80", 1.25),
    ]


def test_usage_of_the_service(service):
    number = service.submit(team="vision")["id"]
    service.wait_for(number, "running")
    rows = service.client.get("/v1/usage").json()["usage"]
    mine = [row for row in rows if row["team"] == "vision"]
    assert mine
    assert all(row["user"] == "tester" and row["device_hours"] > 0.0 for row in mine)
    service.executor.exit(AttemptName(number, 1), 0)
    service.wait_for(number, "succeeded")
    assert service.client.get("/v1/usage?weeks=1").json()["usage"]
    is_problem(service.client.get("/v1/usage?weeks=0"), 422)


# ── notices ──


def record(status, number=3):
    return JobRecord(
        number=number, spec=JobSpec(name="job", command=("true",)), status=status,
        submitted_s=1.0, ended_s=2.0, owner="ann", message="why",
    )  # fmt: skip


class Hook(http.server.BaseHTTPRequestHandler):
    received: ClassVar[list[dict]] = []
    answers: ClassVar[list[int]] = []

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.answers.pop(0) if self.answers else 200
        if status == 200:
            self.received.append(json.loads(data))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("on", "numbers"), [("failure", [2, 3]), ("end", [1, 2, 3])])
def test_a_webhook_and_a_command_hear_of_ended_jobs(tmp_path, on, numbers):
    Hook.received, Hook.answers = [], [500]
    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = tmp_path / "notices"
        notifier = Notifier(NotifyConfig(
            webhook=f"http://127.0.0.1:{server.server_port}/hook", on=on,
            command=(sys.executable, "-c",
                     f"import sys; open({str(target)!r}, 'a').write(sys.stdin.read() + '\\n')"),
        ))  # fmt: skip
        jobs = [record("succeeded", 1), record("failed", 2), record("timed out", 3),
                record("running", 4)]  # fmt: skip
        notifier.observe(None, Batch(state=None, jobs=jobs))
        wait_until(lambda: len(Hook.received) == len(numbers) and target.exists()
                   and target.read_text().count("\n") == len(numbers))  # fmt: skip
        notifier.close()
        server.shutdown()
    assert [one["job"] for one in Hook.received] == numbers, "also after a refusal"
    told = [json.loads(line) for line in target.read_text().splitlines()]
    assert told == Hook.received
    assert notice_of(record("failed"))["text"] == "job 3 (job) of ann has failed: why"


# ── interactive jobs ──


@pytest.mark.slow
def test_a_shell_runs_on_a_device_of_the_fleet(tmp_path, capsys):
    with fleet_in(tmp_path, capsys) as fleet:
        fleet.serve()
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "hocket", "fleet", "shell", "--state", str(fleet.state),
             "--time", "120", "/bin/sh"],
            stdin=slave, stdout=slave, stderr=subprocess.PIPE, cwd=tmp_path,
            env={**os.environ, "PS1": "", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(slave)
        os.write(master, b"echo on=$HOCKET_DEVICES in=$PWD tty=$(tty)\nexit\n")
        assert process.wait(100) == 0
        text = os.read(master, 65536).decode()
        os.close(master)
        process.stderr.close()
        assert "on=v100-0" in text
        assert f"in={tmp_path}" in text
        assert "tty=/dev/" in text
        job = fleet.ask("jobs", "--all")["jobs"][0]
        wait_until(lambda: fleet.ask("jobs", "--all")["jobs"][0]["status"] in
                   ("succeeded", "cancelled"))  # fmt: skip
        assert job["spec"]["time_limit_s"] == 120.0
        drained = fleet.type("drain", "v100-0")
        assert drained.strip() == "no new jobs run on v100-0"
        assert "drained" in fleet.type("devices")
        for name in ("local", "localhost", socket.gethostname()):
            assert fleet.ask("drain", name)["devices"] == ["v100-0", "k80-1"]
        assert "new jobs may run" in fleet.type("drain", "v100-0", "--undo")
        assert "v100" in fleet.type("usage")
