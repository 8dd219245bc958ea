"""Expressions over rows become loops over elements, with numpy's meaning."""

from __future__ import annotations

import numpy as np
import pytest

import hocket

# ruff: noqa: N803  (matrices are called W and H)


def in_place(u, i, v, W, H, lr):
    for n in range(len(v)):
        w = W[u[n]]
        h = H[i[n]]
        e = v[n] - w @ h
        w += lr * (e * h - 0.1 * w)
        h += lr * (e * w - 0.1 * h)  # sees the new w


def with_copy(u, i, v, W, H, lr):
    for n in range(len(v)):
        w = W[u[n]]
        old = w.copy()
        e = v[n] - np.dot(w, H[i[n]])
        if e > -10:
            w += lr * e * H[i[n]]
            H[i[n]] = H[i[n]] + lr * e * old


def temporaries(u, i, v, W, H, lr):
    for n in range(len(v)):
        g = np.tanh(W[u[n]]) - H[i[n]] / 2.0
        W[u[n]] = g * lr
        H[i[n]] *= 0.5
        H[i[n], 0] = g[1] + len(v) * 0.0


def aliased_rows(u, i, v, W, H, lr):
    for n in range(len(v)):
        w = W[u[n]]
        same = w
        same += lr * v[n]
        W[u[n]] = same * 0.5 + w


def made(dtype):
    rng = np.random.default_rng(0)
    u, i = rng.integers(0, 9, 60), rng.integers(0, 7, 60)
    v = rng.random(60).astype(dtype)
    return u, i, v, rng.random((9, 5)).astype(dtype), rng.random((7, 5)).astype(dtype), dtype(0.1)


@pytest.mark.parametrize("function", [in_place, with_copy, temporaries, aliased_rows])
def test_lowered_rows_equal_numpy(function):
    arguments, plain = made(np.float64), made(np.float64)
    parallel = hocket.parallel_for(workers=1)(function)
    parallel(*arguments)
    decision = parallel.decisions()[0]
    assert "np_.empty" in decision.source.text or "at_" in decision.source.text
    order = decision.candidate.tiling.order
    if order:  # one worker's tiles keep the loop's order inside, not across keys
        picked = np.concatenate([order[0]])
        u, i, v, *rest = plain
        function(u[picked], i[picked], v[picked], *rest)
    else:
        function(*plain)
    for one, other in zip(arguments, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def whole_matrix(X, y, out):
    for n in range(len(y)):
        out[n] = (X @ X[n])[0] + y[n]


def test_what_does_not_fit_is_left_to_the_compiler():
    rng = np.random.default_rng(1)
    X, y, out = rng.random((6, 6)), rng.random(6), np.zeros(6)  # noqa: N806
    expected = np.zeros(6)
    whole_matrix(X, y, expected)
    hocket.parallel_for(whole_matrix)(X, y, out)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
