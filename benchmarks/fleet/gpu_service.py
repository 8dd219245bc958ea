"""``hocket fleet serve`` on one device as a process, and trainings handed to it by its commands.

Used by ``gpu.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import trials
from gpu_findings import read_ledger

from hocket.processes import system
from hocket.service.client import FleetClient
from hocket.service.executors.attempt_folder import RUNNING, read_json

HOCKET = (sys.executable, "-m", "hocket")
TRAIN = Path(__file__).resolve().with_name("gpu_train.py")
SOURCES = Path(__file__).resolve().parents[2] / "src"
SAVE_S = 15.0
wait_until = partial(trials.wait_until, patience_s=150.0)


class Service:
    """``hocket fleet serve`` on one device, and its commands."""

    def __init__(self, folder: Path, device: str, round_s: float) -> None:
        self.folder, self.state = folder, folder / "state"
        self._device, self._round_s = device, round_s
        self.jobs: dict[str, int] = {}
        self.client: FleetClient
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the daemon, and wait until it answers."""
        options = ["--on", "local", "--devices", "h200:1", "--round", str(self._round_s)]
        command = [*HOCKET, "fleet", "serve", *options, "--state", str(self.state)]
        with open(self.folder / "serve.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
        self.client = wait_until(self._connected, "the service answers")

    def _connected(self) -> FleetClient | None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the service ended with {self.process.returncode}")
        return trials.connected(self.state)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def command(self, *words: str) -> Any:
        """What a command of the service answers."""
        told = subprocess.run(
            [*HOCKET, "fleet", *words, "--state", str(self.state), "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
        if told.returncode != 0:
            raise RuntimeError(f"hocket fleet {' '.join(words)}: {told.stderr}")
        return json.loads(told.stdout)

    def submit(
        self,
        name: str,
        *,
        weight: float = 1.0,
        steps: int | None = None,
        is_plain: bool = False,
        is_exact: bool = True,
        save_every_s: float = SAVE_S,
    ) -> None:
        """Hand in a training; one without ``steps`` goes on until it is cancelled."""
        options = ["--folder", self.folder, "--name", name, "--device", self._device]
        options += ["--save-every-s", save_every_s]
        options += [] if steps is None else ["--steps", steps]
        options += ["--plain"] * is_plain + ["--deterministic"] * is_exact
        spec = {
            "name": name,
            "command": [sys.executable, str(TRAIN), *map(str, options)],
            "resume": ["--resume"] if is_plain else [],
            "weight": weight,
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in spec.items()]
        lines += ["[environment]"]
        lines += [f"{key} = {json.dumps(text)}" for key, text in self._environment().items()]
        path = self.folder / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n")
        self.jobs[name] = self.command("submit", str(path))["id"]

    def _environment(self) -> dict[str, str]:
        # cuBLAS gives the same sums again only with a workspace of fixed size.
        exact = {"PYTHONPATH": python_path(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        return exact if self._device == "cuda" else {**exact, "OMP_NUM_THREADS": "1"}

    def job(self, name: str) -> Any:
        return self.client.get(f"/v1/jobs/{self.jobs[name]}")

    def attempts(self, name: str) -> list[dict[str, Any]]:
        return list(self.client.get(f"/v1/jobs/{self.jobs[name]}/attempts")["attempts"])

    def checkpoint_step(self, name: str) -> int:
        """Of the newest checkpoint that counts; -1 where there is none."""
        found = self.client.get(f"/v1/jobs/{self.jobs[name]}/checkpoints")["checkpoints"]
        return max((int(one["step"]) for one in found), default=-1)

    def training(self, name: str) -> system.Process | None:
        """The process of the newest attempt."""
        folder = self.state / "attempts" / f"{self.jobs[name]}-{self.job(name)['attempt']}"
        told = read_json(folder / RUNNING)
        return None if told is None else system.process(told["commands"][0]["pid"])

    def wait_for_success(self, name: str) -> None:
        def has_ended() -> bool:
            job = self.job(name)
            if job["status"] == "failed" or job["failures"]:
                raise RuntimeError(f"job {name}: {job['status']}, {job['message']}")
            return bool(job["status"] == "succeeded")

        wait_until(has_ended, f"job {name} succeeded")

    def close(self) -> None:
        """End what is left, then the service."""
        try:
            for name in self.jobs:
                if self.job(name)["ended_s"] is None:
                    self.command("cancel", str(self.jobs[name]))
            wait_until(self._is_idle, "all attempts ended")
        finally:
            self.process.terminate()
            self.process.wait()

    def _is_idle(self) -> bool:
        ends = [one["ended_s"] for name in self.jobs for one in self.attempts(name)]
        return None not in ends

    def steps_of(self, name: str, attempt: int) -> list[dict[str, Any]]:
        return [
            event
            for event in read_ledger(self.folder)
            if (event["job"], event["attempt"], event["what"]) == (name, attempt, "step")
        ]


def python_path() -> str:
    """Where packages are found, from any folder: attempts run in their own."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(SOURCES), *(os.path.abspath(one) for one in given if one)])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path()}
