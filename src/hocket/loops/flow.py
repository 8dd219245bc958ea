"""Find names that code may read before it has certainly assigned them.

A forward pass over the syntax tree keeps the set of names that are defined on every path so far.
Branches are intersected, and ``break`` and ``continue`` contribute the set at their position.
O(statements × names). A name that an iteration may read before it assigns it is carried from one
iteration to the next.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Defined = frozenset[str] | None
"""Names defined on every path to a point; None if no path reaches it."""


def _names(nodes: Iterable[ast.AST], *contexts: type[ast.expr_context]) -> frozenset[str]:
    return frozenset(
        node.id
        for top in nodes
        for node in ast.walk(top)
        if isinstance(node, ast.Name) and isinstance(node.ctx, contexts)
    )


def stored_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Names that are bound anywhere below some nodes."""
    return _names(nodes, ast.Store, ast.Del)


def loaded_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Names that are read anywhere below some nodes."""
    return _names(nodes, ast.Load)


def mentions(node: ast.AST, name: str) -> bool:
    """True if a name is read or bound anywhere below a node."""
    return name in _names([node], ast.expr_context)


def exposed_names(statements: Sequence[ast.stmt]) -> frozenset[str]:
    """Names that may be read before assignment."""
    flow = _Flow()
    flow.block(statements, frozenset())
    return frozenset(flow.exposed)


def bound_by_iteration(loop: ast.For) -> Defined:
    """Names that are surely bound after a loop that ran at least one iteration."""
    return _meet(_Flow().iteration(loop.body, stored_names([loop.target])))


@dataclass
class _Flow:
    exposed: set[str] = field(default_factory=set)
    breaks: list[list[Defined]] = field(default_factory=list)
    continues: list[list[Defined]] = field(default_factory=list)

    def block(self, statements: Sequence[ast.stmt], defined: Defined) -> Defined:
        for statement in statements:
            if defined is None:
                return None
            defined = self.statement(statement, defined)
        return defined

    def load(self, node: ast.AST | None, defined: frozenset[str]) -> None:
        if node is not None:
            self.exposed |= loaded_names([node]) - defined

    def statement(self, node: ast.stmt, defined: frozenset[str]) -> Defined:
        match node:
            case ast.If(test, body, orelse):
                self.load(test, defined)
                return _meet([self.block(body, defined), self.block(orelse, defined)])
            case ast.For(target, head, body, orelse):
                self.load(head, defined)
                inside = defined | stored_names([target])
                # The loop may have no iterations.
                return self.block(orelse, _meet([defined, *self.iteration(body, inside)]))
            case ast.While(test, body, orelse):
                self.load(test, defined)
                _, *breaks = self.iteration(body, defined)
                # ``while True`` ends only by a break, so names bound before all breaks are bound
                # afterwards.
                is_endless = isinstance(test, ast.Constant) and bool(test.value)
                return self.block(orelse, _meet(breaks if is_endless else [defined, *breaks]))
            case ast.Break() | ast.Continue():
                waiting = self.breaks if isinstance(node, ast.Break) else self.continues
                if waiting:
                    waiting[-1].append(defined)
                return None
            case ast.Return(value):
                self.load(value, defined)
                return None
            case ast.AugAssign(target, _, value):
                self.load(node, defined)
                # An augmented assignment reads its target first, although the tree marks it as a
                # store only.
                if isinstance(target, ast.Name) and target.id not in defined:
                    self.exposed.add(target.id)
                return defined | stored_names([target])
            case ast.Assign(targets):
                self.load(node, defined)
                return defined | stored_names(targets)
            case ast.AnnAssign(target, _, value):
                self.load(value, defined)
                return defined | stored_names([target]) if value is not None else defined
            case _:
                # Any other statement may read all of its names, and is not assumed to bind any.
                self.load(node, defined)
                return defined

    def iteration(self, body: Sequence[ast.stmt], defined: frozenset[str]) -> list[Defined]:
        """Names defined at the end of an iteration, and at each ``break``."""
        self.breaks.append([])
        self.continues.append([])
        end = self.block(body, defined)
        return [_meet([end, *self.continues.pop()]), *self.breaks.pop()]


def _meet(paths: Iterable[Defined]) -> Defined:
    reached = [defined for defined in paths if defined is not None]
    return frozenset.intersection(*reached) if reached else None
