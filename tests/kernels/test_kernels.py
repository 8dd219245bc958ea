"""Functions in compiled code: called as they were written, compiled once, by what they contain."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from numba.core.errors import TypingError

from hocket.base.arrays import FloatArray
from hocket.cli.plan import NUM_KERNELS
from hocket.graph.files import write_graph
from hocket.graph.generators import generate
from hocket.kernels import is_compiled, kernel
from hocket.kernels.progress import tell_before_compiling


class Two(NamedTuple):
    left: FloatArray
    right: FloatArray


class Scaled(NamedTuple):
    scale: float
    pair: Two
    out: FloatArray


@kernel
def subtract(pair: Two, at: int) -> float:
    difference: float = pair.left[at] - pair.right[at]
    return difference


@kernel
def weigh(scale: float, pair: Two, out: FloatArray) -> float:
    """Write the difference of a pair."""
    for at in range(out.shape[0]):
        out[at] = scale * subtract(pair, at)
    return scale


@kernel
def weigh_nested(first: int, work: Scaled) -> float:
    return weigh(work.scale, work.pair, work.out[first:])


@kernel(allocates=True)
def doubled(values: FloatArray) -> FloatArray:
    return values * 2.0


@kernel(allocates=True)
def total_of_doubled(values: FloatArray) -> float:
    return doubled(doubled(values)).sum()


@kernel
def checked_root(value: float) -> float:
    if value < 0.0:
        raise ValueError("below zero")
    return math.sqrt(value)


@kernel
def sum_of_roots(values: FloatArray) -> float:
    total = 0.0
    for value in values:
        total += checked_root(value)
    return total


PAIR = Two(left=np.array([5.0, 7.0]), right=np.array([1.0, 2.0]))


def test_a_kernel_is_called_as_the_function_it_was_made_from() -> None:
    out = np.zeros(2)
    assert weigh(2.0, PAIR, out) == 2.0
    assert out.tolist() == [8.0, 10.0]
    weigh(out=out, pair=PAIR, scale=1.0)
    assert out.tolist() == [4.0, 5.0]
    assert weigh.__name__ == "weigh"
    assert weigh.__doc__ == "Write the difference of a pair."
    assert weigh.__module__ == __name__
    assert list(inspect.signature(weigh).parameters) == ["scale", "pair", "out"]


def test_kernels_are_called_by_python_and_by_other_kernels() -> None:
    out = np.zeros(2)
    assert weigh_nested(1, Scaled(2.0, PAIR, out)) == 2.0
    assert out.tolist() == [0.0, 8.0]
    assert subtract(PAIR, 1) == 5.0
    assert cast(Any, weigh_nested).function(0, Scaled(1.0, PAIR, out)) == 1.0


def test_compiled_code_sees_arrays_not_tuples() -> None:
    weigh_nested(0, Scaled(1.0, PAIR, np.zeros(2)))
    entry = cast(Any, weigh_nested).entry
    names = list(inspect.signature(entry.py_func).parameters)
    assert names == ["first", "work_scale", "work_pair_left", "work_pair_right", "work_out"]
    assert is_compiled(weigh_nested)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'out'"):
        weigh(1.0, PAIR)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        weigh(1.0, Two(*PAIR)[:1], np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(TypingError):
        weigh("one", PAIR, np.zeros(2))  # type: ignore[arg-type]


def test_defaults_are_refused_when_the_kernel_is_made() -> None:
    def with_default(scale: float = 1.0) -> float:
        return scale

    with pytest.raises(TypeError, match="with_default has defaults"):
        kernel(with_default)


def test_only_a_kernel_that_says_so_makes_arrays() -> None:
    assert doubled(np.array([1.0, 2.0])).tolist() == [2.0, 4.0]
    assert total_of_doubled(np.array([1.0, 2.0])) == 12.0
    silent = kernel(cast(Any, doubled).function)
    with pytest.raises(Exception, match="Only accept returning of array passed"):
        silent(np.array([1.0]))


def test_what_an_inner_kernel_raises_reaches_python() -> None:
    assert sum_of_roots(np.array([4.0, 9.0])) == 5.0
    with pytest.raises(ValueError, match="below zero"):
        sum_of_roots(np.array([4.0, -1.0]))


def test_values_of_a_closure_enter_the_compiled_form() -> None:
    def times(factor: float) -> Callable[[float], float]:
        @kernel
        def multiply(value: float) -> float:
            return factor * value

        return multiply

    twice, thrice = times(2.0), times(3.0)
    assert (twice(5.0), thrice(5.0)) == (10.0, 15.0)
    assert cast(Any, twice).digest != cast(Any, thrice).digest
    assert cast(Any, twice).digest == cast(Any, times(2.0)).digest


def test_threads_may_call_a_kernel_for_the_first_time_together() -> None:
    @kernel
    def total(values: FloatArray) -> float:
        result = 0.0
        for value in values:
            result += value
        return result

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(total, [np.full(9, float(n)) for n in range(8)])) == [
            9.0 * n for n in range(8)
        ]


def test_whoever_asks_is_told_before_a_kernel_is_compiled(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    told: list[str] = []
    tell_before_compiling(told.append)
    try:
        for _ in range(2):
            fresh = kernel(cast(Any, subtract).function)
            assert fresh(PAIR, 0) == 4.0
            assert fresh(PAIR, 1) == 5.0
    finally:
        tell_before_compiling(None)
    assert told == ["subtract"]


COUNT = """
import gc, sys
from hocket.cli import main
from hocket.kernels import Kernel
try:
    main(["plan", sys.argv[1], "--on", "2xv100-16g", "-o", sys.argv[2], "--json"])
except SystemExit as end:
    assert not end.code
called = [one for one in gc.get_objects() if isinstance(one, Kernel) and one.entry is not None]
sys.stderr.write(str(len(called)))
"""


def test_plan_says_how_many_kernels_a_fresh_installation_compiles(tmp_path) -> None:
    graph = tmp_path / "graph.json"
    write_graph(generate("gnmt", 200, 0), graph)
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(graph), str(tmp_path / "plan.json")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert abs(int(done.stderr.splitlines()[-1]) - NUM_KERNELS) <= 5


def test_the_compiler_is_imported_by_the_first_call() -> None:
    code = (
        "import sys, hocket.simulate.events, hocket.kernels.heaps as heaps\n"
        "from hocket.kernels import is_compiled\n"
        "assert isinstance(is_compiled(heaps.push), bool)\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
