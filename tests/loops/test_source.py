"""Files that are looked into: plain ones only, and never waiting for one."""

from __future__ import annotations

import os

import pytest

from hocket.base.errors import InputFileError
from hocket.cli.loop import _arguments
from hocket.loops.source import parsed_source


def test_a_pipe_is_refused_as_source_and_as_data(tmp_path):
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    with pytest.raises(InputFileError, match="pipe"):
        parsed_source(pipe, "f")
    with pytest.raises(InputFileError, match="pipe"):
        _arguments(pipe, ("x",), ("x",))


def test_what_is_no_source_is_told_in_words(tmp_path):
    path = tmp_path / "deep.py"
    path.write_text("x = " + "(" * 5000)
    with pytest.raises(InputFileError, match="no Python source"):
        parsed_source(path, "f")
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(InputFileError, match="no Python source"):
        parsed_source(path, "f")
