"""Ranks that a group starts, forked from a process that has imported PyTorch.

For tests of what ranks compute: five seconds of a processor for each that starts as a new Python.
How worker groups start, watch and end processes is tested with real ones (`tests/processes`).
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from forked import CONTEXT, Descriptor, rates, take_rates

from hocket.base import config
from hocket.processes.start import start_module

MODULES = {
    "hocket.runtime.run_rank", "hocket.runtime.rank_script",
}  # fmt: skip


@contextlib.contextmanager
def forked_worker_groups() -> Iterator[None]:
    """Within, worker groups of this process have forked ranks."""
    with mock.patch("hocket.processes.worker.start_module", _start):
        yield


class ForkedModule:
    """``python -m module``, with what a group uses of `subprocess.Popen`."""

    def __init__(
        self, module: str, arguments: Sequence[str], outputs: Sequence[int],
        variables: Mapping[str, str], folder: str, descriptors: Sequence[int],
    ) -> None:  # fmt: skip
        given = [Descriptor(number) for number in (*outputs, *descriptors)]
        self._process = CONTEXT.Process(
            target=_live, args=(given, module, list(arguments), dict(variables), folder, rates())
        )
        self._process.start()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """How it ended; None before."""
        return self._process.exitcode if self._exit_code is None else self._exit_code

    def kill(self) -> None:
        """At once."""
        if self.poll() is None:
            self._process.kill()

    def wait(self) -> int:
        """Until it has ended."""
        if self._exit_code is None:
            self._process.join()
            self._exit_code = self._process.exitcode
            self._process.close()
        assert self._exit_code is not None, "it has ended"
        return self._exit_code


def _start(
    module: str, arguments: Sequence[str] = (), *, output: Any, errors: Any = None,
    folder: str | None = None, environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (), **more: Any,
) -> ForkedModule | subprocess.Popen[bytes]:  # fmt: skip
    if module not in MODULES:
        return start_module(
            module, arguments, output=output, errors=errors, folder=folder,
            environment=environment, descriptors=descriptors, **more,
        )  # fmt: skip
    places = (output, output if errors is None else errors)
    return ForkedModule(
        module, arguments, [p if isinstance(p, int) else p.fileno() for p in places],
        config.environment_anywhere() if environment is None else environment,
        os.getcwd() if folder is None else folder, descriptors,
    )  # fmt: skip


def _live(
    descriptors: list[int], module: str, arguments: list[str], variables: dict[str, str],
    folder: str, known: tuple[tuple[float, float], float],
) -> None:  # fmt: skip
    os.setsid()
    take_rates(known)
    output, errors, *given = descriptors
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    # Its pipes have other numbers here, and the process that made it is the fork server.
    sys.argv = [module, ",".join(map(str, (*given, os.getppid()))), *arguments[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=False)
