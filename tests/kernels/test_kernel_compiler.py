"""Compiling stays short: one entry per engine, tuples passed as one value."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
from numba.core import types
from numba.core.datamodel import default_manager

from hocket.base.arrays import FloatArray
from hocket.graph.generators import generate
from hocket.kernels import compiler, kernel
from hocket.kernels.containers import Heaps, new_heaps
from hocket.kernels.heaps import pop, push
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.simulate import simulate
from hocket.simulate.engine import lower
from hocket.simulate.evaluate import Evaluator, try_changes
from hocket.simulate.events import run
from hocket.simulate.lowering import lower_into

FLOATS: Any = types.Array(types.float64, 1, "C")


class Strange(NamedTuple):
    values: FloatArray


def test_simulating_lowering_and_evaluating_compile_the_engine_once() -> None:
    problem = make_problem(generate("gnmt", 60, 0), "2xv100-16g")
    device_of = np.zeros(problem.graph.num_ops, dtype=np.int32)
    timeline = simulate(problem, Plan().placing(device_of))
    lower(problem, device_of)
    assert Evaluator(problem)(device_of).step_s == timeline.makespan_s
    assert cast(Any, try_changes).entry is not None
    for part in cast(tuple[Any, ...], (run, lower_into)):
        assert part.entry is None


def test_named_tuples_of_the_package_are_one_argument_and_others_are_as_they_were() -> None:
    assert compiler
    manager: Any = default_manager
    own = manager.lookup(types.NamedTuple([FLOATS] * len(Heaps._fields), Heaps))
    assert own.get_argument_type() == own.get_value_type()
    strange = manager.lookup(types.NamedTuple([FLOATS], Strange))
    assert isinstance(strange.get_argument_type(), tuple)


@kernel
def sort(heaps: Heaps, strange: Strange) -> None:
    for value in strange.values:
        push(heaps, 0, value, 0)
    for at in range(len(strange.values)):
        strange.values[at] = heaps.key[0]
        pop(heaps, 0)


def test_tuples_of_both_kinds_pass_between_kernels() -> None:
    strange = Strange(np.array([3.0, 1.0, 2.0]))
    sort(new_heaps(np.array([0, 3])), strange)
    assert strange.values.tolist() == [1.0, 2.0, 3.0]
