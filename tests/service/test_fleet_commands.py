"""The commands of the fleet as a user types them, against a service that really runs."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from patience import wait_until
from service.fleet_terminal import HOSTILE, fleet_in, job_file

from hocket.service import client as clients
from hocket.service.pinned_tls import PinnedConnection
from hocket.service.store import Store


@pytest.fixture
def fleet(tmp_path, capsys):
    with fleet_in(tmp_path, capsys) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A service for several tests, as its start takes longest."""
    with fleet_in(tmp_path_factory.mktemp("fleet")) as fleet:
        fleet.addresses = fleet.serve("--tls", "127.0.0.1:0")
        yield fleet


@pytest.fixture
def served(shared, capsys):
    shared.capsys = capsys
    return shared


@pytest.mark.slow
def test_a_bare_python_is_the_one_that_submits_and_failed_jobs_are_shown(served, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "who"\ncommand = ["python", "-c", "import sys; print(sys.executable)"]\n'
    )
    out = served.type("submit", str(path), "--follow")
    assert out.strip() == sys.executable
    path.write_text('name = "who"\ncommand = ["./not-there"]\n')
    number = served.type("submit", str(path)).strip()
    served.wait_for(int(number), "failed")
    table = served.type("jobs")
    assert re.search(rf"{number} +who +failed", table)
    assert f"see hocket fleet logs {number}" in " ".join(table.split())


@pytest.mark.slow
def test_a_tls_port_of_0_stands_for_a_free_port_which_is_reported(shared):
    address = urlsplit(shared.addresses["secure_url"])
    assert address.port >= 1024, "the system gives no lower port where any will do"
    connection = PinnedConnection(address.netloc, shared.addresses["fingerprint"], 120.0)
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        assert (answer.status, bool(answer.read())) == (200, True)


@pytest.mark.slow
def test_a_second_ctrl_c_prints_no_traceback(fleet):
    fleet.serve()
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.end(signal.SIGINT) == (0, "")


@pytest.mark.slow
def test_a_day_with_the_service(served, tmp_path):
    stop = tmp_path / "stop"
    path = job_file(tmp_path, HOSTILE, stop)
    number = served.type("submit", str(path)).strip()
    assert f"explain {number}" in served.said
    served.wait_for(int(number), "running")

    table = served.type("jobs")
    assert "running" in table
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", table)
    assert f"job {number}" in served.type("devices")
    assert served.type("explain", number).startswith(f"job {number} runs on")
    output = wait_until(lambda: text if "tick 3" in (text := served.type("logs", number)) else "")
    assert output.startswith(f"args ['{stop}', '$(x); y'] attempt 1\ntick 0\n")
    assert served.type("logs", number, "--tail", "1").startswith("tick ")
    assert not (tmp_path / "pwned").exists()

    second = subprocess.run(
        [sys.executable, "-m", "hocket", "fleet", "serve", "--state", str(served.state),
         "--devices", "v100:1"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert second.returncode == 3
    said = " ".join(second.stderr.split())
    assert f"another daemon or agent runs on this folder (process {served.process.pid})" in said

    assert f"job {number} is" in served.type("pause", number)
    served.wait_for(int(number), "paused")
    assert "is paused" in served.type("explain", number)
    served.type("resume", number)
    assert served.wait_for(int(number), "running")["attempt"] == 2
    wait_until(lambda: "'--again'] attempt 2" in served.type("logs", number))
    stop.touch()
    assert served.wait_for(int(number), "succeeded")["message"] == "finished"
    served.type("cancel", number, code=2)
    assert "has ended" in served.said

    stop.unlink()
    other = served.type("submit", str(path)).strip()
    served.wait_for(int(other), "running")
    assert f"job {other} is" in served.type("cancel", other)
    served.wait_for(int(other), "cancelled")
    served.type("explain", "77", code=2)
    assert "no job 77" in served.said


@pytest.mark.slow
def test_a_follower_sees_all_of_a_job_whose_service_was_killed(fleet, tmp_path):
    """The service comes back at the same address and takes over what runs."""
    url = fleet.serve()["url"]
    stop = tmp_path / "stop"
    fleet.type("submit", str(job_file(tmp_path, HOSTILE, stop)))
    wait_until(lambda: "tick 1" in fleet.type("logs", "1"))
    fleet.type("pause", "1")
    fleet.wait_for(1, "paused")
    fleet.type("resume", "1")
    wait_until(lambda: "'--again'] attempt 2" in fleet.type("logs", "1"))
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
    # Not by communicate, which would pass over lines that were read ahead.
    with follower.stdout as output:
        rest = output.read()
    assert follower.wait(60) == 0
    fleet.follower = None
    first, second = ("".join(seen) + rest).split("args ")[1:]
    assert "tick 1" in first
    ticks = [int(tick) for tick in re.findall(r"tick (\d+)", second)]
    assert ticks == list(range(len(ticks)))
    assert second.endswith("done\n")
    code, errors = fleet.end(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.slow
def test_following_an_array_shows_all_its_jobs_in_order(served, tmp_path):
    shows = "import os; index = os.environ['HOCKET_ARRAY_INDEX']; print('index', index)"
    path = tmp_path / "array.toml"
    text = 'name = "a"\ncommand = ["python", "-c", "{}"]\narray = 3\nretries = 0\n'
    path.write_text(text.format(shows))
    output = served.type("submit", str(path), "--follow")
    assert output.count("index") == 3
    path.write_text(text.format("import time; time.sleep(600)"))
    first = int(served.type("submit", str(path)))
    served.type("cancel", "--array", str(first + 1))
    ended = [job for job in served.ask("jobs", "--all")["jobs"] if job["id"] >= first]
    assert {job["status"] for job in ended} <= {"cancelled", "stopping"}
    assert len(ended) == 3
    assert output.index("index 0") < output.index("index 1") < output.index("index 2")
    path.write_text(text.format(f"{shows}; raise SystemExit(index == '1')"))
    output = served.type("submit", str(path), "--follow", "--json", code=5)
    found, _ = json.JSONDecoder().raw_decode(output)
    assert [job["status"] for job in found["jobs"]] == ["succeeded", "failed", "succeeded"]


@pytest.mark.slow
def test_following_a_job_from_its_submission(served, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('name = "short"\ncommand = ["sh", "-c", "echo hello; exit 0"]\n')
    served.ask("submit", str(path), "--follow")
    path.write_text('name = "bad"\ncommand = ["sh", "-c", "exit 7"]\n')
    output = served.type("submit", str(path), "--follow", "--json", code=5)
    answer, _ = json.JSONDecoder().raw_decode(output)
    assert answer["status"] == "failed"
    assert "exit code 7" in answer["message"]


@pytest.mark.slow
def test_a_training_with_a_lease_goes_on_from_its_checkpoint(served, tmp_path):
    example = Path(__file__).parents[2] / "examples/fleet_train.py"
    command = [sys.executable, "-u", str(example), "--steps", "100", "--step-seconds", "0.05"]
    path = tmp_path / "job.toml"
    path.write_text(f'name = "training"\ncommand = {json.dumps(command)}\ntotal_steps = 100\n')
    number = served.type("submit", str(path)).strip()
    served.wait_for(int(number), "running")
    wait_until(lambda: "step 0" in served.type("logs", number))
    served.type("pause", number)
    served.wait_for(int(number), "paused")
    client = clients.find_service(served.state)
    (checkpoint,) = client.get(f"/v1/jobs/{number}/checkpoints")["checkpoints"]
    assert 0 < checkpoint["step"] < 100
    served.type("resume", number)
    assert served.wait_for(int(number), "succeeded")["done_steps"] == 100
    last = client.get(f"/v1/jobs/{number}/checkpoints")["checkpoints"][-1]
    assert (last["attempt"], last["step"]) == (2, 100)
    (first, second) = client.get(f"/v1/jobs/{number}/attempts")["attempts"]
    assert (first["outcome"], second["outcome"]) == ("paused", "finished")


@pytest.mark.slow
def test_a_damaged_state_is_refused_and_can_be_set_aside(fleet):
    Store.open(fleet.state).close()
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
    assert fleet.end(signal.SIGINT)[0] == 0
