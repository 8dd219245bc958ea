"""The one place where processes of our own are made.

A child asks the kernel to end it with its parent, and for the kernel that is the thread that made
it. So all are made by one thread that ends with the process.
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
"""At most one; a forked process makes its own, for threads stay behind."""
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
    """Start ``python -m module arguments``; what it prints goes to ``output``.

    What it prints to standard error goes to ``errors`` where that is another place.

    It runs in a session of its own unless told otherwise: Ctrl-C in a terminal reaches only us. It
    goes on when this process ends, unless it asks for the opposite (`hocket.processes.child`).
    """
    return (
        _starter()
        .submit(
            subprocess.Popen,
            # Without the working folder on the import path: a file there is no part of the program.
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
