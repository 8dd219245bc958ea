"""The actor of Ray that runs one node's part of an attempt.

It is up before anything runs, so that a gang begins only when all its nodes are there, and runs
the command only on request (`begin`), at most once in its life. Raylet, actor, supervisor
and command are a chain in which each is killed by the kernel when the one before it ends: an actor
that is dead for Ray may live for a second after its raylet otherwise, and with it the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hocket.processes import system
from hocket.processes.start import start_module
from hocket.service.executors.attempt_folder import (
    ASSIGNMENT,
    MARK,
    Result,
    ask_to_stop,
    read_result,
    try_lock,
    write_json,
)
from hocket.service.executors.supervisor import free_port

VISIBLE_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
    "ASCEND_RT_VISIBLE_DEVICES",
    "NEURON_RT_VISIBLE_CORES",
    "TPU_VISIBLE_CHIPS",
)
"""Variables that Ray sets for the devices that it reserved."""


_PREFIX = "hocket-attempt-"


class Supervisor:
    """Runs one order on the node where Ray put this actor."""

    def __init__(self, order: dict[str, Any]) -> None:
        system.die_with(os.getppid())
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None
        self._result: Result | None = None
        self._is_stopped = False
        self._is_settled = asyncio.Event()
        """True if the command began or never will: Ray may deliver calls in another order."""
        self._folder = ""
        """Of what `begin` began, on this node."""
        self._port = free_port("")

    async def meet(self) -> int:
        """A port for the rendezvous of ranks; an answer shows that the node is up."""
        return self._port

    async def begin(self, meeting: tuple[str, int]) -> None:
        """Run the command unless that was done before, or the attempt was stopped."""
        if self._process is not None or self._is_stopped:
            return
        _remove_forgotten()
        self._folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{_identity(os.getpid())}-")
        write_json(os.path.join(self._folder, ASSIGNMENT), _completed(self._order, meeting))
        self._process = start_module(
            "hocket.service.executors.ray_attempt",
            [self._folder, str(os.getpid())],
            output=subprocess.DEVNULL,
            folder="/",
            is_own_session=False,
        )
        self._is_settled.set()

    async def ended(self) -> tuple[int, str, bool]:
        """Wait for the end of what `begin` began: exit code, reason, and whether it is lost."""
        await self._is_settled.wait()
        if self._process is None:
            return -signal.SIGTERM, "stopped before it began", False
        await asyncio.to_thread(self._process.wait)
        if self._result is None:
            self._result = read_result(self._folder) or await self._swept()
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._result.exit_code, self._result.detail, self._result.is_lost

    async def stop(self, grace_s: float) -> None:
        """End the command, or see to it that it never begins."""
        self._is_stopped = True
        self._is_settled.set()
        if self._process is not None and self._process.poll() is None:
            ask_to_stop(self._folder, grace_s)

    async def _swept(self) -> Result:
        """Kill what a dead supervisor left behind, until nothing is found twice."""
        mark = f"{MARK}={self._order['mark']}"
        while left := system.marked(mark) or system.marked(mark):
            system.send_all(left, signal.SIGKILL)
            await asyncio.sleep(0.05)
        return Result(-signal.SIGKILL, "its supervisor was killed", is_lost=True)


def _completed(order: dict[str, Any], meeting: tuple[str, int]) -> dict[str, Any]:
    """The order with what is known only on its node, and when all nodes are there."""
    address, port = meeting
    # Empty where Ray reserved none: that would hide devices which Ray does not know of.
    visible = {name: os.environ[name] for name in VISIBLE_DEVICES if os.environ.get(name)}
    ranks = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    given = ranks if order["processes"] == "per-device" else {}
    return order | {"environment": visible | given | order["environment"], "grace_s": 0.0}


def _identity(pid: int) -> str:
    found = system.process(pid)
    return f"{pid}-{found.start_ticks}" if found else ""


def _remove_forgotten() -> None:
    """Remove folders of actors that were killed together with what they began, as nodes are."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*-*"):
        owner = folder.name.removeprefix(_PREFIX).rpartition("-")[0]
        pid = owner.partition("-")[0]
        if not pid.isdecimal() or owner == _identity(int(pid)):
            continue
        with contextlib.suppress(OSError):
            # Others may put what they like into a common folder, a link too.
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            # What an orphan still uses it removes itself.
            if (lock := try_lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
