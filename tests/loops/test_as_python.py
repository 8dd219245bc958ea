"""Functions under ``parallel_for`` do what they do without it: names, heads, closures, overlaps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from loops.harness import Looked, check_sound, python_kernel

import hocket
from hocket.loops import job, memory, runner
from hocket.loops import thread_workers as team

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
    assert site.last.execution == "serial"
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


# ── names and heads that only look like others ──────────────────────────────────────────────────


class Scaled:
    """A method whose names Python writes differently."""

    def __init__(self):
        self.__factor = 3.0

    @hocket.parallel_for(workers=2)
    def apply(self, a, __shift=1.0):
        factor = self.__factor
        for i in range(len(a)):
            a[i] = a[i] * factor + __shift
        return a


def test_private_names_of_a_class_are_found():
    np.testing.assert_array_equal(Scaled().apply(data()), 3 * data() + 1)


def ndindex_bound(a):
    m = 3
    for i, j in np.ndindex(2, m):
        m = 1
        a[i + j] += 1.0
    return a


def ndindex_after(a, n):
    i = 7
    for i, j in np.ndindex(3, n):
        a[i + j] += 1.0
    a[i] += 100.0
    return a


def sums_called_min(a):
    min = lambda one, other: one + other  # noqa: E731
    best = 5.0
    for i in range(len(a)):
        best = min(best, a[i])
    return np.array([best])


def large_index(a, base):
    s = 0.0
    for i in range(len(a)):
        s += a[i + base - 9223372036854775808]
    return np.array([s])


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (ndindex_bound, lambda: (data(),)),
        (ndindex_after, lambda: (data(), 0)),
        (large_index, lambda: (data(), 2**63)),
        (sums_called_min, lambda: (data(),)),
    ],
)
def test_heads_and_indices_are_those_of_python(function, arguments):
    expected = function(*arguments())
    found = hocket.parallel_for(workers=2)(function)(*arguments())
    np.testing.assert_array_equal(found, expected)


def least_late(a):
    best = np.inf
    for i in range(len(a)):
        best = min(a[i], best)
    return best


def least_last(a):
    best = 0.0
    for i in range(len(a)):
        if a[i] <= best:
            best = a[i]
    return best


def test_extremes_keep_to_the_order_where_it_matters():
    nan = np.array([1.0, np.nan, 3.0, 2.0])
    looked = Looked(least_late, (nan,), workers=2).record()
    (refusal, *_) = looked.decisions[0][1].refusals
    assert "depends on the order" in str(refusal)
    assert hocket.parallel_for(workers=2)(least_late)(nan) == least_late(nan) == 2.0
    integers = Looked(least_late, (np.arange(4),), workers=2).record()
    assert integers.decisions[0][1].verdict.options


def test_of_equal_numbers_the_one_that_the_loop_keeps_is_kept():
    zeros = np.array([1.0, -0.0, 0.0, -0.0, 1.0, 2.0])
    check_sound(least_last, (zeros,), workers=(2, 3))
    for workers in (2, 3):
        found = hocket.parallel_for(workers=workers, backend="in-turn")(least_last)(zeros)
        assert np.signbit(found) == np.signbit(least_last(zeros))


def test_a_call_after_an_interrupted_one_waits_for_its_own_workers(monkeypatch):
    def interrupted(futures):
        raise KeyboardInterrupt

    workers, released, done = team.ThreadTeam(2), threading.Event(), []
    with monkeypatch.context() as patched:
        patched.setattr(team, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.together(lambda worker: lambda: released.wait(60), abandon=released.set)
    assert released.is_set()
    workers.together(lambda worker: lambda: (time.sleep(0.1), done.append(worker)))
    assert sorted(done) == [0, 1]


def greatest_on_the_left(a):
    best = -1.0
    for i in range(len(a)):
        if best < a[i]:
            best = a[i]
    return best


def least_on_the_left(a):
    best = 100.0
    for i in range(len(a)):
        if best >= a[i]:
            best = a[i]
    return best


@pytest.mark.parametrize("function", [greatest_on_the_left, least_on_the_left])
def test_an_extreme_may_stand_on_either_side(function):
    looked, count = check_sound(function, (data(),), workers=(2, 3))
    is_free = function is greatest_on_the_left  # the other keeps the later of 0.0 and -0.0
    assert bool(count) is is_free
    assert looked.kind == ("independent" if is_free else "serial")
