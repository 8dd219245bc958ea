"""What is worked out once for each problem."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from hocket.plan.problem import Problem

_Made = TypeVar("_Made")


def once_per_problem(make: Callable[[Problem], _Made]) -> Callable[[Problem], _Made]:
    """The same, made once and kept as long as the problem: a portfolio asks often."""
    known: WeakKeyDictionary[Problem, _Made] = WeakKeyDictionary()

    @wraps(make)
    def once(problem: Problem) -> _Made:
        if problem not in known:
            known[problem] = make(problem)
        return known[problem]

    return once
