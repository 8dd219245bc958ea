"""Scratch arrays: overwritten by every iteration before it reads them, so each worker has its own.

An array is private if the first statement of the iteration that mentions it fills it: ``p[:] = e``,
``p.fill(e)`` or ``for k in range(E): p[k] = e`` where E covers the array (checked when called).
It must appear under its own name only, never as a whole, so that no alias can see it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.loops.flow import loaded_names, mentions, stored_names
from hocket.loops.scope import Scope


@dataclass(frozen=True)
class Covers:
    """Condition: the array is not longer than the loop that fills it."""

    array: str
    stop: str


def private_arrays(
    statements: Sequence[ast.stmt], written: frozenset[str], scope: Scope
) -> dict[str, Covers | None]:
    """The private arrays, each with the condition that must hold."""
    found: dict[str, Covers | None] = {}
    for name in sorted(written):
        names = [other for other, info in scope.arrays.items() if info.owner == name]
        if names != [name] or not _only_subscripted(statements, name):
            continue
        first = next(node for node in statements if mentions(node, name))
        if _fills_at_once(first, name):
            found[name] = None
        elif scope.info(name).rank == 1:
            stop = _fills_in_loop(first, name, stored_names(statements))
            if stop is not None:
                found[name] = Covers(name, stop)
    return found


def _only_subscripted(statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether every mention is ``name[...]`` of a number, ``name[:] =``, ``len`` or ``fill``."""
    allowed: set[int] = set()
    for statement in statements:
        for node in ast.walk(statement):
            match node:
                case ast.Subscript(ast.Name(base) as root, place) if base == name:
                    if not any(isinstance(part, ast.Slice) for part in ast.walk(place)):
                        allowed.add(id(root))
                case ast.Assign([ast.Subscript(ast.Name(base) as root)], _) if base == name:
                    allowed.add(id(root))
                case ast.Attribute(ast.Name(base) as root, "fill" | "shape") if base == name:
                    allowed.add(id(root))
                case ast.Call(ast.Name("len"), [ast.Name(base) as root]) if base == name:
                    allowed.add(id(root))
                case _:
                    pass
    return all(
        id(node) in allowed
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id == name
    )


def _fills_at_once(node: ast.stmt, name: str) -> bool:
    match node:
        case ast.Assign([ast.Subscript(ast.Name(base), ast.Slice(None, None, None))], value):
            return base == name and not mentions(value, name)
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(base), "fill"), [value], [])):
            return base == name and not mentions(value, name)
        case _:
            return False


def _fills_in_loop(node: ast.stmt, name: str, stored: frozenset[str]) -> str | None:
    """The stop of a loop ``for k in range(E)`` whose every round first assigns ``name[k]``."""
    match node:
        case ast.For(ast.Name(variable), ast.Call(ast.Name("range"), [stop], []) as head, body, []):
            if loaded_names([head]) & stored or variable in stored_names(body):
                return None
            for statement in body:
                if mentions(statement, name):
                    return ast.unparse(stop) if _assigns(statement, name, variable, body) else None
                if any(isinstance(n, (ast.Break, ast.Continue)) for n in ast.walk(statement)):
                    return None
        case _:
            pass
    return None


def _assigns(node: ast.stmt, name: str, variable: str, body: Sequence[ast.stmt]) -> bool:
    match node:
        case ast.Assign([ast.Subscript(ast.Name(base), ast.Name(place))], value):
            if base != name or place != variable or mentions(value, name):
                return False
        case _:
            return False
    # Later reads in the same round may only be of what this round has assigned.
    here = f"{name}[{variable}]"
    return not any(isinstance(part, ast.Break) for item in body for part in ast.walk(item)) and all(
        ast.unparse(part) == here
        for statement in body
        for part in ast.walk(statement)
        if isinstance(part, ast.Subscript) and mentions(part.value, name)
    )
