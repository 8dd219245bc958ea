"""A service that really runs and the commands typed at it, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from patience import wait_until

import hocket.cli

SECRET = "swordfish-0123456789"
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
        self.addresses: dict[str, str] = {}
        """What ``serve`` printed, where a test kept it."""

    def serve(self, *options: str) -> dict:
        command = [sys.executable, "-m", "hocket", "fleet", "serve", "--state", str(self.state)]
        self.process = subprocess.Popen(
            [*command, "--devices", "v100:1,k80:1", "--round", "300", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PASSWORD_OF_THE_OPERATOR": SECRET},
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


@contextlib.contextmanager
def fleet_in(folder: Path, capsys=None) -> Iterator[Fleet]:
    """A fleet whose processes all end with the test."""
    fleet = Fleet(folder, capsys)
    yield fleet
    # Jobs outlive the service: those of a test that failed must not outlive the test.
    (folder / "stop").touch()
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
