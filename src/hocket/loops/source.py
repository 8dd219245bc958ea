"""Find the loops in a function's source and the names that each loop needs.

Loops over arrays, ``zip``, ``enumerate`` and ``reversed(range(..))`` are first rewritten as loops
over ``range``. Every outermost loop is a site; if it cannot run in parallel, the loops inside it
are tried.
"""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hocket.base.errors import InputFileError, unknown_name
from hocket.base.regular import read_regular
from hocket.loops.exits import Exit, Loop, depends_on_its_frame, exits_of, without_values
from hocket.loops.flow import exposed_names, loaded_names, stored_names
from hocket.loops.names import (
    Library,
    Names,
    OutsideNames,
    ParsedNames,
    called_names,
    local_names,
    outer_names,
    parsed,
)  # fmt: skip
from hocket.loops.nest import Nest

_N = TypeVar("_N", bound=ast.AST)
_MAX_BYTES = 10**7
"""Largest source file that is read, in bytes."""


@dataclass(frozen=True)
class AsWritten:
    """The original head of a loop that was rewritten as one over ``range``."""

    target: ast.expr
    iter: ast.expr
    num_heads: int
    """Number of statements at the start of the rewritten body that bind the original target."""


@dataclass(frozen=True)
class LoopSite:
    """A loop of a function, with the inner loops to try next if it cannot run in parallel."""

    number: int
    nest: Nest
    inputs: tuple[str, ...]
    children: tuple[LoopSite, ...] = ()
    exits: tuple[Exit, ...] = ()
    """Every ``return`` and ``raise`` of the loop."""

    @property
    def line(self) -> int:
        """First line of the loop."""
        return self.nest.node.lineno

    def walk(self) -> Iterator[LoopSite]:
        """Yield this site and all sites inside it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class LoopSource:
    """A function as a syntax tree with loops rewritten over ``range``, and its sites."""

    name: str
    node: ast.FunctionDef
    names: Names
    sites: tuple[LoopSite, ...]
    place: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Literal arguments of the function's ``parallel_for`` decorator."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the arguments."""
        arguments = self.node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return tuple(argument.arg for argument in every)

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the arguments without a default."""
        arguments = self.node.args
        plain = [*arguments.posonlyargs, *arguments.args]
        named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        needed = plain[: len(plain) - len(arguments.defaults)]
        needed += [argument for argument, default in named if default is None]
        return tuple(argument.arg for argument in needed)


def source_of(node: ast.FunctionDef, names: Names, place: str = "") -> LoopSource:
    """Find the loops of a function."""
    names = OutsideNames(names, local_names(node))
    plain = _PlainRanges().visit(copy.deepcopy(node))
    ast.fix_missing_locations(plain)
    counter = iter(range(1_000_000))
    later = outer_names(node)
    sites = () if depends_on_its_frame(node) else tuple(_sites(plain.body, later, names, counter))
    return LoopSource(node.name, plain, names, sites, place)


def parsed_source(path: str | Path, function: str) -> LoopSource:
    """Return a function of a file that is parsed, never run."""
    try:
        text = read_regular(path, _MAX_BYTES).decode()
        module = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputFileError(f"is no Python source: {error}", where=str(path)) from error
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if function not in functions:
        raise unknown_name("function", function, functions, where=str(path))
    node = functions[function]
    found = source_of(node, ParsedNames(module), str(path))
    return replace(found, options=_decorated(node))


def _decorated(node: ast.FunctionDef) -> dict[str, Any]:
    """The literal arguments of ``@hocket.parallel_for(...)``."""
    found: dict[str, Any] = {}
    for decorator in node.decorator_list:
        if not isinstance(decorator, ast.Call):
            continue
        if ast.unparse(decorator.func).rpartition(".")[2] != "parallel_for":
            continue
        for keyword in decorator.keywords:
            with contextlib.suppress(ValueError):
                found[keyword.arg or ""] = ast.literal_eval(keyword.value)
    return found


def _sites(
    statements: Sequence[ast.stmt], later: frozenset[str], names: Names, counter: Iterator[int]
) -> Iterator[LoopSite]:
    for position, node in enumerate(statements):
        rest = statements[position + 1 :]
        after = exposed_names(rest) | (later - _surely_stored(rest))
        if isinstance(node, ast.While) or (isinstance(node, ast.For) and _is_plain(node)):
            again = after | exposed_names([node])
            number = next(counter)
            children = tuple(_sites(node.body, again, names, counter))
            if isinstance(node, ast.While) and (node.orelse or not children):
                # Without a loop inside it is seldom worth compiling, and nothing is parallel.
                yield from children
                continue
            inputs = _inputs(node, names)
            yield LoopSite(number, Nest.of(node, after), inputs, children, exits_of(node))
        elif isinstance(node, ast.For):
            again = after | exposed_names([node])
            yield from _sites(node.body, again, names, counter)
        elif isinstance(node, ast.If):
            yield from _sites(node.body, after, names, counter)
            yield from _sites(node.orelse, after, names, counter)
        elif isinstance(node, ast.With) and not _handles_errors(node):
            for site in _sites(node.body, after, names, counter):
                # A block that swallows an exception would let names be read as they were before.
                if not any(stored_names([each.nest.node]) & after for each in site.walk()):
                    yield site


def _is_plain(node: ast.For) -> bool:
    return isinstance(node.target, ast.Name) and not node.orelse


def _handles_errors(node: ast.With) -> bool:
    """True for ``with np.errstate(...)``, whose error handling compiled code ignores."""
    return any("errstate" in ast.unparse(item.context_expr) for item in node.items)


def _surely_stored(statements: Sequence[ast.stmt]) -> frozenset[str]:
    """Names that plain assignments at this level bind on every path."""
    found: set[str] = set()
    for node in statements:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= stored_names([node])
        elif not isinstance(node, (ast.AugAssign, ast.Expr, ast.Pass)):
            break
    return frozenset(found)


def _inputs(loop: Loop, names: Names) -> tuple[str, ...]:
    """Names that the loop may read before it binds them, without called functions and modules."""
    node = without_values(loop)
    exposed = exposed_names([node])
    called = called_names(node)
    stored = stored_names([node])
    return tuple(
        sorted(
            name
            for name in exposed
            if name in stored or not (name in called or isinstance(names.meaning(name), Library))
        )
    )


class _PlainRanges(ast.NodeTransformer):
    """Rewrites loops over arrays as loops over ranges."""

    count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Rewrite an assertion as an ``if`` with a ``raise``, so that it needs no exit form."""
        arguments = [node.msg] if node.msg is not None else []
        raised = ast.Call(ast.Name("AssertionError", ast.Load()), arguments, [])
        body: list[ast.stmt] = [ast.Raise(raised, None)] if __debug__ else [ast.Pass()]
        return _placed(ast.If(ast.UnaryOp(ast.Not(), node.test), body, []), node)

    def visit_For(self, node: ast.For) -> ast.AST:
        """Rewrite one loop, after those inside it."""
        self.generic_visit(node)
        if node.orelse:
            return node
        if _is_call(node.iter, "reversed") and _is_call(node.iter.args[0], "range"):  # type: ignore[attr-defined]
            return self._reversed(node)
        if _is_call(node.iter, "range") or self._is_prange(node.iter):
            return node
        heads: list[ast.stmt] = []
        lengths: list[str] = []
        index = f"index_{self.count}_"
        self.count += 1
        if loaded_names([node.iter]) & stored_names(node.body):
            return node  # the loop goes on over what the name was bound to before
        if not _bind(node.target, node.iter, index, heads, lengths):
            return node
        stop = lengths[0] if len(lengths) == 1 else f"min({', '.join(lengths)})"
        loop = ast.For(
            ast.Name(index, ast.Store()), parsed(f"range({stop})"), [*heads, *node.body], [], None
        )
        placed = _placed(loop, node)
        # Python itself runs the loop as it was written: it may be over no array at all.
        placed.as_written = AsWritten(node.target, node.iter, len(heads))  # type: ignore[attr-defined]
        return placed

    def _is_prange(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "prange"

    def _reversed(self, node: ast.For) -> ast.AST:
        arguments = node.iter.args[0].args  # type: ignore[attr-defined]
        if len(arguments) == 3:
            return node
        start, stop = (ast.Constant(0), arguments[0]) if len(arguments) == 1 else arguments
        first, last = ast.unparse(start), ast.unparse(stop)
        node.iter = _placed(parsed(f"range(({last}) - 1, ({first}) - 1, -1)"), node)
        return node


def _bind(
    target: ast.expr, source: ast.expr, index: str, heads: list[ast.stmt], lengths: list[str]
) -> bool:
    """Statements that bind ``target`` to element ``index`` of ``source``, and its length."""
    if _is_call(source, "enumerate") and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        if len(source.args) != 1 or source.keywords:  # type: ignore[attr-defined]
            return False
        heads.append(_statement(f"{ast.unparse(target.elts[0])} = {index}"))
        return _bind(target.elts[1], source.args[0], index, heads, lengths)  # type: ignore[attr-defined]
    if _is_call(source, "zip") and isinstance(target, ast.Tuple):
        if source.keywords:  # type: ignore[attr-defined]
            return False
        parts = source.args  # type: ignore[attr-defined]
        return len(parts) == len(target.elts) and all(
            _bind(one, other, index, heads, lengths)
            for one, other in zip(target.elts, parts, strict=True)
        )
    if _is_call(source, "range") and len(source.args) == 1:  # type: ignore[attr-defined]
        heads.append(_statement(f"{ast.unparse(target)} = {index}"))
        lengths.append(ast.unparse(source.args[0]))  # type: ignore[attr-defined]
        return True
    if isinstance(source, ast.Name):
        heads.append(_statement(f"{ast.unparse(target)} = {source.id}[{index}]"))
        lengths.append(f"len({source.id})")
        return True
    return False


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def _placed(node: _N, like: ast.AST) -> _N:
    """Give generated nodes the lines of the code that they replace; others keep theirs."""
    for part in ast.walk(node):
        if isinstance(part, (ast.expr, ast.stmt)):
            line = getattr(part, "lineno", 1)
            if not hasattr(part, "end_lineno") or line < like.lineno:  # type: ignore[attr-defined]
                ast.copy_location(part, like)
    return node
