"""Find the loops in a function's source and the names that each loop needs.

Loops over arrays, ``zip``, ``enumerate`` and ``reversed(range(..))`` are first rewritten as loops
over ``range``. Every outermost loop is a site; if it cannot run in parallel, the loops inside it
are tried.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
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
    """A function as a syntax tree, and its loops."""

    written: ast.FunctionDef
    """The function as the user wrote it."""
    node: ast.FunctionDef
    """The function with loops rewritten over ``range``."""
    names: Names
    sites: tuple[LoopSite, ...]
    place: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Literal arguments of the function's ``parallel_for`` decorator."""

    @property
    def all_sites(self) -> list[LoopSite]:
        """The sites, and all sites inside them."""
        return [site for top in self.sites for site in top.walk()]

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
    names = replace(names, local=local_names(node))
    plain = _RangeLoops().visit(copy.deepcopy(node))
    ast.fix_missing_locations(plain)
    sites: Iterator[LoopSite] = iter(())
    if not depends_on_its_frame(node):
        sites = _sites(plain.body, outer_names(node), names, itertools.count())
    return LoopSource(node, plain, names, tuple(sites), place)


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
    options: dict[str, Any] = {}
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(ast.Name("parallel_for") | ast.Attribute(_, "parallel_for")):
                for keyword in decorator.keywords:
                    with contextlib.suppress(ValueError):
                        options[keyword.arg or ""] = ast.literal_eval(keyword.value)
    return replace(source_of(node, ParsedNames(module), str(path)), options=options)


def _sites(
    statements: Sequence[ast.stmt], later: frozenset[str], names: Names, numbers: Iterator[int]
) -> Iterator[LoopSite]:
    """Yield the sites of a block; ``later`` are the names that may be read after the block."""
    for position, node in enumerate(statements):
        rest = statements[position + 1 :]
        after = exposed_names(rest) | (later - _surely_stored(rest))
        match node:
            case ast.While() | ast.For():
                number = next(numbers)
                inside = after | exposed_names([node])  # an iteration may read what the last left
                children = tuple(_sites(node.body, inside, names, numbers))
                # A ``while`` loop without an inner loop is seldom worth compiling.
                target = getattr(node, "target", None)
                is_site = isinstance(target, ast.Name) or (target is None and bool(children))
                if is_site and not node.orelse:
                    nest = Nest.of(node, after)
                    yield LoopSite(number, nest, _inputs(node, names), children, exits_of(node))
                else:
                    yield from children
            case ast.If(_, body, orelse):
                yield from _sites(body, after, names, numbers)
                yield from _sites(orelse, after, names, numbers)
            case ast.With(items, body) if not any("errstate" in ast.unparse(i) for i in items):
                # Compiled code ignores `np.errstate`. A ``with`` block may swallow an exception,
                # after which names have their old values.
                for site in _sites(body, after, names, numbers):
                    if not any(stored_names([each.nest.node]) & after for each in site.walk()):
                        yield site


def _surely_stored(statements: Sequence[ast.stmt]) -> frozenset[str]:
    """Names that plain assignments at this level bind on every path."""
    found: set[str] = set()
    for node in statements:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= stored_names([node])
        # Any other statement may leave the block before the remaining statements run.
        elif not isinstance(node, (ast.AugAssign, ast.Expr, ast.Pass)):
            break
    return frozenset(found)


def _inputs(loop: Loop, names: Names) -> tuple[str, ...]:
    """Names that the loop may read before it binds them, except called functions and modules."""
    node = without_values(loop)
    called, stored = called_names(node), stored_names([node])

    def is_input(name: str) -> bool:
        # The kernel's own module defines called functions and modules.
        return name in stored or not (
            name in called or isinstance(names.meaning(name), Library)
        )  # fmt: skip

    return tuple(sorted(filter(is_input, exposed_names([node]))))


class _RangeLoops(ast.NodeTransformer):
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
        match node.iter:
            case ast.Call(ast.Name("reversed"), [ast.Call(ast.Name("range"), [*_, stop] as ends)]):
                if len(ends) < 3:
                    first = ast.unparse(ends[0]) if len(ends) == 2 else "0"
                    text = f"range(({ast.unparse(stop)}) - 1, ({first}) - 1, -1)"
                    node.iter = _placed(parsed(text), node)
                return node
            case ast.Call(ast.Name("range" | "prange") | ast.Attribute(_, "prange")):
                return node
        index = f"index_{self.count}_"
        self.count += 1
        found = _elements(node.target, node.iter, index)
        # A name that the body rebinds is no longer the array over which the loop runs.
        if node.orelse or found is None or loaded_names([node.iter]) & stored_names(node.body):
            return node
        heads, lengths = found
        stop = parsed(lengths[0] if len(lengths) == 1 else f"min({', '.join(lengths)})")
        head = ast.Call(ast.Name("range", ast.Load()), [stop], [])
        body = [*ast.parse("\n".join(heads)).body, *node.body]
        return _placed(ast.For(ast.Name(index, ast.Store()), head, body, [], None), node)


def _elements(target: ast.expr, source: ast.expr, index: str) -> tuple[list[str], list[str]] | None:
    """Return lines that bind ``target`` to element ``index`` of ``source``, and its lengths."""
    name = ast.unparse(target)
    match target, source:
        case ast.Tuple([count, element]), ast.Call(ast.Name("enumerate"), [inner], []):
            found = _elements(element, inner, index)
            return found and ([f"{ast.unparse(count)} = {index}", *found[0]], found[1])
        case ast.Tuple(targets), ast.Call(ast.Name("zip"), sources, []) if len(targets) == len(
            sources
        ):
            parts = [_elements(*pair, index) for pair in zip(targets, sources, strict=True)]
            known = [part for part in parts if part is not None]
            heads, lengths = (list(itertools.chain(*(part[k] for part in known))) for k in (0, 1))
            return (heads, lengths) if len(known) == len(parts) else None
        case _, ast.Call(ast.Name("range"), [stop], []):
            return [f"{name} = {index}"], [ast.unparse(stop)]
        case _, ast.Name(array):
            return [f"{name} = {array}[{index}]"], [f"len({array})"]
    return None


def _placed(node: _N, like: ast.AST) -> _N:
    """Give generated nodes the line numbers of the code that they replace; other nodes keep
    theirs."""
    for part in ast.walk(node):
        if isinstance(part, (ast.expr, ast.stmt)):
            # Generated text is numbered from 1, so a line below that of the loop marks a generated
            # node.
            line = getattr(part, "lineno", 1)
            if not hasattr(part, "end_lineno") or line < like.lineno:  # type: ignore[attr-defined]
                ast.copy_location(part, like)
    return node
