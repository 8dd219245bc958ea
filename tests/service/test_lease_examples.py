"""The examples end with the same weights, interrupted or not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from patience import wait_until
from service.lease_server import LeaseServer

from hocket.service.spec import read_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(script, folder, *arguments, variables=None):
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), "--steps", "120", *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})},
        cwd=folder,
        stdout=subprocess.PIPE,
    )


def _weights(path):
    with np.load(path, allow_pickle=False) as file:
        return file["weights"]


def test_a_training_goes_on_where_it_was_stopped(tmp_path):
    straight = _run("fleet_train_plain.py", tmp_path)
    assert straight.communicate()[0].startswith(b"done after 120 steps")
    with LeaseServer() as server:
        first = _run(
            "fleet_train.py", tmp_path, "--step-seconds", "0.02", variables=server.variables()
        )
        assert first.stdout.readline().startswith(b"step 0")
        first.send_signal(signal.SIGTERM)
        output, _ = first.communicate()
        assert first.returncode == 0
        assert b"done" not in output
        (stopped,) = server.checkpoints
        assert 0 < stopped["step"] < 120
        server.current = (7, 3)
        resumed = {**server.variables(attempt=3), "HOCKET_CHECKPOINT": stopped["path"]}
        second = _run("fleet_train.py", tmp_path, variables=resumed)
        assert b"done after 120 steps" in second.communicate()[0]
        assert server.checkpoints[-1]["step"] == 120
        last = Path(server.checkpoints[-1]["path"]) / "model.npz"
    assert np.array_equal(_weights(last), _weights(tmp_path / "model.npz"))


def test_a_plain_script_resumes_from_what_it_saved(tmp_path):
    first = _run("fleet_train_plain.py", tmp_path, "--step-seconds", "0.02", "--save-every", "5")
    wait_until(lambda: (tmp_path / "model.npz").exists())
    first.kill()
    first.communicate()
    kept = tmp_path / "kept.npz"
    resumed = _run("fleet_train_plain.py", tmp_path, "--resume")
    assert resumed.communicate()[0].startswith(b"done after 120 steps")
    (tmp_path / "model.npz").rename(kept)
    _run("fleet_train_plain.py", tmp_path).communicate()
    assert np.array_equal(_weights(kept), _weights(tmp_path / "model.npz"))


@pytest.mark.parametrize("name", ["fleet_train", "fleet_train_plain"])
def test_the_job_files_of_the_examples_can_be_read(name):
    spec = read_spec(EXAMPLES / f"{name}.toml")
    assert spec.command[1].endswith(f"{name}.py")
    assert spec.total_steps == 2000
