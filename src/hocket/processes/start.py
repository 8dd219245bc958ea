"""Create child processes, all from one thread.

A child asks the kernel to end it together with its parent, and for the kernel the parent is the
thread that created the child. So one thread that lives as long as the process creates all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from hocket.base import config

_starters: list[ThreadPoolExecutor] = []
"""At most one executor; a forked process creates its own, because threads do not survive a fork."""
os.register_at_fork(after_in_child=_starters.clear)


def start_module(
    module: str,
    arguments: Sequence[str] = (),
    *,
    output: int | IO[Any],
    errors: int | IO[Any] | None = None,
    stdin: int = subprocess.DEVNULL,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    is_own_session: bool = True,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module arguments`` with its output redirected to ``output``.

    Standard error goes to ``errors``, by default to ``output``. By default the process has its own
    session, so that Ctrl-C in a terminal reaches only this process. The process outlives this one
    unless it requests otherwise (`hocket.processes.child`).
    """
    return (
        _starter()
        .submit(
            subprocess.Popen,
            # -P keeps the working folder off the import path, where a file could shadow a module of
            # the program.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=stdin,
            stdout=output,
            stderr=output if errors is None else errors,
            cwd=folder,
            env=config.environment_anywhere() if environment is None else dict(environment),
            pass_fds=tuple(descriptors),
            start_new_session=is_own_session,
        )
        .result()
    )


def _starter() -> ThreadPoolExecutor:
    if not _starters:
        _starters.append(ThreadPoolExecutor(1, "hocket-starter"))
    return _starters[0]
