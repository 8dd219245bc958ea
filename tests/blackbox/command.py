"""Run commands of hocket in this process, which saves the start of Python and all imports."""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from hocket.cli import main


class Ended(NamedTuple):
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        """Parsed output of a command that was given ``--json``."""
        return json.loads(self.stdout)


def hocket(*arguments: object, cwd: Path | str = ".") -> Ended:
    """Run ``hocket ARGUMENTS``."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, {"COLUMNS": "160", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())
