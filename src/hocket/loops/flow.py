"""Find names that code may read before it has surely assigned them.

A forward pass over the syntax tree keeps the set of names that are defined on every path so far;
branches are intersected, and ``break`` and ``continue`` contribute the set at their position.
O(statements × names). A name that an iteration may read before it assigns it is carried from one
iteration to the next.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Defined = frozenset[str] | None
"""Names defined on every path to a point; None if no path reaches it."""


def stored_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Names that are bound anywhere below some nodes."""
    return frozenset(
        node.id
        for top in nodes
        for node in ast.walk(top)
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
    )


def loaded_names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Names that are read anywhere below some nodes."""
    return frozenset(
        node.id
        for top in nodes
        for node in ast.walk(top)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )


def mentions(node: ast.AST, name: str) -> bool:
    """True if a name is read or bound anywhere below a node."""
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def exposed_names(
    statements: Sequence[ast.stmt], runs: Callable[[ast.For], bool] = lambda loop: False
) -> frozenset[str]:
    """Names that may be read before assignment; ``runs`` is True for loops that surely run."""
    flow = _Flow(runs)
    flow.block(statements, frozenset())
    return frozenset(flow.exposed)


@dataclass
class _Flow:
    runs: Callable[[ast.For], bool]
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
            case ast.For():
                return self.for_loop(node, defined)
            case ast.While():
                return self.while_loop(node, defined)
            case ast.Break():
                if self.breaks:
                    self.breaks[-1].append(defined)
                return None
            case ast.Continue():
                if self.continues:
                    self.continues[-1].append(defined)
                return None
            case ast.Return(value):
                self.load(value, defined)
                return None
            case ast.AugAssign(target, _, value):
                self.load(value, defined)
                self.load(target, defined)
                if isinstance(target, ast.Name) and target.id not in defined:
                    self.exposed.add(target.id)
                return defined | stored_names([target])
            case ast.Assign(targets, value):
                self.load(value, defined)
                for bound in targets:
                    self.load(bound, defined)
                return defined | stored_names(targets)
            case ast.AnnAssign(target, _, value):
                self.load(value, defined)
                return defined | stored_names([target]) if value is not None else defined
            case ast.Pass() | ast.Expr(ast.Constant()):
                return defined
            case _:
                # Whatever else there is may read all its names and surely binds none.
                self.load(node, defined)
                return defined

    def for_loop(self, node: ast.For, defined: frozenset[str]) -> Defined:
        self.load(node.iter, defined)
        inside = defined | stored_names([node.target])
        end, breaks = self.loop_body(node.body, inside)
        after = [end, *breaks]
        if not self.runs(node):
            after.append(defined)
        result = _meet(after)
        return self.block(node.orelse, result) if result is not None else None

    def while_loop(self, node: ast.While, defined: frozenset[str]) -> Defined:
        self.load(node.test, defined)
        _, breaks = self.loop_body(node.body, defined)
        forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        result = _meet(breaks if forever else [defined, *breaks])
        return self.block(node.orelse, result) if result is not None else None

    def loop_body(
        self, body: Sequence[ast.stmt], defined: frozenset[str]
    ) -> tuple[Defined, list[Defined]]:
        self.breaks.append([])
        self.continues.append([])
        end = self.block(body, defined)
        return _meet([end, *self.continues.pop()]), self.breaks.pop()


def _meet(paths: Iterable[Defined]) -> Defined:
    reached = [defined for defined in paths if defined is not None]
    return frozenset.intersection(*reached) if reached else None
