"""Files that are none, and small files that would fill the memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable

import pytest

from hocket.base.errors import HocketError, InputFileError
from hocket.base.jsonfile import read_json
from hocket.base.regular import is_file, open_regular, read_regular
from hocket.cost.parallel.measured_runs import MAX_ROWS, read_records
from hocket.hardware.files import read_machine
from hocket.hardware.nccl_xml import read_nccl_machine
from hocket.transformer.files import MAX_LAYERS, find_model
from tests.cli.terminal import hocket

READERS: dict[str, Callable[..., object]] = {
    "json": read_json,
    "machine.toml": read_machine,
    "topology.xml": read_nccl_machine,
    "runs.csv": read_records,
    "model.toml": lambda path: find_model(str(path)),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_that_nobody_writes_to_is_refused_at_once(name, tmp_path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(InputFileError, match="pipe"):
        READERS[name](path)


@pytest.mark.parametrize("name", READERS)
def test_a_path_that_cannot_be_one_is_refused(name, tmp_path) -> None:
    for path in (tmp_path, tmp_path / ("n" * 300 + name), tmp_path / os.fsdecode(b"\xff.toml")):
        with pytest.raises(HocketError):
            READERS[name](path)


def test_what_cannot_be_a_path_is_no_file_and_no_model(tmp_path) -> None:
    for text in ("n" * 300, "n" * 300 + ".py:net", "zero\0", os.fsdecode(b"\xff")):
        assert not is_file(text)
    assert not is_file(tmp_path)
    said = hocket("plan", "n" * 300, "--on", "2xt4", cwd=tmp_path, expect=2).stderr
    assert "hint:" in said


def test_devices_are_no_files_and_sizes_are_bounded(tmp_path) -> None:
    with pytest.raises(OSError, match="not a file"):
        open_regular("/dev/zero")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    path = tmp_path / "some"
    path.write_bytes(b"x" * 10)
    assert read_regular(path, 10) == b"x" * 10
    with pytest.raises(InputFileError, match="is larger than"):
        read_regular(path, 9)


def test_a_file_that_says_it_is_huge_takes_no_memory(tmp_path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2**40)
    tracemalloc.start()
    try:
        with pytest.raises(InputFileError, match="larger than"):
            read_regular(path, 64 * 2**20)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_table_of_too_many_rows_is_refused_before_it_is_taken_apart(tmp_path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("step_s,tp\n" + "1,2\n" * (MAX_ROWS - 1))
    assert len(read_records(path)) == MAX_ROWS - 1
    path.write_text("step_s,tp\n" + "1,2\n" * 300_000)
    with pytest.raises(InputFileError, match="more than 10000 rows"):
        read_records(path)


@pytest.mark.parametrize("layers", [MAX_LAYERS + 1, 2**31 - 1, "9" * 5000])
def test_a_model_of_more_layers_than_memory_is_refused(layers, tmp_path) -> None:
    path = tmp_path / "deep.toml"
    sizes = "hidden = 64\nheads = 4\nvocabulary = 100\nsequence = 32\n"
    path.write_text(f"{sizes}layers = {layers}\n")
    with pytest.raises(InputFileError):
        find_model(str(path))
    path.write_text(f"{sizes}layers = {MAX_LAYERS}\n")
    assert find_model(str(path)).layers == MAX_LAYERS
