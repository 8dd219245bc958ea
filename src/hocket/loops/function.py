"""``parallel_for``: run the loops of a plain Python function in parallel if that is proven safe.

Each loop in the function's syntax tree is replaced by a call of its runner, which returns the
loop's results or leaves the loop to Python. Nothing is analysed before the first call.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np

from hocket.base.errors import UsageError, unknown_name
from hocket.loops.decide import Decision
from hocket.loops.exits import Exit, Loop, leaving_statements
from hocket.loops.flow import stored_names
from hocket.loops.job import LoopJob, run_in_turn
from hocket.loops.names import LiveNames, function_node, parsed
from hocket.loops.pace import SKIPPED
from hocket.loops.runner import SiteRunner
from hocket.loops.settings import Settings
from hocket.loops.source import AsWritten, LoopSite, LoopSource, source_of

P = ParamSpec("P")
R = TypeVar("R")
BACKENDS = ("threads", "in-turn")
PERMISSIONS = ("buffer", "table", "revise")
TABLE_BACKENDS = ("threads",)
_OWN = ("hocket_run_", "hocket_end_", "hocket_skip_")
"""Names that the generated function defines in addition to those of the user's function."""


class ParallelFunction(Generic[P, R]):
    """A function whose loops run in parallel; call it like the function itself."""

    def __init__(self, function: Callable[P, R], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.options = dict(options)
        self._num_asked = self._num_left = 0
        self._num_plain, self._plain_size = 0, 0
        """Next calls to pass to the plain function if their arguments are at most this size."""

    @functools.cached_property
    def source(self) -> LoopSource:
        """The function's syntax tree and its loops."""
        function = self.function
        if not isinstance(function, FunctionType):
            raise UsageError(f"{function!r} is no plain Python function")
        try:
            node = function_node(function)
        except (OSError, TypeError, SyntaxError) as error:
            raise UsageError(
                f"the source of {function.__qualname__!r} cannot be read: {error}",
                hint="define the function in a file",
            ) from error
        place = function.__code__.co_filename
        return source_of(node, LiveNames(function), place)

    @functools.cached_property
    def runners(self) -> dict[int, SiteRunner]:
        """One runner per loop."""
        settings = self.settings
        sites = [site for top in self.source.sites for site in top.walk()]
        return {site.number: SiteRunner(self.source, site, settings) for site in sites}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function."""
        if not self.source.sites:
            return self.function(*args, **kwargs)
        size = _rough_size(args)
        if self._num_plain and size <= self._plain_size:
            self._num_plain -= 1
            return self.function(*args, **kwargs)
        self._skip[:] = [0] * len(self._skip)
        self._num_asked = self._num_left = 0
        result: R = self._host(*args, **kwargs)
        if self._num_asked and self._num_left == self._num_asked:
            # Every loop was left to Python: the next calls of this size skip the runners.
            self._num_plain, self._plain_size = SKIPPED, 2 * size
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind to an instance, as a function in a class is."""
        return self if instance is None else MethodType(self, instance)

    def decisions(self) -> list[Decision]:
        """Decisions of the last call, loop by loop."""
        found = [runner.last for runner in self.runners.values()]
        return [decision for decision in found if decision is not None]

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Describe the loops: for the given arguments, else as in the last call or from the source.

        Nothing is executed: each loop is described for the contents that its inputs have when the
        function is called.
        """
        from hocket.loops.explain import explain_call, explain_source

        if args or kwargs:
            return explain_call(self, args, kwargs)
        if self.decisions():
            return explain_call(self, None, {})
        settings = self.settings
        return explain_source(
            self.source, ordered=settings.ordered, permit=settings.permit, through=settings.through
        )

    @functools.cached_property
    def settings(self) -> Settings:
        """The arguments of ``parallel_for``, checked against the function."""
        options = self.options
        assert isinstance(self.function, FunctionType)
        permit = dict(options["permit"])
        parameters = set(self.source.parameters)
        for array, rule in permit.items():
            if rule not in PERMISSIONS:
                raise unknown_name("permission", str(rule), PERMISSIONS, where=f"permit[{array!r}]")
            known = parameters | stored_names([self.source.node])
            if array not in known:
                raise unknown_name("array", array, known, where="permit")
            if rule != "buffer" and options["backend"] not in TABLE_BACKENDS:
                raise UsageError(
                    f"the back end {options['backend']!r} has no tables",
                    hint=f"permit 'buffer', or use {' or '.join(map(repr, TABLE_BACKENDS))}",
                    where=f"permit[{array!r}]",
                )
        return Settings(
            num_workers=options["workers"], backend=backend_named(options["backend"]),
            ordered=options["ordered"], permit=tuple(sorted(permit)), rate=options["rate"],
            through={array: rule for array, rule in permit.items() if rule != "buffer"},
            max_delay=options["max_delay"], fastmath=options["fastmath"],
            check_bounds=options["check_bounds"], outside=LiveNames(self.function).value,
        )  # fmt: skip

    @functools.cached_property
    def _code(self) -> CodeType:
        assert isinstance(self.function, FunctionType)
        return _host_code(self.source, self.runners, self.function.__code__.co_freevars)

    @functools.cached_property
    def _skip(self) -> list[int]:
        """Per loop: next entries to leave to Python; negative while an entry is being timed."""
        return [0] * (max(self.runners, default=0) + 1)

    @functools.cached_property
    def _host(self) -> Callable[..., Any]:
        """The function with loops replaced by runner calls; it shares the original's closure."""
        function = self.function
        assert isinstance(function, FunctionType)
        space: dict[str, Any] = {}
        exec(self._code, function.__globals__, space)
        free = function.__code__.co_freevars
        own = dict(zip(_OWN, (self._ask, self._end, self._skip), strict=True))
        made: FunctionType = space["hocket_make_"](*own.values(), *free)
        cells = dict(zip(free, function.__closure__ or (), strict=True))
        cells |= {name: CellType(value) for name, value in own.items()}
        code = made.__code__
        host = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__,
            tuple(cells[name] for name in code.co_freevars),
        )  # fmt: skip
        host.__kwdefaults__ = function.__kwdefaults__
        return host

    def _ask(self, number: int, variables: Mapping[str, Any]) -> Any:
        found = self._run(number, variables)
        self._num_asked += 1
        if found is False:
            runner = self.runners[number]
            self._num_left += bool(runner.num_to_skip)
            self._skip[number] = -1 if runner.is_timing else runner.num_to_skip
            runner.num_to_skip = 0
        return found

    def _end(self, number: int) -> None:
        self._skip[number] = 0
        if self.runners[number].is_timing:
            self.runners[number].end_plain()

    def _run(self, number: int, variables: Mapping[str, Any]) -> Any:
        return self.runners[number].run(variables)


def backend_named(name: str) -> Callable[[LoopJob], list[tuple[Any, ...]]]:
    """Return the back end with a name."""
    if name == "in-turn":
        return run_in_turn
    from hocket.loops.thread_workers import run_on_threads

    return run_on_threads


def _host_code(
    source: LoopSource, runners: Mapping[int, SiteRunner], free: tuple[str, ...]
) -> CodeType:
    """Compile ``def hocket_make_(run, *free): def f(...): ...; return f``."""
    tree = copy.deepcopy(source.node)
    copies = _pairs(source.node, tree)
    sites = {id(copies[id(site.nest.node)]): site for top in source.sites for site in top.walk()}
    host = _RunnerCalls(sites, runners).visit(tree)
    host.decorator_list, host.returns = [], None
    host.args.defaults = [ast.Constant(None) for _ in host.args.defaults]
    host.args.kw_defaults = [d and ast.Constant(None) for d in host.args.kw_defaults]
    for argument in [*host.args.posonlyargs, *host.args.args, *host.args.kwonlyargs]:
        argument.annotation = None
    names = [ast.arg(name) for name in (*_OWN, *free)]
    arguments = ast.arguments([], names, None, [], [], None, [])
    maker = ast.FunctionDef(
        "hocket_make_", arguments, [host, ast.Return(ast.Name(host.name, ast.Load()))], [], None
    )
    module = ast.fix_missing_locations(ast.Module([maker], []))
    return compile(module, source.place or "<loop>", "exec")


def _pairs(one: ast.AST, other: ast.AST) -> dict[int, ast.AST]:
    return {id(a): b for a, b in zip(ast.walk(one), ast.walk(other), strict=True)}


_ASK = """
if hocket_skip_[{number}]:
    hocket_skip_[{number}] -= 1
    hocket_done_ = False
else:
    hocket_done_ = hocket_run_({number}, locals())
"""
"""Code that replaces a loop.

Calling the runner takes longer than a few iterations, so entries of a loop that stays in Python are
only counted.
"""
_END = """
if hocket_skip_[{number}] < 0:
    hocket_end_({number})
"""


class _RunnerCalls(ast.NodeTransformer):
    """Replaces each loop by a call of its runner."""

    def __init__(self, sites: Mapping[int, LoopSite], runners: Mapping[int, SiteRunner]) -> None:
        self.sites, self.runners = sites, runners

    def visit_For(self, node: ast.For) -> Any:
        """Replace a loop by a runner call; without a result the loop runs here.

        Its inner loops then call their own runners, or run in plain Python.
        """
        return self._asked(node)

    def visit_While(self, node: ast.While) -> Any:
        """Replace a ``while`` loop in the same way."""
        return self._asked(node)

    def _asked(self, node: Loop) -> Any:
        site = self.sites.get(id(node))
        if site is None:
            self.generic_visit(node)
            return _as_written(node)
        plain = _AsWritten().visit(copy.deepcopy(node))
        leaving = copy.deepcopy(leaving_statements(node))
        self.generic_visit(node)
        node = _as_written(node)
        number = site.number
        ask = ast.parse(_ASK.format(number=number)).body[0]
        bind = _bound(self.runners[number].results, site.exits, leaving)
        timed = ast.parse(_END.format(number=number)).body[0]
        plain = _Timed(timed).visit(plain) if site.exits else plain
        inside = ast.If(parsed("hocket_done_ is False"), [plain, timed], bind)
        chosen = ast.If(parsed("hocket_done_ is None"), [node], [inside])
        return [ast.copy_location(part, node) for part in (ask, chosen)]


class _Timed(ast.NodeTransformer):
    """Stops the timing of a plain loop before each statement that leaves the function."""

    def __init__(self, end: ast.stmt) -> None:
        self.end = end

    def visit(self, node: ast.AST) -> Any:
        """Skip functions inside the loop: their exits do not leave it."""
        if isinstance(node, (ast.Return, ast.Raise)):
            return [copy.deepcopy(self.end), node]
        return node if isinstance(node, (ast.FunctionDef, ast.Lambda)) else self.generic_visit(node)


def _rough_size(arguments: tuple[Any, ...]) -> int:
    """Sum of array sizes and integers among the arguments, an estimate of the loops' work."""
    size = 1
    for value in arguments:
        if type(value) is np.ndarray:
            size += value.size
        elif type(value) is int:
            size += abs(value)
    return size


def _bound(
    results: Sequence[str], exits: Sequence[Exit], leaving: Sequence[ast.stmt]
) -> list[ast.stmt]:
    """Statements that bind a compiled loop's results, or execute the exit that the loop took."""
    if not exits:
        return [_binding(results, "hocket_done_")]
    chosen: list[ast.stmt] = [_binding(results, "hocket_done_[1]")]
    for number, (leave, statement) in enumerate(zip(exits, leaving, strict=True), 1):
        took = parsed(f"hocket_done_[0] == {number}")
        chosen = [ast.If(took, [_binding(leave.names, "hocket_done_[1]"), statement], chosen)]
    return chosen


def _binding(names: Sequence[str], values: str) -> ast.stmt:
    return ast.parse(f"({', '.join(names)},) = {values}" if names else "pass").body[0]


class _AsWritten(ast.NodeTransformer):
    """Restores the original heads of loops over arrays."""

    def visit_For(self, node: ast.For) -> Any:
        """Restore inner loops first."""
        self.generic_visit(node)
        return _as_written(node)


def _as_written(node: Loop) -> Loop:
    head: AsWritten | None = getattr(node, "as_written", None)
    if head is None:
        return node
    loop = ast.For(head.target, head.iter, node.body[head.num_heads :], [], None)
    return ast.copy_location(loop, node)


@overload
def parallel_for(function: Callable[P, R], /) -> ParallelFunction[P, R]: ...


@overload
def parallel_for(
    *,
    ordered: bool = ...,
    permit: Mapping[str, str] | None = ...,
    workers: int | None = ...,
    backend: str = ...,
    max_delay: int | None = ...,
    rate: float = ...,
    fastmath: bool = ...,
    check_bounds: bool = ...,
) -> Callable[[Callable[P, R]], ParallelFunction[P, R]]: ...


def parallel_for(
    function: Callable[..., Any] | None = None,
    /,
    *,
    ordered: bool = False,
    permit: Mapping[str, str] | None = None,
    workers: int | None = None,
    backend: str = "threads",
    max_delay: int | None = None,
    rate: float = 0.1,
    fastmath: bool = False,
    check_bounds: bool = True,
) -> Any:
    """Run the loops of a function in parallel if that is proven not to change their meaning.

    Unless ``ordered``, iterations that access the same cell may run in another order than the
    loop's, as long as some serial order gives the same result; an order that the code states, such
    as by ``A[i - 1]``, is always kept. ``permit`` names arrays whose updates other workers may see
    late: ``{"totals": "buffer"}`` exchanges them after fixed steps, so the bits are reproducible;
    ``"table"`` updates them through a table, without barriers; ``"revise"`` uses a table that
    treats the amounts subtracted by a tile as gradients and takes AdaGrad steps with step size
    ``rate``.
    """
    if ordered and permit:
        raise UsageError(
            "ordered=True and permit contradict each other",
            hint="a buffered array is seen late by other workers; leave out one of the two",
        )
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}", hint="give 1 or more")
    if max_delay is not None and max_delay < 1:
        raise UsageError(f"max_delay is {max_delay}", hint="give 1 or more iterations")
    if not 0 < rate < math.inf:
        raise UsageError(f"rate is {rate}", hint="give a step size above 0")
    if backend not in BACKENDS:
        raise unknown_name("back end", backend, BACKENDS)
    options = {
        "ordered": ordered, "permit": permit or {}, "backend": backend, "max_delay": max_delay,
        "rate": rate,
        "workers": workers or len(os.sched_getaffinity(0)), "fastmath": fastmath,
        "check_bounds": check_bounds,
    }  # fmt: skip
    if function is None:
        return lambda decorated: ParallelFunction(decorated, options)
    return ParallelFunction(function, options)
