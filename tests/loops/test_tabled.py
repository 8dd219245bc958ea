"""Loops whose arrays go through tables: nothing is lost, AdaGrad without delay, nobody hangs."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket.base.errors import UsageError
from hocket.loops import thread_workers as tabled


def counts(j, k, w):
    for n in range(len(j)):
        w[j[n]] += 1.0 + 0.0 * w[k[n]]


def towards(j, k, x, w):
    for n in range(len(j)):
        w[j[n]] -= w[k[n]] - x[n]


RANDOM = np.random.default_rng(5)
J, K, X = RANDOM.integers(0, 30, 600), RANDOM.integers(0, 30, 600), RANDOM.normal(size=600)


def test_every_change_arrives_once_whoever_made_it():
    w = np.full((40,), 3.0)
    hocket.parallel_for(permit={"w": "table"}, workers=3, max_delay=40)(counts)(J, K, w)
    np.testing.assert_array_equal(w, 3.0 + np.bincount(J, minlength=40))


def adagrad(w, squares, rate, run):
    """What one worker does: a tile's change is a gradient, the step AdaGrad's, in 32 bits."""
    moved = np.zeros(len(w), np.float32)
    for tile in run.decisions()[0].candidate.tiling.tiles:
        low, high = tile.bounds
        seen = w + moved
        after = seen.copy()
        towards(J[low:high], K[low:high], X[low:high], after)
        gradient = (seen - after).astype(np.float32)
        squares += gradient * gradient
        moved -= np.float32(rate) / np.sqrt(squares) * gradient
    w += moved


def test_revision_without_delay_is_adagrad_and_goes_on_from_call_to_call(monkeypatch):
    monkeypatch.setattr(tabled, "STALENESS", 0)  # or changes of two steps may go as one
    run = hocket.parallel_for(permit={"w": ("revise", 0.3)}, workers=1, max_delay=60)(towards)
    w, expected, squares = np.zeros(30), np.zeros(30), np.ones(30, np.float32)
    for _ in range(2):
        run(J, K, X, w)
        adagrad(expected, squares, 0.3, run)
        np.testing.assert_allclose(w, expected, rtol=2e-4, atol=1e-5)
    w[:] = expected[:] = 0.0  # somebody else's start: the squares are forgotten
    run(J, K, X, w)
    adagrad(expected, np.ones(30, np.float32), 0.3, run)
    np.testing.assert_allclose(w, expected, rtol=2e-4, atol=1e-5)


def test_a_worker_that_fails_lets_nobody_wait():
    outside = J.copy()
    outside[-1] = 99
    run = hocket.parallel_for(permit={"w": "table"}, workers=2, max_delay=40)(towards)
    with pytest.raises(IndexError):
        run(outside, K, X, np.zeros(30))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"permit": {"w": "tables"}}, "did you mean 'table'"),
        ({"permit": {"w": "table"}, "backend": "in-turn"}, "'in-turn' has no tables"),
        ({"permit": {"w": ("revise", -1.0)}}, "the rate is -1.0"),
    ],
)
def test_what_cannot_be_permitted_is_said(options, told):
    with pytest.raises(UsageError, match=told):
        hocket.parallel_for(**options)(counts)(J, K, np.zeros(40))


def test_the_explanation_says_that_a_table_is_between():
    run = hocket.parallel_for(permit={"w": "revise"}, workers=2)(towards)
    assert "w: through a table, revised" in str(run.explain(J, K, X, np.zeros(30)))
    assert "w: through a table, revised" in str(run.explain())
