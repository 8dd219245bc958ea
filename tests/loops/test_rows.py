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


def made(width=5):
    rng = np.random.default_rng(0)
    u, i, v = rng.integers(0, 9, 60), rng.integers(0, 7, 60), rng.random(60)
    return u, i, v, rng.random((9, width)), rng.random((7, width)), 0.1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("function", [in_place, with_copy, temporaries, aliased_rows])
def test_rows_written_as_loops_equal_numpy(function, workers):
    parallel = hocket.parallel_for(workers=workers)(function)
    for width in (5, 7, 5):  # a width is a constant of the compiled code
        arguments, plain = made(width), made(width)
        parallel(*arguments)
        (decision,) = parallel.decisions()
        assert decision.source.row_lengths
        if decision.candidate:  # tiles keep the loop's order inside, not across keys
            tiling, (u, i, v, *rest) = decision.candidate.tiling, plain
            order = np.concatenate([tiling.order[0][slice(*t.bounds)] for t in tiling.tiles])
            function(u[order], i[order], v[order], *rest)
        else:
            function(*plain)
        for one, other in zip(arguments, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def shifted(rows, other):
    for n in range(len(rows)):
        rows[n] += other[n] * 0.5


def test_rows_of_arrays_that_overlap_are_left_to_numpy():
    parallel = hocket.parallel_for(workers=1)(shifted)
    parallel(np.ones((4, 5)), np.ones((4, 5)))
    cells = np.random.default_rng(0).random(22)
    expected = cells.copy()
    shifted(expected[1:21].reshape(4, 5), expected[:20].reshape(4, 5))
    parallel(cells[1:21].reshape(4, 5), cells[:20].reshape(4, 5))
    np.testing.assert_array_equal(cells, expected)


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
