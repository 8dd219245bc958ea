"""Calls without side effects: what numpy, math and builtins offer a loop body.

A call that is not here is refused: it may keep state, such as a random generator, or write into its
arguments. What is pure is asked of numpy itself where it can tell (ufuncs).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from hocket.loops.form import Kind

Result = Literal["scalar", "elementwise", "fresh"]

_BUILTINS: dict[str, Kind] = {
    "abs": "unknown", "min": "unknown", "max": "unknown", "pow": "unknown", "int": "int",
    "float": "float", "bool": "bool", "len": "int", "round": "unknown",
}  # fmt: skip
_REDUCERS = {
    "sum": 2, "dot": 2, "vdot": 2, "inner": 2, "mean": 2, "max": 2, "min": 2, "amax": 2, "amin": 2,
    "argmax": 2, "argmin": 2, "prod": 2, "any": 1, "all": 1, "std": 1, "var": 1, "searchsorted": 2,
    "median": 1, "count_nonzero": 1, "linalg.norm": 1, "linalg.det": 1,
}  # fmt: skip
_FRESH = {
    "zeros": 2, "ones": 2, "empty": 2, "full": 3, "zeros_like": 2, "ones_like": 2, "empty_like": 2,
    "full_like": 3, "arange": 3, "linspace": 3, "array": 2, "copy": 1, "outer": 2, "cumsum": 1,
    "where": 3, "concatenate": 1, "linalg.solve": 2, "linalg.inv": 1, "sort": 1, "argsort": 1,
    "clip": 3, "round": 2, "diag": 1, "eye": 2,
}  # fmt: skip
_ARRAY_METHODS: dict[str, Result] = {
    "sum": "scalar", "dot": "fresh", "mean": "scalar", "max": "scalar", "min": "scalar",
    "argmax": "scalar", "argmin": "scalar", "prod": "scalar", "any": "scalar", "all": "scalar",
    "std": "scalar", "var": "scalar", "copy": "fresh", "astype": "fresh", "flatten": "fresh",
    "cumsum": "fresh", "item": "scalar",
}  # fmt: skip
VIEW_METHODS = frozenset({"reshape", "ravel", "transpose", "view", "swapaxes"})
WRITE_METHODS = frozenset({"fill", "sort"})
_KEYWORDS = frozenset({"dtype", "axis", "shape", "fill_value"})


def pure_call(path: str, num_args: int, keywords: set[str]) -> tuple[Result, Kind] | None:
    """What a library function gives, if it has no effect; None if that is not known."""
    module, _, name = path.partition(".")
    if not keywords <= _KEYWORDS:
        return None
    if module == "builtins" and name in _BUILTINS and not keywords:
        return "elementwise", _BUILTINS[name]
    if module == "math" and callable(getattr(math, name, None)) and not keywords:
        integral = name in ("floor", "ceil", "trunc", "gcd", "comb")
        return "scalar", "int" if integral else "float"
    if module == "numpy":
        return _numpy_call(name, num_args)
    return None


def _numpy_call(name: str, num_args: int) -> tuple[Result, Kind] | None:
    found = getattr(np, name, None)
    if isinstance(found, np.ufunc):
        # One more positional argument would be the array that the result is written to.
        return ("elementwise", "unknown") if num_args == found.nin and found.nout == 1 else None
    if isinstance(found, type) and issubclass(found, np.generic):
        integral = issubclass(found, np.integer)
        return "elementwise", "int" if integral else "unknown"
    if name in _REDUCERS and 1 <= num_args <= _REDUCERS[name]:
        return ("fresh" if num_args == 2 and name not in ("dot", "vdot") else "scalar"), "unknown"
    if name in _FRESH and num_args <= _FRESH[name]:
        return "fresh", "unknown"
    return None


def pure_method(name: str, num_args: int, keywords: set[str]) -> Result | None:
    """What a method of an array gives, if it has no effect."""
    if name not in _ARRAY_METHODS or not keywords <= _KEYWORDS:
        return None
    result = _ARRAY_METHODS[name]
    return "fresh" if num_args and result == "scalar" and name != "item" else result
