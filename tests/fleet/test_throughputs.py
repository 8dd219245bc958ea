"""Tables of throughputs: reading them, and guessing what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hocket.base.errors import InputFileError, UsageError
from hocket.fleet.throughputs import JobProfile, read_throughputs, stacked

DATA = Path(__file__).parents[3] / "shared" / "data" / "cluster"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public tables are not here")

A, B = "('a', 1)", "('b', 1)"
GOOD = {
    "fast": {A: {"null": 4.0, B: [3.0, 1.0]}, B: {"null": 2.0, A: [1.0, 3.0]}},
    "slow": {A: {"null": 1.0, B: [0.5, 0.0]}, B: {"null": 0.0, A: [0.0, 0.5]}},
}


def written(folder: Path, content: object) -> Path:
    path = folder / "throughputs.json"
    path.write_text(json.dumps(content))
    return path


def test_a_table_is_read_as_it_is(tmp_path: Path) -> None:
    table = read_throughputs(written(tmp_path, GOOD))
    assert table.profiles == (JobProfile("a", 1), JobProfile("b", 1))
    assert table.alone.tolist() == [[4.0, 1.0], [2.0, 0.0]]
    assert table.beside[0, 1].tolist() == [3.0, 0.0], "no sharing where one gets nowhere"
    assert table.on(("slow",)).alone.tolist() == [[1.0], [0.0]]
    assert table.find("b", 1) == 1
    assert table.find("b", 2) == -1
    with pytest.raises(UsageError, match="v100"):
        table.on(("v100",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "no device types"),
        ([], "throughputs is"),
        ({"fast": {"nonsense": {"null": 1.0}}}, "no job type"),
        ({"fast": {"('a', 0)": {"null": 1.0}}}, "no job type"),
        ({"fast": {"('a', True)": {"null": 1.0}}}, "no job type"),
        ({"fast": {A: {"null": 1.0}, "('a',1)": {"null": 2.0}}}, "in two ways"),
        ({"fast": {"__import__('os')": {"null": 1.0}}}, "no job type"),
        ({"fast": {A: {"null": -1.0}}}, "null"),
        ({"fast": {A: {"null": 1.0, B: [1.0, 1.0]}}}, "unknown job"),
        ({"fast": {A: {"null": 1.0, A: [1.0]}}}, "expected 2"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        read_throughputs(written(tmp_path, content))


def test_tables_side_by_side_keep_their_pairs_apart(tmp_path: Path) -> None:
    first = read_throughputs(written(tmp_path, GOOD))
    renamed = tuple(JobProfile(f"other {one.job_type}", one.gang) for one in first.profiles)
    table = stacked([first, replace(first, profiles=renamed)])
    assert table.profiles == first.profiles + renamed
    assert (table.beside[:2, :2] == first.beside).all()
    assert (table.beside[2:, 2:] == first.beside).all()
    assert not table.beside[:2, 2:].any()
    assert not table.beside[2:, :2].any()
