"""Exits of a loop that is compiled as written: its end, ``break``, ``return``, ``raise``.

Compiled code cannot leave the user's function. At a ``return`` or ``raise``, the kernel returns the
number of that exit and the values of the names that its expression reads. The function, which still
runs in Python, binds these names and executes the statement itself, so the value or exception is
Python's. A loop that compiled code would execute differently stays in Python (`not_compilable`).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hocket.loops.flow import loaded_names

Loop = ast.For | ast.While
Leaving = ast.Return | ast.Raise
_STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If, ast.For, ast.While, ast.Break, ast.Continue,
    ast.Return, ast.Pass, ast.Expr, ast.Raise, ast.Assert,
)  # fmt: skip
_SUSPENDING = (ast.Yield, ast.YieldFrom, ast.Await)
_STATEFUL = (
    *_SUSPENDING, ast.Lambda, ast.Dict, ast.Set, ast.ListComp, ast.DictComp,
    ast.SetComp, ast.GeneratorExp, ast.NamedExpr, ast.JoinedStr, ast.Starred,
)  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_EFFECTS = ("print", "input", "open", "next", "iter", "id", "type", "isinstance")
_FRAME_CALLS = frozenset({"locals", "vars", "eval", "exec", "globals", "dir"})


@dataclass(frozen=True)
class Exit:
    """A ``return`` or ``raise`` inside a loop, with the names that it reads and the loop binds."""

    line: int
    names: tuple[str, ...]


def leaving_statements(loop: Loop) -> list[Leaving]:
    """Return the ``return`` and ``raise`` statements of a loop in the order of the source."""
    return [node for node in _own_nodes(loop) if isinstance(node, (ast.Return, ast.Raise))]


def bound_names(loop: Loop) -> frozenset[str]:
    """Names that a loop binds, other than in the expressions of its exits."""
    return frozenset(
        node.id
        for node in _own_nodes(loop)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )


def exits_of(loop: Loop) -> tuple[Exit, ...]:
    """Return one exit per ``return`` and ``raise``."""
    bound = bound_names(loop)
    return tuple(
        Exit(node.lineno, tuple(sorted(loaded_names([node]) & bound)))
        for node in leaving_statements(loop)
    )


def without_values(loop: Loop) -> Loop:
    """Return the loop with each exit reduced to reading the names that the loop itself binds."""
    exits = iter(exits_of(loop))

    def reduced(node: Leaving) -> ast.stmt:
        names: list[ast.expr] = [ast.Name(name, ast.Load()) for name in next(exits).names]
        return ast.Return(ast.Tuple(names, ast.Load()))

    return _replaced(loop, reduced)


def with_codes(loop: Loop, exits: Sequence[Exit], results: Sequence[str]) -> Loop:
    """Return the loop for a kernel: each exit returns its number and the values that it reads."""
    numbers = iter(enumerate(exits, 1))

    def coded(node: Leaving) -> ast.stmt:
        number, leave = next(numbers)
        return ast.Return(exit_value(number, leave.names, results))

    return _replaced(loop, coded)


def _replaced(loop: Loop, change: Callable[[Leaving], ast.stmt]) -> Loop:
    class Replaced(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, (ast.Return, ast.Raise)):
                return ast.copy_location(change(node), node)
            # Functions inside the loop have returns of their own.
            return node if isinstance(node, _SCOPES) else self.generic_visit(node)

    found = Replaced().visit(copy.deepcopy(loop))
    assert isinstance(found, (ast.For, ast.While))
    return ast.fix_missing_locations(found)


def exit_value(number: int, names: Sequence[str], results: Sequence[str]) -> ast.expr:
    """Build ``(number, value or None, …)``; names that this exit does not read may be unbound."""
    values: list[ast.expr] = [
        ast.Name(name, ast.Load()) if name in names else ast.Constant(None) for name in results
    ]
    return ast.Tuple([ast.Constant(number), *values], ast.Load())


def not_compilable(loop: Loop) -> tuple[str, int] | None:
    """Return the first construct that compiled code would execute differently, and its line."""
    for node in _own_nodes(loop):
        line = getattr(node, "lineno", loop.lineno)
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            return f"{type(node).__name__.lower()} statement", line
        # Python evaluates the expression of an exit, but a generator or coroutine is not left at a
        # yield.
        is_exit = isinstance(node, (ast.Return, ast.Raise))
        if isinstance(node, _STATEFUL) or (
            is_exit and any(isinstance(part, _SUSPENDING) for part in ast.walk(node))
        ):
            return f"{type(node).__name__} expression", line
        match node:
            case ast.Call(ast.Name(name)) if name in _EFFECTS:
                return f"call of {name}", line
    return None


def depends_on_its_frame(function: ast.FunctionDef) -> bool:
    """True if a function calls ``locals()`` or the like, or uses private names.

    Private names are mangled inside a class, so they cannot be compiled outside it.
    """
    for node in ast.walk(function):
        names = (getattr(node, field, "") for field in ("id", "attr", "arg"))
        if any(str(name).startswith("__") and not str(name).endswith("__") for name in names):
            return True
        if isinstance(node, ast.Name) and node.id in _FRAME_CALLS:
            return True
    return False


def _own_nodes(loop: Loop) -> Iterator[ast.AST]:
    """Yield the nodes of a loop; exits and functions in it are yielded but not entered."""
    waiting: list[ast.AST] = [loop]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, (*_SCOPES, ast.Return, ast.Raise)):
            # Children are put at the front, which keeps the order of the source.
            waiting[:0] = ast.iter_child_nodes(node)
