"""Tables of throughputs: reading them, and guessing what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hocket.base.errors import InputFileError, UsageError
from hocket.fleet.throughputs import Profile, complete, read_throughputs

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
    assert table.profiles == (Profile("a", 1), Profile("b", 1))
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
        ({}, "no kinds"),
        ([], "throughputs is"),
        ({"fast": {"nonsense": {"null": 1.0}}}, "no kind of job"),
        ({"fast": {"('a', 0)": {"null": 1.0}}}, "no kind of job"),
        ({"fast": {"('a', True)": {"null": 1.0}}}, "no kind of job"),
        ({"fast": {A: {"null": 1.0}, "('a',1)": {"null": 2.0}}}, "in two ways"),
        ({"fast": {"__import__('os')": {"null": 1.0}}}, "no kind of job"),
        ({"fast": {A: {"null": -1.0}}}, "null"),
        ({"fast": {A: {"null": 1.0, B: [1.0, 1.0]}}}, "unknown job"),
        ({"fast": {A: {"null": 1.0, A: [1.0]}}}, "expected 2"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InputFileError, match=message):
        read_throughputs(written(tmp_path, content))


def test_low_rank_tables_are_completed() -> None:
    random = np.random.default_rng(0)
    truth = np.exp(random.normal(size=(40, 2)) @ random.normal(size=(2, 30)) + 1.0)
    known = random.random(truth.shape) < 0.7
    filled = complete(np.where(known, truth, np.nan), rank=2, ridge=1e-3)
    assert (filled.values[known] == truth[known]).all()
    error = np.abs(np.log(filled.values / truth))[~known]
    assert np.median(error) < 0.15
    assert (filled.log_deviation[known] == 0.0).all()
    assert (filled.log_deviation[~known] > 0.0).all()


def test_little_knowledge_is_said_to_be_uncertain() -> None:
    random = np.random.default_rng(1)
    truth = np.exp(random.normal(size=(10, 1)) + random.normal(size=(1, 8)) * 0.5)
    values = truth * np.exp(0.1 * random.normal(size=truth.shape))
    values[0, 1:] = np.nan
    values[1, 5:] = np.nan
    filled = complete(values)
    assert filled.log_deviation[0, 7] > filled.log_deviation[1, 7]


@needs_data
def test_unseen_pairs_of_the_public_table() -> None:
    table = read_throughputs(DATA / "gavel" / "simulation_throughputs.json").on(("v100",))
    single = [row for row, profile in enumerate(table.profiles) if profile.gang == 1]
    alone = table.alone[single, 0]
    ratio = table.beside[np.ix_(single, single)][:, :, 0] / alone[:, None]
    ratio = np.where(ratio > 0.0, ratio, np.nan)
    hidden = np.random.default_rng(0).random(ratio.shape) < 0.5
    filled = complete(np.where(hidden, np.nan, ratio))
    tested = hidden & np.isfinite(ratio)
    error = np.abs(np.log(filled.values / ratio))[tested]
    plain = np.abs(np.log(np.nanmean(ratio[~hidden]) / ratio))[tested]
    assert np.median(error) < 0.5 * np.median(plain)
