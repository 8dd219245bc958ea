"""Exits of a loop that is compiled as written: its end, ``break``, ``return``, ``raise``.

Compiled code cannot leave the user's function. At a ``return`` or ``raise``, the kernel returns the
number of that exit and the values of the names that its expression reads. The function, which still
runs in Python, binds them and executes the statement itself, so the value or exception is Python's.
A loop that compiled code would run differently stays in Python (`not_compilable`).
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hocket.loops.flow import loaded_names, stored_names

Loop = ast.For | ast.While
Leaving = ast.Return | ast.Raise
_STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If, ast.For, ast.While, ast.Break, ast.Continue,
    ast.Return, ast.Pass, ast.Expr, ast.Raise, ast.Assert,
)  # fmt: skip
_STATEFUL = (
    ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda, ast.Dict, ast.Set, ast.ListComp, ast.DictComp,
    ast.SetComp, ast.GeneratorExp, ast.NamedExpr, ast.JoinedStr, ast.Starred,
)  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_FRAME_CALLS = frozenset({"locals", "vars", "eval", "exec", "globals", "dir"})


@dataclass(frozen=True)
class Exit:
    """A ``return`` or ``raise`` inside a loop, with the names bound by the loop that it reads."""

    line: int
    names: tuple[str, ...]


def leaving_statements(loop: Loop) -> list[Leaving]:
    """Return the ``return`` and ``raise`` statements of a loop in the order of the source."""
    return [node for node in _inside(loop) if isinstance(node, (ast.Return, ast.Raise))]


def exits_of(loop: Loop) -> tuple[Exit, ...]:
    """Return one exit per ``return`` and ``raise``."""
    bound = stored_names([without_values(loop)])
    return tuple(
        Exit(node.lineno, tuple(sorted(loaded_names([node]) & bound)))
        for node in leaving_statements(loop)
    )


def without_values(loop: Loop) -> Loop:
    """Return the loop with each exit reduced to reading the names that the loop itself binds."""
    bound = stored_names([_replaced(loop, lambda node: ast.Return(None))])

    def cut(node: Leaving) -> ast.stmt:
        names = sorted(loaded_names([node]) & bound)
        return ast.Return(ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load()))

    return _replaced(loop, cut)


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
            return node if isinstance(node, _SCOPES) else self.generic_visit(node)

    found = Replaced().visit(copy.deepcopy(loop))
    assert isinstance(found, (ast.For, ast.While))
    return ast.fix_missing_locations(found)


def exit_value(number: int, names: Sequence[str], results: Sequence[str]) -> ast.expr:
    """Build ``(number, value or None, …)``; names that this exit does not read may be unbound."""
    parts: list[ast.expr] = [ast.Constant(number)]
    parts += [
        ast.Name(name, ast.Load()) if name in names else ast.Constant(None) for name in results
    ]
    return ast.Tuple(parts, ast.Load())


def not_compilable(loop: Loop) -> tuple[str, int] | None:
    """Return the first construct that compiled code would execute differently, and its line."""
    for node in _inside(loop):
        line = getattr(node, "lineno", loop.lineno)
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            return f"{type(node).__name__.lower()} statement", line
        if isinstance(node, _STATEFUL) and not _in_exit(node, loop):
            return f"{type(node).__name__} expression", line
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (
            "print", "input", "open", "next", "iter", "id", "type", "isinstance",
        ):  # fmt: skip
            return f"call of {node.func.id}", line
    return None


def is_evaluable(head: ast.expr) -> bool:
    """True if a loop's range can be evaluated before the loop without side effects."""
    calls = [node for node in ast.walk(head) if isinstance(node, ast.Call)]
    plain = ("range", "len", "min", "max", "prange")
    return all(isinstance(call.func, ast.Name) and call.func.id in plain for call in calls)


def depends_on_its_frame(function: ast.FunctionDef) -> bool:
    """True if a function calls ``locals()`` or the like, or uses private names.

    A class would mangle private names.
    """
    for node in ast.walk(function):
        names = (getattr(node, field, "") for field in ("id", "attr", "arg"))
        if any(str(name).startswith("__") and not str(name).endswith("__") for name in names):
            return True
        if isinstance(node, ast.Name) and node.id in _FRAME_CALLS:
            return True
    return False


def _inside(loop: Loop) -> Iterator[ast.AST]:
    """Yield the nodes of a loop; functions defined in it are yielded but not entered."""
    waiting: list[ast.AST] = [loop]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _SCOPES):
            waiting[:0] = list(ast.iter_child_nodes(node))


def _in_exit(node: ast.AST, loop: Loop) -> bool:
    """True if a node is part of an exit, whose expressions Python evaluates."""
    if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
        return False
    return any(part is node for each in leaving_statements(loop) for part in ast.walk(each))
