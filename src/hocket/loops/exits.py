"""Exits of a loop that is compiled as written: its end, ``break``, ``return``, ``raise``.

Compiled code cannot leave the user's function. A ``return`` or ``raise`` of the loop leaves the
kernel with a number and the names that its expression reads; the function, which still runs in
Python, binds them and executes the statement itself. So what is returned or raised is what Python
makes of it. A loop that compiled code would run differently stays in Python (`not_compilable`).
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
_STATEFUL = (ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda, ast.Dict, ast.Set, ast.DictComp,
             ast.SetComp, ast.GeneratorExp, ast.NamedExpr, ast.JoinedStr, ast.Starred)  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_FRAME_CALLS = frozenset({"locals", "vars", "eval", "exec", "globals", "dir"})


@dataclass(frozen=True)
class Exit:
    """A ``return`` or ``raise`` inside a loop, with the names bound by the loop that it reads."""

    line: int
    names: tuple[str, ...]


def leaving_statements(loop: Loop) -> list[Leaving]:
    """The statements that leave the function, in the order of the source."""
    return [node for node in _inside(loop) if isinstance(node, (ast.Return, ast.Raise))]


def exits_of(loop: Loop) -> tuple[Exit, ...]:
    """One exit per ``return`` and ``raise``."""
    bound = stored_names([without_values(loop)])
    return tuple(
        Exit(node.lineno, tuple(sorted(loaded_names([node]) & bound)))
        for node in leaving_statements(loop)
    )


def without_values(loop: Loop) -> Loop:
    """The loop where exits read only the names that the loop itself binds."""
    bound = stored_names([_replaced(loop, lambda node: ast.Return(None))])

    def cut(node: Leaving) -> ast.stmt:
        names = sorted(loaded_names([node]) & bound)
        return ast.Return(ast.Tuple([ast.Name(name, ast.Load()) for name in names], ast.Load()))

    return _replaced(loop, cut)


def with_codes(loop: Loop, exits: Sequence[Exit], results: Sequence[str]) -> Loop:
    """The loop for a kernel: each exit gives its number and the results that it reads."""
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
    """``(number, result or None, …)``: names that this exit does not need may be unbound there."""
    parts: list[ast.expr] = [ast.Constant(number)]
    parts += [
        ast.Name(name, ast.Load()) if name in names else ast.Constant(None) for name in results
    ]
    return ast.Tuple(parts, ast.Load())


def not_compilable(loop: Loop) -> tuple[str, int] | None:
    """The first thing of a loop that compiled code would do differently, and its line."""
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
    shared = comprehension_names(loop) & _plain_names(loop)
    if shared:
        return f"{min(shared)}, which a comprehension hides", loop.lineno
    return None


def is_evaluable(head: ast.expr) -> bool:
    """True if a loop's range can be taken before the loop without any effect."""
    calls = [node for node in ast.walk(head) if isinstance(node, ast.Call)]
    plain = ("range", "len", "min", "max", "prange")
    return all(isinstance(call.func, ast.Name) and call.func.id in plain for call in calls)


def reads_its_frame(function: ast.FunctionDef) -> bool:
    """True if the function looks at its own variables by ``locals()`` and the like."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FRAME_CALLS
        for node in ast.walk(function)
    )


def _inside(loop: Loop) -> Iterator[ast.AST]:
    """Nodes of a loop, not of functions defined in it; such a function itself is named."""
    waiting: list[ast.AST] = [loop]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _SCOPES):
            waiting[:0] = list(ast.iter_child_nodes(node))


def _in_exit(node: ast.AST, loop: Loop) -> bool:
    """Expressions of an exit are evaluated by Python, so they may be anything."""
    if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
        return False
    return any(part is node for each in leaving_statements(loop) for part in ast.walk(each))


def comprehension_names(loop: Loop) -> frozenset[str]:
    """Names that comprehensions of the loop bind for themselves."""
    targets = [n.target for n in ast.walk(loop) if isinstance(n, ast.comprehension)]
    return stored_names(targets)


def _plain_names(loop: Loop) -> frozenset[str]:
    """Names bound by statements of the loop itself."""
    hidden = {
        id(part)
        for node in ast.walk(loop)
        if isinstance(node, ast.comprehension)
        for part in ast.walk(node.target)
    }
    return frozenset(
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in hidden
    )
