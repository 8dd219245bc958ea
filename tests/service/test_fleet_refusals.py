"""The commands of the fleet without a service: refusals, lost answers, tables and help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from service.fleet_terminal import HOSTILE, fleet_in

import hocket.cli
from hocket.cli.fleet import connection, lists
from hocket.kernels.progress import compiling
from hocket.service import client as clients
from hocket.view.table import plain


@pytest.fixture
def fleet(tmp_path, capsys):
    with fleet_in(tmp_path, capsys) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--on", "lokal", "--devices", "a:1"), "did you mean 'local'"),
        (("--on", "slurm://x"), "unknown engine"),
        (("--on", "ray", "--devices", "a:1"), "--devices is not for ray"),
        ((), "local jobs need --devices"),
        (("--devices", "v100"), "cannot read 'v100' in --devices"),
        (("--devices", "v100:1", "--policy", "lass"), "unknown policy"),
        (("--devices", "v100:1", "--host", "0.0.0.0"), "--allow-remote"),
        (("--devices", "v100:1", "--host", "192.0.2.1", "--allow-remote"), "cannot listen"),
        (("--devices", "v100:1", "--device-types", "v100"), "--device-types is for agents"),
        (("--devices", "v100:99999999x9"), "more than 1,000,000 devices"),
        (("--devices", "v100:1", "--round", "nan"), "no finite number"),
    ],
)
def test_serve_refuses_what_it_cannot_do(fleet, arguments, message):
    fleet.type("serve", *arguments, code=2)
    assert message in fleet.said


def test_serve_says_that_it_compiles(fleet, monkeypatch):
    fleet.type("serve", "--on", "slurm", "--devices", "v100:1", code=2)
    assert "compiling" not in fleet.said
    monkeypatch.setattr("hocket.service.serve.serve", lambda settings, on_ready: compiling("play"))
    fleet.type("serve", "--devices", "v100:1")
    assert "kernels for this CPU, once" in fleet.said


@pytest.mark.parametrize("number", ["abc", "0", "-3", "1.5", "٣", "9" * 30])
def test_what_is_no_number_of_a_job_is_refused_before_asking(fleet, number):
    fleet.type("explain", "--json", "--", number, code=2)
    assert "is no number of a job" in fleet.said


def test_a_port_that_is_taken_is_named(fleet):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        port = str(other.server_address[1])
        fleet.type("serve", "--devices", "v100:1", "--port", port, code=2)
    assert f"port {port}" in fleet.said


def test_serve_without_its_packages_says_what_to_install(fleet, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    fleet.type("serve", "--devices", "v100:1", code=2)
    assert "hocket[serve]" in fleet.said


def test_a_job_file_that_makes_no_sense_is_refused_before_anything_is_sent(fleet, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('name = "x"\ncommand = ["true"]\ngong = 2\n')
    fleet.state.mkdir()
    fleet.type("submit", str(path), code=3)
    assert "did you mean 'gang'" in fleet.said
    path.write_text('name = "x"\ncommand = ["true"]\ngang = 2\ngangs = [1, 2]\n')
    fleet.type("submit", str(path), code=3)
    assert "a gang or gangs, not both" in fleet.said
    path.write_text('name = "a"\ncommand = "echo hi"\n')
    fleet.type("submit", str(path), code=3)
    assert 'a list of strings, such as ["echo", "hi"]' in " ".join(fleet.said.split())


def test_no_service_is_told_in_one_sentence(fleet, monkeypatch):
    fleet.type("jobs", code=2)
    assert "no fleet was ever served" in fleet.said
    monkeypatch.setattr(clients, "PATIENCE_S", 0.0)
    fleet.state.mkdir()
    (fleet.state / "endpoint.json").write_text('{"url": "http://127.0.0.1:9"}')
    fleet.type("jobs", code=5)
    assert "no fleet service answers at http://127.0.0.1:9" in fleet.said
    monkeypatch.delenv("HOCKET_FLEET_TOKEN", raising=False)
    fleet.type("jobs", "--url", "http://127.0.0.1:9", code=2)
    assert "HOCKET_FLEET_TOKEN" in fleet.said


class _Answers(BaseHTTPRequestHandler):
    """Loses its first answers, then gives one."""

    keys: ClassVar[list[str]] = []
    answers: ClassVar[list[tuple[int, bytes] | None]] = []

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.keys.append(self.headers["idempotency-key"])
        answer = self.answers.pop(0)
        if answer is None:
            return
        self.send_response(answer[0])
        self.send_header("content-length", str(len(answer[1])))
        self.end_headers()
        self.wfile.write(answer[1])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def answering():
    handler = type("Answers", (_Answers,), {"keys": [], "answers": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield handler, clients.FleetClient(lambda: clients.Address(url, "x" * 40))
        server.shutdown()


def test_submit_asks_again_with_the_same_key(answering):
    handler, client = answering
    handler.answers += [None, (503, b"{}"), (201, b'{"id": 3}')]
    assert client.submit({"name": "x", "command": ["true"]}) == {"id": 3}
    assert len(handler.keys) == 3
    assert len(set(handler.keys)) == 1


def test_changes_are_not_asked_for_twice(answering):
    handler, client = answering
    handler.answers += [None, (200, b"{}")]
    with pytest.raises(clients.UnreachableError):
        client.post("/v1/jobs/1:pause", {})
    assert len(handler.keys) == 1


@pytest.mark.parametrize(
    ("status", "body", "exit_code", "words"),
    [
        (409, b'{"detail": "it has ended", "hint": "h"}', 2, "it has ended\nhint: h"),
        (401, b"{}", 2, "refuses the token"),
        (302, b"{}", 2, "status 302"),
        (500, b'{"detail": "oops"}', 5, "the service failed: oops"),
        (200, b"<html>", 5, "is no hocket fleet service"),
        (404, b"[1]", 2, "status 404"),
    ],
)
def test_refusals_become_errors_with_an_exit_code(answering, status, body, exit_code, words):
    handler, client = answering
    handler.answers.append((status, body))
    with pytest.raises(hocket.HocketError, match=re.escape(words)) as error:
        client.post("/v1/x", {})
    assert error.value.exit_code == exit_code


def test_watching_ends_quietly_with_ctrl_c(capsys, monkeypatch):
    looks = iter([{"jobs": []}, {"jobs": []}, {"jobs": [1]}])

    def look():
        try:
            return next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(connection, "WATCH_S", 0.0)
    connection.watch(look, str, as_json=True)
    assert capsys.readouterr().out == '{"jobs": []}\n{"jobs": [1]}\n'
    looks = iter([{"jobs": []}, {"jobs": [2]}])
    connection.watch(look, str, as_json=False)
    assert "[2]" in capsys.readouterr().out


def test_tables_stay_short_and_inert():
    spec = {"name": HOSTILE, "gang": 1, "total_steps": None, "team": HOSTILE}
    job = {
        "spec": spec, "status": "queued", "devices": [HOSTILE], "done_steps": 0.0, "attempt": 0,
        "submitted_s": 0.0, "ended_s": None,
    }  # fmt: skip
    text = plain(lists.jobs_table([{**job, "id": at} for at in range(5000)], 10.0, True))
    device = {
        "name": HOSTILE,
        "device_type": HOSTILE,
        "server": HOSTILE,
        "is_up": False,
        "jobs": [],
    }
    text += plain(lists.devices_table([device] * 5000))
    assert "4,800 other jobs not shown" in text
    waiting = [{**job, "id": at, "status": "queued"} for at in range(5000)]
    running = {**job, "id": 7, "name": "r", "status": "running"}
    assert "running" in plain(lists.jobs_table([running, *waiting], 10.0, False))
    assert "4,800 more devices not shown" in text
    assert len(text.splitlines()) < 500
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", text)


def test_help_of_the_commands_needs_nothing_heavy():
    script = (
        "import sys, contextlib, hocket.cli\n"
        "with contextlib.suppress(SystemExit):\n"
        "    hocket.cli.main(['fleet', '--help'])\n"
        "for name in ('serve', 'submit', 'jobs', 'logs', 'explain', 'cancel', 'devices'):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        hocket.cli.main(['fleet', name, '--help'])\n"
        "heavy = {'fastapi', 'uvicorn', 'pydantic', 'numba', 'scipy', 'ray'} & set(sys.modules)\n"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (f'name = "x"\ncommand = ["true"]\ntotal_steps = {"9" * 5000}\n', "is not TOML"),
        (f'name = "x"\ncommand = ["true"]\ntotal_steps = {"9" * 4000}\n', "valid number"),
        (f'name = "{"n" * 300}"\ncommand = ["true"]\n', "at most 200"),
        (None, "pipe"),
    ],
)
def test_job_files_that_no_one_can_mean_are_refused(fleet, tmp_path, content, says):
    fleet.state.mkdir()
    for name in ("job.toml", os.fsdecode(b"j\xffb.toml")):
        path = tmp_path / name
        if content is None:
            os.mkfifo(path)
        else:
            path.write_text(content)
        fleet.type("submit", str(path), code=3)
        assert says in fleet.said
    fleet.type("submit", str(tmp_path / ("n" * 300)), code=3)
    fleet.state = tmp_path / ("n" * 300)
    fleet.type("jobs", code=2)
    assert "no fleet was ever served" in fleet.said
