"""Loops carried out for real: compiled, on threads, against plain Python, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from loops.catalogue import LOOPS

import hocket
from hocket.base.errors import HocketError, UsageError

RUN = [
    "mf_scalar", "mf_csr", "lda_counts_totals", "scratch", "greatest_and_sum",
    "against_the_inner_direction", "triangle", "helper_that_writes", "csr_normalise_rows",
    "carried_counter", "transpose_in_place",
]  # fmt: skip


def copied(data):
    return tuple(value.copy() if isinstance(value, np.ndarray) else value for value in data)


@pytest.mark.parametrize("name", RUN)
def test_threads_give_the_bits_of_a_serial_order(name):
    function, data, *_ = LOOPS[name]
    expected, found = copied(data), copied(data)
    parallel = hocket.parallel_for(workers=3)(function)
    result = parallel(*found)
    decision = parallel.decisions()[0]
    keeps_order = decision.candidate is None or decision.candidate.option.shape.keeps_order
    # A rotation equals the order of its tiles, one after another; all else equals the plain loop.
    serial = (
        function if keeps_order else hocket.parallel_for(workers=3, backend="in-turn")(function)
    )
    returned = serial(*expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert result == returned


def prefix(x, y):
    total = 0
    for k in range(1, len(x)):
        x[k] = x[k - 1] + y[k]
        total += 1
    return total


def test_what_cannot_be_proven_runs_serially_and_says_why():
    x, y = np.zeros(50), np.arange(50.0)
    parallel = hocket.parallel_for(prefix)
    assert parallel(x, y) == 49
    np.testing.assert_array_equal(x, np.cumsum(y))
    text = str(parallel.explain())
    first = prefix.__code__.co_firstlineno
    assert f"x[k - 1] (read, line {first + 3})" in text
    assert f"x[k] (written, line {first + 3})" in text
    assert "serial, compiled" in text


def shifted(x, y):
    for k in range(len(x) - 1):
        x[k] = y[k + 1] * 2


@pytest.mark.parametrize("place", [0, 3])
def test_arrays_that_share_memory_are_seen_when_called(place):
    cells = np.arange(40.0)
    x, y = cells[: 40 - place], cells[place:]
    expected = cells.copy()
    shifted(expected[: 40 - place], expected[place:])
    parallel = hocket.parallel_for(shifted)
    parallel(x, y)
    np.testing.assert_array_equal(cells, expected)
    assert parallel.decisions()[0].execution == "serial"


def test_a_loop_that_was_independent_is_judged_again_for_other_data():
    parallel = hocket.parallel_for(shifted)
    parallel(np.zeros(9), np.arange(9.0))
    assert parallel.decisions()[0].execution == "parallel"
    same = np.arange(9.0)
    parallel(same, same)
    np.testing.assert_array_equal(same, [2, 4, 6, 8, 10, 12, 14, 16, 8])


def scatter(u, x, out):
    for n in range(len(u)):
        out[u[n]] = out[u[n]] * 2 + x[n]


def test_changed_index_columns_are_noticed():
    parallel = hocket.parallel_for(scatter)
    u, x = np.array([0, 1, 2, 3]), np.ones(4)
    out, plain = np.zeros(4), np.zeros(4)
    for values in ([0, 1, 2, 3], [0, 0, 0, 1], [3, 3, 3, 3]):
        u[:] = values
        parallel(u, x, out)
        scatter(u, x, plain)
        np.testing.assert_array_equal(out, plain)


def test_negative_indices_are_not_taken_for_other_cells():
    u, x = np.array([3, -1, 3, -1]), np.arange(4.0)
    out, plain = np.zeros(4), np.zeros(4)
    parallel = hocket.parallel_for(scatter)
    parallel(u, x, out)
    scatter(u, x, plain)
    np.testing.assert_array_equal(out, plain)
    assert "counts from the end" in str(parallel.explain())


def knapsack_row(table, i, weight, value):
    for c in range(table.shape[1]):
        best = table[i - 1, c]
        if c >= weight:
            best = max(best, table[i - 1, c - weight] + value)
        table[i, c] = best


def knapsack_row_otherwise(table, i, weight, value):
    for c in range(table.shape[1]):
        if c < weight:
            table[i, c] = table[i - 1, c]
        else:
            table[i, c] = max(table[i - 1, c], table[i - 1, c - weight] + value)


def knapsack_row_one_off(table, i, weight, value):
    for c in range(table.shape[1]):
        best = table[i - 1, c]
        if c > weight - 2:
            best = max(best, table[i - 1, c - weight] + value)
        table[i, c] = best


@pytest.mark.parametrize(
    ("function", "is_safe"),
    [(knapsack_row, True), (knapsack_row_otherwise, True), (knapsack_row_one_off, False)],
)
def test_a_condition_may_keep_an_index_from_being_negative(function, is_safe):
    expected = np.random.default_rng(0).random((3, 100_000))
    found = expected.copy()
    parallel = hocket.parallel_for(workers=2)(function)
    function(expected, 2, 7, 0.5)
    parallel(found, 2, 7, 0.5)
    np.testing.assert_array_equal(found, expected)
    (decision,) = parallel.decisions()
    assert decision.execution == ("parallel" if is_safe else "serial")
    if is_safe:
        assert decision.candidate.space.all_inside
    else:
        assert "reaches index -7, which counts from the end" in str(parallel.explain())


def test_an_index_outside_raises_as_in_python_and_says_where():
    first = scatter.__code__.co_firstlineno
    with pytest.raises(IndexError) as raised:
        hocket.parallel_for(scatter)(np.array([0, 9]), np.ones(2), np.zeros(4))
    assert f"in the loop at line {first + 1} of {__file__}: out[u[n]] (" in str(raised.value)


def test_a_loop_that_was_left_to_python_is_told_with_the_reason():
    parallel = hocket.parallel_for(scatter)
    out = [0.0] * 4
    parallel(np.array([0, 3]), np.ones(2), out)
    assert out == [1.0, 0.0, 0.0, 1.0]
    told = str(parallel.explain())
    assert "schedule: serial in Python, as written" in told
    assert "because out is a list, and loops are read over arrays and numbers" in told


def test_wrong_options_are_named():
    with pytest.raises(UsageError, match="did you mean 'threads'"):
        hocket.parallel_for(backend="thread")
    with pytest.raises(UsageError, match="contradict"):
        hocket.parallel_for(ordered=True, permit={"x": "buffer"})
    with pytest.raises(HocketError, match="did you mean 'out'"):
        hocket.parallel_for(permit={"outs": "buffer"})(scatter)(
            np.array([0]), np.ones(1), np.zeros(4)
        )


def test_lists_and_objects_are_left_to_python():
    found = []
    parallel = hocket.parallel_for(_collects)
    parallel([1, 2, 3], found)
    assert found == [1, 2, 3]


def _collects(values, found):
    for k in range(len(values)):
        found.append(values[k])
