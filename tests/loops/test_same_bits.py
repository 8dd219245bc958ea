"""Compiled loops give the bits, types and exceptions of plain Python, or say where they may not."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest

import hocket


def floats(a, b, out, n):
    s = 0.0
    for i in range(len(a)):
        out[i, 0] = a[i] ** 2 + b[i] ** 3 - a[i] ** -1
        out[i, 1] = a[i] / b[i] + a[i] // b[i] + a[i] % b[i]
        out[i, 2] = 1 / (a[i] - a[i]) + n / 3 + n // 2
        out[i, 3] = np.sqrt(a[i]) + np.floor(b[i]) + np.maximum(a[i], b[i])
        out[i, 4] = abs(b[i]) + min(a[i], b[i], 0.5) + max(1, b[i])
        out[i, 5] = (a[i] > 1) + (b[i] > 0) + n
        out[i, 6] = (a[i] > 1) + (b[i] > 0)
        out[i, 7] = int(a[i] * 3) + math.floor(b[i]) + round(b[i]) + (a[i] > 1) * (b[i] > 0)
        out[i, 8] = math.sqrt(a[i]) + math.exp(b[i]) + math.log(a[i]) + a[i] * 0.1
        s += out[i, 0] * 0.3
    return s


def sums(rows, out, n):
    last = 0.0
    for i in range(len(rows)):
        row = rows[i]
        out[i, 0] = row.sum() + np.sum(rows[i, ::3])
        out[i, 1] = rows[i].mean() - np.mean(row)
        out[i, 2] = np.std(rows[i]) + row.var()
        out[i, 3] = row.max() + row[n:].prod()
        last = rows[i].mean()
    return last


def whole(a, b, out, n):
    s = 0
    for i in range(len(a)):
        out[i, 0] = a[i] + b[i]
        out[i, 1] = a[i] - b[i] * 2
        out[i, 2] = (a[i] + n) // 3 + a[i] // b[i]
        out[i, 3] = a[i] % b[i] + (a[i] << 1) + (a[i] & 6)
        out[i, 4] = int(a[i]) - int(b[i]) + n // 2 + a[i] / 4
        s = s + int(a[i])
    return s


def numbers(count=200, dtype="f8"):
    rng = np.random.default_rng(5)
    a = np.abs(rng.standard_normal(count)) * 3 + 0.1
    return a.astype(dtype), (rng.standard_normal(count) * 2).astype(dtype)


def integers(dtype):
    rng = np.random.default_rng(6)
    return (rng.integers(0, 120, 99).astype(dtype), rng.integers(0, 7, 99).astype(dtype))


CASES = {
    "float64": (floats, (*numbers(), np.zeros((200, 9)), 7)),
    "float32": (floats, (*numbers(dtype="f4"), np.zeros((200, 9), "f4"), 7)),
    "rows": (sums, (numbers(60 * 301)[1].reshape(60, 301), np.zeros((60, 4)), 297)),
    "rows of float32": (
        sums, (numbers(60 * 301, "f4")[1].reshape(60, 301), np.zeros((60, 4), "f4"), 297)
    ),
    "int64": (whole, (*integers("i8"), np.zeros((99, 5)), 5)),
    "int32": (whole, (*integers("i4"), np.zeros((99, 5)), 5)),
    "uint8": (whole, (*integers("u1"), np.zeros((99, 5)), 5)),
}  # fmt: skip


def outcome(function, arguments):
    arguments = copy.deepcopy(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = function(*arguments)
        except Exception as error:
            return type(error)
    return type(found), found, [a.tobytes() for a in arguments if isinstance(a, np.ndarray)]


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_numpy_and_python(case):
    function, arguments = CASES[case]
    decorated = hocket.parallel_for(ordered=True, workers=2, backend="in-turn")(function)
    assert outcome(decorated, arguments) == outcome(function, arguments)
    (decision,) = decorated.decisions()
    assert decision.execution in ("serial", "parallel")
    assert not decision.source.deviations


def failing(a, k, n, zero):
    s = 0.0
    for i in range(len(a)):
        if k == 0:
            s += 1 / (i - zero)
        elif k == 1:
            s += n // (i - zero)
        elif k == 2:
            s += n % (i * 0.0)
        elif k == 3:
            s += math.sqrt(a[i])
        elif k == 4:
            s += math.log(a[i])
        elif k == 5:
            s += math.exp(a[i] * 1e6)
        elif k == 6:
            s += int(a[i] / 0)
        elif k == 7:
            s += (i * 1.0) ** -n
        elif k == 8:
            s += math.acos(a[i] + 3)
        elif k == 9:
            s += a[i + n]
        else:
            s += a[i] / zero + a[i] // 0
    return s


@pytest.mark.parametrize("values", [np.array([1.0, -2.0, 0.0]), np.array([0.0, 1.0, 2.0])])
def test_what_raises_in_python_raises(values):
    decorated = hocket.parallel_for(workers=2)(failing)
    for k in range(11):
        arguments = (values, k, 2, 0)
        found, expected = outcome(decorated, arguments), outcome(failing, arguments)
        if isinstance(expected, tuple):
            assert np.array_equal(found[1], expected[1], equal_nan=True), k
        else:
            assert found is expected, k


def other_bits(rows, out):
    for i in range(len(rows)):
        out[i] = np.tanh(rows[i, 0]) + np.dot(rows[i], rows[0]) + rows[i, 1] ** 2


def test_where_bits_may_differ_is_explained():
    decorated = hocket.parallel_for(workers=2)(other_bits)
    rows, out = np.random.default_rng(1).random((50, 9)), np.zeros(50)
    text = str(decorated.explain(rows, out))
    assert "same bits as the plain loop but for what is named below" in text
    for named in ("np.tanh may differ in the last bit", "dot is summed in another order", "of 2"):
        assert named in text
    decorated(rows, out)
    expected = np.zeros(50)
    other_bits(rows, expected)
    np.testing.assert_allclose(out, expected, rtol=1e-14)
    assert "np.tanh" in str(decorated.explain())
    ordered = hocket.parallel_for(ordered=True)(other_bits).explain()
    assert [each["what"][:7] for each in ordered.as_dict()["loops"][0]["deviations"]] == [
        "np.tanh",
        "dot is ",
    ]


def softmax(rows, out):
    for i in range(len(rows)):
        e = np.exp(rows[i] - rows[i].max())
        out[i] = e / e.sum()


def test_rows_and_their_sums_compile():
    rows, out = np.random.default_rng(2).random((40, 7)), np.zeros((40, 7))
    decorated = hocket.parallel_for(workers=2)(softmax)
    decorated(rows, out)
    assert decorated.decisions()[0].execution == "parallel"
    expected = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
