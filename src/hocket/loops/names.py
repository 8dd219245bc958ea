"""What the names outside a loop mean: numpy, math, plain helpers, constants.

Two sources with one face: a live function (its globals and closure) and a file that is only parsed,
so that explaining a file runs no code of it.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

MODULES = {"numpy": "numpy", "math": "math", "numba": "numba"}


@dataclass(frozen=True)
class Helper:
    """A plain function that the loop calls."""

    name: str
    node: ast.FunctionDef
    names: Names = field(compare=False, repr=False)


@dataclass(frozen=True)
class Library:
    """A module or a member of one: ``numpy``, ``numpy.exp``, ``builtins.len``."""

    path: str


@dataclass(frozen=True)
class Number:
    """A module-level number; compiled code holds it as a constant."""

    value: int | float | bool


Meaning = Helper | Library | Number | None


class Names:
    """Resolves a global name."""

    def meaning(self, name: str) -> Meaning:
        """What ``name`` stands for; None for anything that is not understood."""
        raise NotImplementedError


@dataclass(frozen=True)
class LiveNames(Names):
    """The globals and the closure of a function object."""

    variables: Callable[[], dict[str, Any]]

    def meaning(self, name: str) -> Meaning:
        """By the object that the name is bound to now."""
        found = self.variables().get(name, getattr(builtins, name, None))
        return _meaning_of(name, found)


@dataclass(frozen=True)
class ParsedNames(Names):
    """The top level of a module that is parsed, never run."""

    module: ast.Module

    def meaning(self, name: str) -> Meaning:
        """By the last statement of the module that binds the name."""
        found: Meaning = None
        if hasattr(builtins, name):
            found = Library(f"builtins.{name}")
        for node in self.module.body:
            match node:
                case ast.FunctionDef() if node.name == name:
                    found = Helper(name, node, self)
                case ast.Import(aliases):
                    for alias in aliases:
                        if name == (alias.asname or alias.name.partition(".")[0]):
                            found = Library(alias.name) if alias.name in MODULES else None
                case ast.ImportFrom(module, aliases):
                    for alias in aliases:
                        if name == (alias.asname or alias.name):
                            found = Library(f"{module}.{alias.name}") if module in MODULES else None
                case ast.Assign([ast.Name(target)], value) if target == name:
                    found = _number(value)
                case _:
                    pass
        return found


def _number(value: ast.expr) -> Meaning:
    try:
        constant = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return Number(constant) if isinstance(constant, (int, float)) else None


def _meaning_of(name: str, found: Any) -> Meaning:
    plain = getattr(found, "py_func", found)
    if isinstance(found, ModuleType):
        return Library(found.__name__) if found.__name__ in MODULES else None
    if isinstance(found, (bool, int, float)):
        return Number(found)
    if isinstance(plain, FunctionType):
        if (plain.__module__ or "").partition(".")[0] == "numpy":
            return Library(f"numpy.{plain.__name__}")
        return _helper(name, plain)
    known = getattr(found, "__name__", name)
    for module, prefix in ((np, "numpy"), (math, "math"), (builtins, "builtins")):
        if found is not None and getattr(module, known, None) is found:
            return Library(f"{prefix}.{known}")
    return None


def _helper(name: str, function: FunctionType) -> Meaning:
    try:
        node = function_node(function)
    except (OSError, TypeError, SyntaxError):
        return None
    return Helper(name, node, live_names(function))


def live_names(function: FunctionType) -> LiveNames:
    """The names that a function object sees."""

    def variables() -> dict[str, Any]:
        closure = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
        return {**function.__globals__, **closure}

    return LiveNames(variables)


def function_node(function: FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function object, with the line numbers of its file."""
    lines, first = inspect.getsourcelines(function)
    module = ast.parse(textwrap.dedent("".join(lines)))
    node = module.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise TypeError(f"{function.__name__} is no plain function")
    ast.increment_lineno(node, first - 1)
    node.decorator_list = []
    return node
