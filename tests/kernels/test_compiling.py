"""What is done differently from the compiler's own way changes no result."""

import numpy as np
import pytest
from numba import TypingError, njit, typeof
from numba.core.registry import cpu_target

from hocket.kernels import kernel
from hocket.kernels.containers import Heaps

ROW = np.dtype([("weight", "f8"), ("next", "i4")], align=True)
UNALIGNED = np.dtype([("flag", "u1"), ("weight", "f8"), ("next", "i4")])


@kernel
def _take_and_set(values, flags, rows, at, low) -> float:
    flags[at] = not flags[at]
    values[low] = 7
    row = rows[at]
    row.next = 5
    row.weight += values[-1]
    return values[at] + values[low] + row.weight + rows[-1].weight + (100.0 if flags[at] else 0.0)


@pytest.mark.parametrize(
    ("at", "row"), [(np.int64(-2), UNALIGNED), (np.int32(1), ROW), (np.uint8(2), ROW)]
)
def test_elements_are_those_of_numpy(at, row) -> None:
    values, flags = np.array([1.5, 2.5, 4.5]), np.array([True, False, True])
    rows = np.array([(n,) * len(row.names) for n in (1, 0, 1)], dtype=row)
    copies = [one.copy() for one in (values, flags, rows)]
    found = _take_and_set(values, flags, rows, at, np.uint16(0))
    expected = _take_and_set.function(*(one.view(np.recarray) for one in copies), at, np.uint16(0))
    assert found == expected
    for one, copy in zip((values, flags, rows), copies, strict=True):
        assert one.tolist() == copy.tolist()


@kernel
def _strided(values, at) -> float:
    values[at] = 3.0
    return values[at - 1]


def test_arrays_with_gaps_are_not_taken_for_whole_ones() -> None:
    values = np.arange(8.0)
    assert _strided(values[::2], 2) == 2.0
    assert values.tolist() == [0, 1, 2, 3, 3, 5, 6, 7]


@kernel
def _unknown(values) -> float:
    return values.nothing_of_this_name


def test_answers_are_kept_only_while_kernels_are_compiled() -> None:
    own = vars(cpu_target.typing_context)
    with pytest.raises(TypingError, match="nothing_of_this_name"):
        _unknown(np.zeros(1))
    assert not any(name.startswith("resolve_") for name in own)
    assert njit(lambda values: values[1] + 1)(np.arange(3.0)) == 2.0


def test_types_of_tuples_leave_their_hash_behind_where_they_are_kept() -> None:
    kind = typeof(Heaps(*(np.zeros(1) for _ in Heaps._fields)))
    known = hash(kind)
    rebuild, (make, arguments, state) = kind.__reduce__()
    assert known not in state.values()
    again = rebuild(make, arguments, state)
    assert again is kind
    assert hash(again) == known
