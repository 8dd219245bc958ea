"""Functions whose tuples are handed to compiled code array by array."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from numba.core.errors import TypingError

from hocket.arrays import FloatArray
from hocket.compiled.flat import flat_entry
from hocket.compiled.jit import is_compiled


class Two(NamedTuple):
    left: FloatArray
    right: FloatArray


@flat_entry()
def weigh(scale: float, pair: Two, out: FloatArray) -> float:
    """Write the difference of a pair."""
    for at in range(out.shape[0]):
        out[at] = scale * (pair.left[at] - pair.right[at])
    return scale


PAIR = Two(left=np.array([5.0, 7.0]), right=np.array([1.0, 2.0]))


def test_a_flat_entry_is_called_as_the_function_it_was_made_from() -> None:
    out = np.zeros(2)
    assert weigh(2.0, PAIR, out) == 2.0
    assert out.tolist() == [8.0, 10.0]
    weigh(out=out, pair=PAIR, scale=1.0)
    assert out.tolist() == [4.0, 5.0]
    assert weigh.__name__ == "weigh"
    assert weigh.__doc__ == "Write the difference of a pair."
    assert weigh.__module__ == __name__
    assert list(inspect.signature(weigh).parameters) == ["scale", "pair", "out"]


def test_compiled_code_sees_arrays_and_is_kept_in_the_place_of_the_function() -> None:
    weigh(1.0, PAIR, np.zeros(2))
    entry = cast(Any, weigh).entry
    assert is_compiled(entry)
    names = list(inspect.signature(entry.py_func).parameters)
    assert names == ["scale", "pair_left", "pair_right", "out"]
    assert entry.py_func.__code__.co_filename == __file__
    kept = Path(entry.stats.cache_path).glob(f"*{entry.py_func.__qualname__}*.nbc")
    assert list(kept)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'out'"):
        weigh(1.0, PAIR)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        weigh(1.0, Two(*PAIR)[:1], np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(TypingError):
        weigh("one", PAIR, np.zeros(2))  # type: ignore[arg-type]


def test_defaults_and_missing_types_are_refused_when_the_entry_is_made() -> None:
    def with_default(scale: float = 1.0) -> float:
        return scale

    def without_types(scale) -> float:  # type: ignore[no-untyped-def]
        return float(scale)

    for function in (with_default, without_types):
        with pytest.raises(TypeError, match=function.__name__):
            flat_entry()(function)
