"""Commands as a user types them, in this process."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from hocket.cli import main

PLAIN = {"COLUMNS": "100", "NO_COLOR": "1"}
PARALLEL_KEYS = {
    "tensor", "pipeline", "data", "context", "expert", "chunks", "microbatch", "schedule",
    "recompute", "zero", "sequence_parallel", "step_s", "tokens_per_s", "mfu", "peak_bytes",
    "bubble", "feasible", "reason",
}  # fmt: skip
"""What ``hocket parallel --json`` says of a configuration."""


class Said(NamedTuple):
    """What a command wrote."""

    stdout: str
    stderr: str


def exit_code(arguments: list[str]) -> int:
    """The code with which a command ends."""
    try:
        main(arguments)
    except SystemExit as done:
        return done.code or 0
    return 0


def hocket(*arguments: object, cwd: Path | str = ".", expect: int = 0) -> Said:
    """Run a command in this process, which saves the start of Python and all imports."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, PLAIN),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = exit_code([str(argument) for argument in arguments])
    return _checked(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode(), expect)


def _checked(code: int, stdout: str, stderr: str, expect: int) -> Said:
    assert code == expect, f"{code}\n{stdout}\n{stderr}"
    assert "Traceback" not in stderr
    return Said(stdout, stderr)
