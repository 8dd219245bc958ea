"""Resolve names outside a loop: numpy, math, plain helper functions, constants.

There are two implementations: one for a live function (its globals and closure), and one for a file
that is only parsed, so that explaining a file executes none of its code.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

MODULES = ("numpy", "math", "numba")


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


@dataclass(frozen=True)
class Names(ABC):
    """Resolves a global name as one function sees it."""

    local: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Names that are local to the function, so never global."""

    def meaning(self, name: str) -> Meaning:
        """Return the meaning of a global name; None for anything that is not understood."""
        return None if name in self.local else self._find(name)

    @abstractmethod
    def _find(self, name: str) -> Meaning: ...

    def fingerprint(self, called: frozenset[str]) -> Any:
        """Return a value that changes if a called name, or a number that it uses, is rebound."""
        return None

    def library(self, node: ast.expr) -> str | None:
        """Return the dotted path of a library name; None for any other expression."""
        if isinstance(node, ast.Name):
            meaning = self.meaning(node.id)
            return meaning.path if isinstance(meaning, Library) else None
        parent = self.library(node.value) if isinstance(node, ast.Attribute) else None
        return f"{parent}.{node.attr}" if parent else None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class LiveNames(Names):
    """The globals and the closure of a function object."""

    function: FunctionType

    def value(self, name: str) -> Any:
        """Return the current value of a name outside the function; None if it is unbound."""
        free = self.function.__code__.co_freevars
        if name in free and self.function.__closure__ is not None:
            try:
                return self.function.__closure__[free.index(name)].cell_contents
            except ValueError:
                return None
        return self.function.__globals__.get(name)

    def _find(self, name: str) -> Meaning:
        found = self.value(name)
        return _meaning_of(name, getattr(builtins, name, None) if found is None else found)

    def fingerprint(self, called: frozenset[str]) -> Any:
        """Return the code of called functions and the values of their numbers."""
        return _fingerprint(self, called - self.local, frozenset())


@dataclass(frozen=True)
class ParsedNames(Names):
    """Names at the top level of a module that is parsed, never run."""

    module: ast.Module

    def _find(self, name: str) -> Meaning:
        found: Meaning = Library(f"builtins.{name}") if hasattr(builtins, name) else None
        for node in self.module.body:  # the last statement that binds the name counts
            match node:
                case ast.FunctionDef() if node.name == name:
                    found = Helper(name, node, replace(self, local=local_names(node)))
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


def _fingerprint(live: LiveNames, names: frozenset[str], seen: frozenset[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for name in sorted(names):
        value = live.value(name)
        plain = getattr(value, "py_func", value)
        if isinstance(value, (bool, int, float)):
            # As text, because NaN differs from itself and 0.0 equals -0.0.
            found.append((name, type(value), repr(value)))
        elif isinstance(plain, FunctionType) and plain.__code__ not in seen:
            code = plain.__code__
            used = frozenset((*code.co_names, *code.co_freevars))
            found.append((name, code, _fingerprint(LiveNames(plain), used, seen | {code})))
    return tuple(found)


def called_names(node: ast.AST) -> frozenset[str]:
    """Plain names that are called anywhere below a node."""
    return frozenset(
        call.func.id
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    )


def local_names(function: ast.FunctionDef) -> frozenset[str]:
    """Names that a function binds itself: arguments, variables, functions inside it."""
    found: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.arg(name) | ast.Name(name, ast.Store()):
                found.add(name)
            case ast.FunctionDef(name) | ast.ClassDef(name) if node is not function:
                found.add(name)
            case _:
                pass
    return frozenset(found) - outer_names(function)


def outer_names(function: ast.FunctionDef) -> frozenset[str]:
    """Global or enclosing-scope names that a function assigns to."""
    declared = (n for n in ast.walk(function) if isinstance(n, (ast.Global, ast.Nonlocal)))
    return frozenset(name for node in declared for name in node.names)


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
        try:
            node = function_node(plain)
        except (OSError, TypeError, SyntaxError):
            return None
        return Helper(name, node, LiveNames(plain, local=local_names(node)))
    known = getattr(found, "__name__", name)
    for module in (np, math, builtins):
        if found is not None and getattr(module, known, None) is found:
            return Library(f"{module.__name__}.{known}")
    return None


def parsed(text: str) -> ast.expr:
    """The syntax tree of an expression."""
    return ast.parse(text, mode="eval").body


def function_node(function: FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function object, with the line numbers of its file."""
    lines, first = inspect.getsourcelines(function)
    node = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(node, ast.FunctionDef):
        raise TypeError(f"{function.__name__} is no plain function")
    ast.increment_lineno(node, first - 1)
    # The decorators were applied when the function was defined; kernels use the body only.
    node.decorator_list = []
    return node
