"""Arrays that are views of each other, run backwards or are seen twice: results as in Python."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket.loops import decide


def doubled(x, y):
    for i in range(len(x)):
        y[i] = 2 * x[i] + i


def transposed(x, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = y[i, j] + 1


def rows_of_one_array(x, y):
    row = x[0]
    for i in range(x.shape[1]):
        row[i] += i
        x[1, i] = 2 * row[i] + y[i, 0]


def line():
    return np.arange(20.0)


def square():
    return np.arange(36.0).reshape(6, 6)


PAIRS = {
    "backwards": (doubled, lambda: (line()[::-1], np.zeros(20)[::-1])),
    "reversed view": (doubled, lambda: (lambda a: (a, a[::-1]))(line())),
    "shifted view": (doubled, lambda: (lambda a: (a[:-1], a[1:]))(line())),
    "every second cell": (doubled, lambda: (lambda a: (a[::2], a[1::2]))(line())),
    "one array": (doubled, lambda: (lambda a: (a, a))(line())),
    "transposed view": (transposed, lambda: (lambda a: (a, a.T))(square())),
    "Fortran order": (transposed, lambda: (np.asfortranarray(square()), square())),
    "row and its array": (rows_of_one_array, lambda: (lambda a: (a, a.T))(square())),
}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_loops_over_views_give_the_result_of_the_plain_loop(name, ordered):
    function, make = PAIRS[name]
    expected, found = make(), make()
    function(*expected)
    hocket.parallel_for(workers=3, ordered=ordered)(function)(*found)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def sweeps(u, count):
    for _ in range(count):
        for colour in range(2):
            for i in range(1, u.shape[0] - 1):
                for j in range(1 + (i + colour) % 2, u.shape[1] - 1, 2):
                    u[i, j] = 0.25 * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1])


def test_red_black_sweeps_run_in_parallel_inside_the_whole_program(monkeypatch):
    monkeypatch.setattr(decide, "LEAST_SPEED_UP", 1.0)
    start = np.random.default_rng(0).normal(size=(700, 700))
    plain, ours = start[:30, :30].copy(), start[:30, :30].copy()
    run = hocket.parallel_for(workers=2)(sweeps)
    sweeps(plain, 3)
    run(ours, 3)
    np.testing.assert_array_equal(ours, plain)
    run(start, 2)
    shapes = [each.candidate.option.shape.kind for each in run.decisions() if each.candidate]
    assert shapes == ["independent"]
