"""The loops that people start from: each does what it is for, the same on one worker and on two."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hocket

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def printed(
    name: str, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments", "what", "is_better"),
    [
        ("loops_mf.py", "--rank 8 --epochs 3", r"RMSE ([\d.]+)", -1),
        ("loops_lda.py", "--topics 5 --sweeps 3", r"(-[\d.]+) per word", 1),
        ("loops_lda.py", "--topics 40 --sweeps 3", r"(-[\d.]+) per word", 1),
        ("loops_logistic.py", "--epochs 3", r"loss ([\d.]+)", -1),
    ],
)
def test_an_example_gets_better_from_pass_to_pass(
    name: str,
    arguments: str,
    what: str,
    is_better: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = printed(name, arguments, monkeypatch, capsys)
    values = [float(value) * is_better for value in re.findall(what, said)]
    assert len(values) == 3
    assert values == sorted(set(values)), said


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("loops_histogram.py", "--rounds 2", "schedule:"),
        ("loops_gauss_seidel.py", "--size 60 --sweeps 1", "schedule:"),
    ],
)
def test_an_example_explains_itself(
    name: str,
    arguments: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in printed(name, arguments, monkeypatch, capsys)


def test_topics_by_groups_are_the_same_on_one_worker_and_on_two() -> None:
    lda: Any = importlib.import_module("loops_lda")
    d, w = lda.made_up(documents=30, words=80, tokens=2000)
    found = []
    for workers in (1, 2):
        topics = lda.Topics(d, w, 12)
        one = hocket.parallel_for(workers=workers)(lda.by_group.function)
        for seed, ptr in enumerate((topics.document_ptr, topics.document_ptr)):
            one(ptr, topics.z, topics.proposed, topics.count, topics.totals, 12, 0.1, 0.8, seed)
        found.append((topics.z.copy(), topics.proposed.copy()))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])
    assert not np.array_equal(found[0][0], lda.Topics(d, w, 12).z)


def test_topics_by_groups_find_what_dense_gibbs_finds() -> None:
    """Tokens of two kinds of documents, each with words of its own: both ways tell them apart."""
    lda: Any = importlib.import_module("loops_lda")
    rng = np.random.default_rng(3)
    d = np.repeat(np.arange(40), 60)
    w = rng.integers(0, 50, len(d)) + 50 * (d % 2)
    found = []
    for kind in ("gibbs", "warp"):
        topics = lda.Topics(d, w, 2)
        for number in range(60):
            topics.sweep_gibbs() if kind == "gibbs" else topics.sweep_warp(number)
        found.append(topics.likelihood())
    perfect = -np.log(50)
    assert found[0] == pytest.approx(perfect, rel=0.05)
    assert found[1] == pytest.approx(perfect, rel=0.05)
