"""``hocket fleet shell``: an interactive job on devices of the fleet, for a limited time.

The job connects back to a Unix socket of this command, which copies bytes between the socket and
the terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import click

from hocket.base.errors import RunError
from hocket.cli.declare import argument, declare, option
from hocket.cli.fleet.connection import Service
from hocket.cli.options import FiniteRange
from hocket.cli.output import emit, say

if TYPE_CHECKING:
    from hocket.service.client import FleetClient

_BLOCK_BYTES = 65536
_LOOK_S = 0.5


@declare("shell")
def command(
    *,
    service: Service,
    gang: Annotated[int, option("Devices.", type=click.IntRange(1, 1000))] = 1,
    device_type: Annotated[str | None, "Device type. [default: any]"] = None,
    time_limit_s: Annotated[
        float,
        option(
            "The shell is ended after so long.",
            "--time",
            type=FiniteRange(min=1.0, max=7 * 24 * 3600.0),
            metavar="SECONDS",
        ),
    ] = 3600.0,
    command: Annotated[tuple[str, ...], argument("[COMMAND...]", nargs=-1)],
    as_json: bool,
) -> None:
    """Open a shell (or COMMAND) on devices of the fleet, as a job that waits for its turn.

    It sees the devices that it got, runs in this folder, and ends with the shell or after --time.
    The service must run its jobs on this machine.
    """
    from hocket.service.client import job_path

    client = service.connect()
    with tempfile.TemporaryDirectory(prefix="hocket-shell-") as folder:
        # A folder in /tmp, because the path of a Unix socket may have at most 107 bytes.
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(1)
            job = _submit(client, path, gang, device_type, time_limit_s, command)
            say(f"job {job} waits for its devices; Ctrl-C cancels it")
            try:
                with _accepted(client, listener, job) as caller:
                    _talk(caller)
            finally:
                _cancel(client, job)
    if as_json:
        emit(client.get(job_path(job)))


def _submit(
    client: FleetClient,
    path: str,
    gang: int,
    device_type: str | None,
    time_limit_s: float,
    command: tuple[str, ...],
) -> int:
    from hocket.service.shell_job import SCRIPT as SHELL_JOB

    columns, rows = shutil.get_terminal_size()
    shell = command or (os.environ.get("SHELL") or "/bin/sh",)
    spec = {
        "name": "shell",
        "command": [sys.executable, "-P", SHELL_JOB, path, str(rows), str(columns), *shell],
        "folder": os.getcwd(),
        "environment": {"TERM": os.environ.get("TERM") or "xterm"},
        "gang": gang,
        "time_limit_s": time_limit_s,
        "retries": 0,
        "grace_s": 5.0,
        "preemptible": False,
    }
    if device_type is not None:
        spec["throughputs"] = {device_type: 1.0}
    number: int = client.submit(spec)["id"]
    return number


@contextlib.contextmanager
def _accepted(client: FleetClient, listener: socket.socket, job: int) -> Iterator[socket.socket]:
    from hocket.service.client import job_path
    from hocket.service.records import ENDED

    while not select.select([listener], [], [], _LOOK_S)[0]:
        found = client.get_patiently(job_path(job))
        if found["status"] in ENDED:
            raise RunError(f"job {job} {found['status']}: {found['message']}")
        # The job may be running on another machine, where this Unix socket does not exist.
        if found["status"] == "running" and found["started_s"] + 30.0 < time.time():
            hint = "the service must run its jobs on this machine"
            raise RunError(f"job {job} runs and does not answer", hint=hint)
    caller, _ = listener.accept()
    with caller:
        found = client.get_patiently(job_path(job))
        say(f"job {job} runs on {', '.join(found['devices'])}")
        yield caller


def _talk(caller: socket.socket) -> None:
    """Copy bytes between this terminal and the shell until one of them ends."""
    standard_input, output = sys.stdin.fileno(), sys.stdout.fileno()
    with _raw(standard_input):
        watched: list[int | socket.socket] = [standard_input, caller]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if caller in ready:
                data = caller.recv(_BLOCK_BYTES)
                # An empty read means that the shell has exited.
                if not data:
                    return
                os.write(output, data)
            if standard_input in ready:
                data = os.read(standard_input, _BLOCK_BYTES)
                if data:
                    caller.sendall(data)
                else:
                    # End of file: send Ctrl-D, as a terminal does.
                    caller.sendall(b"\x04")
                    watched.remove(standard_input)


@contextlib.contextmanager
def _raw(descriptor: int) -> Iterator[None]:
    """Put a terminal into raw mode; leave files and pipes unchanged."""
    import termios
    import tty

    if not os.isatty(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    try:
        # TCSADRAIN keeps what the user typed while the job waited; the default would discard it.
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _cancel(client: FleetClient, job: int) -> None:
    from hocket.service.client import RefusedByServiceError, job_path

    # A job that has already ended cannot be cancelled, and need not be.
    with contextlib.suppress(RefusedByServiceError):
        client.delete(job_path(job))
