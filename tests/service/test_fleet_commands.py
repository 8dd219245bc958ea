"""The commands of the fleet as a user types them, against a service that really runs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from service.fleet_terminal import HOSTILE, fleet_in, job_file
from service.rest_service import wait_until

from hocket.service import client as clients
from hocket.service.store import Store


@pytest.fixture
def fleet(tmp_path, capsys):
    with fleet_in(tmp_path, capsys) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A service for several tests, as its start takes longest."""
    with fleet_in(tmp_path_factory.mktemp("fleet")) as fleet:
        fleet.serve()
        yield fleet


@pytest.fixture
def served(shared, capsys):
    shared.capsys = capsys
    return shared


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
    said = " ".join(second.stderr.split())
    assert f"another daemon runs on this state folder (process {fleet.process.pid})" in said

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
