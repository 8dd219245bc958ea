"""The commands of the fleet as a user types them, against a service that really runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from service.rest_service import wait_until

import hocket.cli
from hocket.cli.fleet import connection, tables
from hocket.service import client as clients
from hocket.view.table import plain

HOSTILE = "evil\x1b[31m\n\u202e<script>$(touch pwned)"
SCRIPT = """
import os, pathlib, sys, time
print("args", sys.argv[1:], "attempt", os.environ["HOCKET_ATTEMPT"], flush=True)
stop = pathlib.Path(sys.argv[1])
tick = 0
while not stop.exists():
    print("tick", tick, flush=True)
    tick += 1
    time.sleep(0.05)
print("done", flush=True)
"""


class Fleet:
    """A state folder, the service on it, and commands that use it."""

    def __init__(self, folder: Path, capsys):
        self.state, self.folder, self.capsys = folder / "state", folder, capsys
        self.process: subprocess.Popen[str] | None = None
        self.follower: subprocess.Popen[str] | None = None

    def serve(self, *options: str) -> dict:
        command = [sys.executable, "-m", "hocket", "fleet", "serve", "--state", str(self.state)]
        self.process = subprocess.Popen(
            [*command, "--devices", "v100:1,k80:1", "--round", "300", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line == "}\n":
                break
        answer = json.loads("".join(lines) or "{}")
        assert "url" in answer, (lines, self.process.communicate())
        return answer

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and what it said; all that it started goes on."""
        assert self.process is not None
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        code, self.process = self.process.returncode, None
        return code, errors

    def type(self, *arguments: str, code: int = 0) -> str:
        """What a command prints; its messages are left in ``said``."""
        try:
            hocket.cli.main(["fleet", *arguments, "--state", str(self.state)])
            found = 0
        except SystemExit as exit:
            found = exit.code or 0
        out, self.said = self.capsys.readouterr()
        assert found == code, (out, self.said)
        return out

    def ask(self, *arguments: str) -> dict:
        return json.loads(self.type(*arguments, "--json"))

    def job(self, number: int) -> dict:
        return next(job for job in self.ask("jobs", "--all")["jobs"] if job["id"] == number)

    def wait_for(self, number: int, status: str) -> dict:
        return wait_until(lambda: job if (job := self.job(number))["status"] == status else None)


@pytest.fixture
def fleet(tmp_path, capsys):
    fleet = Fleet(tmp_path, capsys)
    yield fleet
    # Jobs outlive the service: those of a test that failed must not outlive the test.
    (tmp_path / "stop").touch()
    for process in (fleet.process, fleet.follower):
        if process is not None:
            process.kill()
            process.communicate()


def job_file(folder: Path, name: str, stop: Path) -> Path:
    (folder / "work.py").write_text(SCRIPT)
    path = folder / "job.toml"
    path.write_text(
        f"name = {json.dumps(name)}\n"
        f'command = [{json.dumps(sys.executable)}, "work.py", {json.dumps(str(stop))}, "$(x); y"]\n'
        'resume = ["--again"]\nfolder = "."\ngrace_s = 5\n'
    )
    return path


@pytest.mark.slow
def test_a_day_with_the_service(fleet, tmp_path):
    url = fleet.serve()["url"]
    stop = tmp_path / "stop"
    path = job_file(tmp_path, HOSTILE, stop)
    assert fleet.type("submit", str(path)) == "1\n"
    assert "explain 1" in fleet.said
    fleet.wait_for(1, "running")

    table = fleet.type("jobs")
    assert "running" in table
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", table)
    assert "job 1" in fleet.type("devices")
    assert fleet.type("explain", "1").startswith("job 1 runs on")
    output = wait_until(lambda: text if "tick 3" in (text := fleet.type("logs", "1")) else "")
    assert output.startswith(f"args ['{stop}', '$(x); y'] attempt 1\ntick 0\n")
    assert fleet.type("logs", "1", "--tail", "1").startswith("tick ")
    assert not (tmp_path / "pwned").exists()

    second = subprocess.run(
        [sys.executable, "-m", "hocket", "fleet", "serve", "--state", str(fleet.state),
         "--devices", "v100:1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert second.returncode == 3
    assert f"process {fleet.process.pid}" in second.stderr

    assert "job 1 is" in fleet.type("pause", "1")
    fleet.wait_for(1, "paused")
    assert "is paused" in fleet.type("explain", "1")
    fleet.type("resume", "1")
    job = fleet.wait_for(1, "running")
    assert job["attempt"] == 2
    wait_until(lambda: "'--again'] attempt 2" in fleet.type("logs", "1"))

    # Somebody follows while the service is killed and comes back at the same address.
    fleet.follower = follower = subprocess.Popen(
        [sys.executable, "-m", "hocket", "fleet", "logs", "1", "-f", "--state", str(fleet.state)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follower.stdout is not None
    seen = [follower.stdout.readline() for _ in range(5)]
    assert fleet.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert fleet.serve()["url"] == url
    job = fleet.wait_for(1, "running")
    assert job["attempt"] == 2, "it was taken over, not started again"
    stop.touch()
    rest, _ = follower.communicate(timeout=60)
    fleet.follower = None
    assert follower.returncode == 0
    lines = "".join(seen) + rest
    attempts = lines.split("args ")[1:]
    assert len(attempts) == 2
    ticks = [int(tick) for tick in re.findall(r"tick (\d+)", attempts[1])]
    assert ticks == list(range(len(ticks)))
    assert attempts[1].endswith("done\n")
    assert fleet.wait_for(1, "succeeded")["message"] == "finished"

    stop.unlink()
    fleet.type("submit", str(path))
    fleet.wait_for(2, "running")
    assert "job 2 is" in fleet.type("cancel", "2")
    fleet.wait_for(2, "cancelled")
    fleet.type("cancel", "1", code=2)
    assert "has ended" in fleet.said
    fleet.type("explain", "77", code=2)
    assert "no job 77" in fleet.said
    code, errors = fleet.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.slow
def test_following_a_job_from_its_submission(fleet, tmp_path):
    fleet.serve()
    path = tmp_path / "job.toml"
    path.write_text('name = "short"\ncommand = ["sh", "-c", "echo hello; exit 0"]\n')
    fleet.ask("submit", str(path), "--follow")
    path.write_text('name = "bad"\ncommand = ["sh", "-c", "exit 7"]\n')
    output = fleet.type("submit", str(path), "--follow", "--json", code=5)
    answer, _ = json.JSONDecoder().raw_decode(output)
    assert answer["status"] == "failed"
    assert "exit code 7" in answer["message"]
    assert fleet.end(signal.SIGINT)[0] == 0


@pytest.mark.slow
def test_a_training_with_a_lease_goes_on_from_its_checkpoint(fleet, tmp_path):
    fleet.serve()
    example = Path(__file__).parents[2] / "examples/fleet_train.py"
    command = [sys.executable, "-u", str(example), "--steps", "100", "--step-seconds", "0.05"]
    path = tmp_path / "job.toml"
    path.write_text(f'name = "training"\ncommand = {json.dumps(command)}\ntotal_steps = 100\n')
    fleet.type("submit", str(path))
    fleet.wait_for(1, "running")
    wait_until(lambda: "step 0" in fleet.type("logs", "1"))
    fleet.type("pause", "1")
    fleet.wait_for(1, "paused")
    client = clients.find_service(fleet.state)
    (checkpoint,) = client.get("/v1/jobs/1/checkpoints")["checkpoints"]
    assert 0 < checkpoint["step"] < 100
    fleet.type("resume", "1")
    assert fleet.wait_for(1, "succeeded")["done_steps"] == 100
    last = client.get("/v1/jobs/1/checkpoints")["checkpoints"][-1]
    assert (last["attempt"], last["step"]) == (2, 100)
    (first, second) = client.get("/v1/jobs/1/attempts")["attempts"]
    assert (first["outcome"], second["outcome"]) == ("paused", "finished")


@pytest.mark.slow
def test_a_damaged_state_is_refused_and_can_be_set_aside(fleet):
    fleet.serve()
    fleet.end()
    database = fleet.state / "fleet.db"
    data = bytearray(database.read_bytes())
    data[len(data) // 2 :] = b"\x5a" * (len(data) - len(data) // 2)
    database.write_bytes(data)
    command = [sys.executable, "-m", "hocket", "fleet", "serve", "--state", str(fleet.state)]
    refused = subprocess.run(
        [*command, "--devices", "v100:1"], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 3
    assert "--discard-state" in refused.stderr
    fleet.serve("--discard-state")
    assert fleet.ask("jobs", "--all") == {"jobs": []}
    (kept,) = fleet.state.glob("damaged-*")
    assert (kept / "fleet.db").read_bytes() == bytes(data)


# ── without a service ────────────────────────────────────────────────────────────────────────────


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
        (("--devices", "v100:1", "--team", "a=-1"), "cannot read --team"),
        (("--devices", "v100:1", "--kinds", "v100"), "--kinds is for Ray and Slurm"),
        (("--devices", "v100:99999999x9"), "more than 1,000,000 devices"),
        (("--devices", "v100:1", "--round", "nan"), "no finite number"),
        (("--devices", "v100:1", "--min-run", "inf"), "no finite number"),
    ],
)
def test_serve_refuses_what_it_cannot_do(fleet, arguments, message):
    fleet.type("serve", *arguments, code=2)
    assert message in fleet.said


def test_serve_says_that_it_compiles(fleet, monkeypatch):
    monkeypatch.setattr("hocket.fleet.rounds.kernels.kernels_are_compiled", lambda: False)
    fleet.type("serve", "--on", "slurm", "--devices", "v100:1", code=2)
    assert "compiling" not in fleet.said
    monkeypatch.setattr("hocket.service.serve.serve", lambda settings, on_ready: None)
    fleet.type("serve", "--devices", "v100:1")
    assert "compiling the kernels" in fleet.said


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


def test_no_service_is_told_in_one_sentence(fleet, monkeypatch):
    fleet.type("jobs", code=2)
    assert "no fleet was ever served" in fleet.said
    monkeypatch.setattr(clients, "PATIENCE_S", 0.0)
    fleet.state.mkdir()
    (fleet.state / "token").write_text("t" * 40)
    os.chmod(fleet.state / "token", 0o600)
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
        (200, b"<html>", 5, "is no fleet service"),
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
    text = plain(tables.jobs_table([{**job, "id": at} for at in range(5000)], 10.0, True))
    device = {"name": HOSTILE, "kind": HOSTILE, "server": HOSTILE, "is_up": False, "jobs": []}
    text += plain(tables.devices_table([device] * 5000))
    assert "4,800 older jobs not shown" in text
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
