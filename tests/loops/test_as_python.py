"""Functions under ``parallel_for`` do what they do without it: names, heads, closures, overlaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from loops.harness import Looked, python_kernel

import hocket
from hocket.loops import job, memory, runner

factor = 2.0
total = 0.0


def scaled(x):
    return x * factor


def scale(x):
    return x * 100.0


def reversed_and(a, n):
    for i in reversed(range(n & 6)):
        a[i] += a[i + 1]
    return a


def over_keys(keys, a):
    for key in keys:
        a[key] += 1.0
    return a


def over_rebound(a):
    s = 0.0
    for x in a:
        s += x
        a = a * 2.0
    return np.append(a, s)


def strict(a, b):
    s = 0.0
    for x, y in zip(a, b, strict=True):
        s += x * y
    return s


def given_function(a, scale):
    for i in range(len(a)):
        a[i] = scale(a[i])
    return a


def own_builtin(a):
    abs = float.__neg__
    for i in range(len(a)):
        a[i] = abs(a[i])
    return a


def seeded(a):
    np.random.seed(3)
    for i in range(len(a)):
        a[i] = np.random.random()
    return a


@pytest.fixture(autouse=True)
def without_compiling(monkeypatch):
    """Kernels are run by Python itself: what is decided and generated is what is looked at."""
    for module in (runner, job):
        monkeypatch.setattr(module, "compiled", lambda text, options: python_kernel(Text(text)))


@dataclass(frozen=True)
class Text:
    """The source of a kernel."""

    text: str


def data():
    return np.arange(1.0, 9.0)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (reversed_and, lambda: (data(), 13)),
        (over_keys, lambda: ({3: 0, 4: 0}, data())),
        (over_keys, lambda: (iter((1, 5, 1)), data())),
        (over_rebound, lambda: (data(),)),
        (given_function, lambda: (data(), lambda x: x + 1)),
        (own_builtin, lambda: (data(),)),
        (seeded, lambda: (data(),)),
    ],
)
def test_the_result_is_that_of_the_plain_function(function, arguments):
    expected = function(*arguments())
    found = hocket.parallel_for(workers=2)(function)(*arguments())
    np.testing.assert_array_equal(found, expected)


def test_zip_stays_strict():
    with pytest.raises(ValueError, match="shorter"):
        hocket.parallel_for(strict)(data(), data()[:3])


def test_arrays_that_overlap_in_a_later_call_of_the_same_shapes_are_seen():
    def shifted(a, b):
        for i in range(len(a)):
            b[i] = a[i] * 0.5 + 1.0

    function = hocket.parallel_for(workers=2)(shifted)
    buffer = data()
    site = function.runners[0]
    function(buffer[:-1].copy(), buffer[1:].copy())
    assert site.last.candidate is not None
    expected = buffer.copy()
    shifted(expected[:-1], expected[1:])
    function(buffer[:-1], buffer[1:])
    assert site.last.way == "serial"
    np.testing.assert_array_equal(buffer, expected)
    assert memory.shared_pairs({"a": buffer[:4], "b": buffer[4:], "c": buffer[3:5]}) == {
        ("a", "c"),
        ("b", "c"),
    }


def test_two_loops_with_one_variable_are_no_grid():
    def twice(a):
        for i in range(8):
            for i in range(4):
                a[i] = a[i] * 0.5 + 1.0

    def moved(a):
        for i in range(4):
            for _ in range(3):
                a[i] = a[i] + 1.0
                i = i + 1

    for function in (twice, moved):
        assert Looked(function, (data(),), workers=2).record().kind == "serial"


def test_a_helper_that_changes_is_compiled_anew(monkeypatch):
    def run(a):
        for i in range(len(a)):
            a[i] = scaled(a[i])
        return a

    function = hocket.parallel_for(workers=2)(run)
    assert function(np.ones(3))[0] == 2.0
    monkeypatch.setitem(globals(), "factor", 3.0)
    assert function(np.ones(3))[0] == 3.0
    monkeypatch.setitem(globals(), "scaled", scale)
    assert function(np.ones(3))[0] == 100.0


def test_names_around_the_function_are_its_own():
    count = 1.0

    def add(a):
        nonlocal count
        for i in range(len(a)):
            count += a[i]

    def add_globally(a):
        global total
        for i in range(len(a)):
            total += a[i]

    hocket.parallel_for(workers=2)(add)(np.ones(4))
    assert count == 5.0
    before = total
    hocket.parallel_for(workers=2)(add_globally)(np.ones(4))
    assert total == before + 4.0
