"""``parallel_for``: run the loops of a plain Python function in parallel if that is proven safe.

Each loop in the function's syntax tree is replaced by a call of its runner, which returns the
loop's results or leaves the loop to Python. Nothing is analysed before the first call.
"""

from __future__ import annotations

import ast
import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np

from hocket.base.errors import UsageError, unknown_name
from hocket.loops.decide import Decision, Settings
from hocket.loops.exits import Loop, leaving_statements
from hocket.loops.flow import stored_names
from hocket.loops.job import LoopJob, run_in_turn
from hocket.loops.names import LiveNames, function_node, parsed
from hocket.loops.runner import SiteRunner
from hocket.loops.source import LoopSource, source_of

P = ParamSpec("P")
R = TypeVar("R")
BACKENDS = ("threads", "in-turn")
PERMISSIONS = ("buffer", "table", "revise")
DEFAULT_RATE = 0.1
"""Step size of adaptive revision."""
_OWN = ("hocket_run_", "hocket_end_", "hocket_skip_")
"""Names that the generated function uses in addition to those of the user's function."""


class ParallelFunction(Generic[P, R]):
    """A function whose loops run in parallel; call it like the function itself."""

    def __init__(self, function: Callable[P, R], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.options = dict(options)
        self._sizes: tuple[int, ...] = ()
        """Rough sizes of the last call's arguments."""

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
        return source_of(node, LiveNames(function), function.__code__.co_filename)

    @functools.cached_property
    def runners(self) -> dict[int, SiteRunner]:
        """One runner per loop."""
        return {
            site.number: SiteRunner(self.source, site, self.settings)
            for site in self.source.all_sites
        }

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function."""
        if not self.source.sites:
            return self.function(*args, **kwargs)
        sizes = _rough_sizes(args)
        if sizes != self._sizes:
            # Other sizes may make a loop worth running in parallel, so loops left to Python are
            # examined again.
            self._sizes, self._skip[:] = sizes, [0] * len(self._skip)
        result: R = self._host(*args, **kwargs)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind to an instance, as a function in a class is."""
        return self if instance is None else MethodType(self, instance)

    def decisions(self) -> list[Decision]:
        """Decisions of the last call, loop by loop."""
        found = [runner.last for runner in self.runners.values()]
        return [decision for decision in found if decision is not None]

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Describe the loops for the given arguments, else for the last call, else from the source
        alone.

        Nothing is executed: each loop is described for the contents that its inputs have at this
        moment.
        """
        from hocket.loops.explain import explain_call, explain_source

        if args or kwargs:
            return explain_call(self, args, kwargs)
        if self.decisions():
            return explain_call(self, None, {})
        return explain_source(self.source, self.settings)

    @functools.cached_property
    def settings(self) -> Settings:
        """The arguments of ``parallel_for``, checked against the function."""
        options = self.options
        assert isinstance(self.function, FunctionType)
        permit = permitted(options["permit"])
        known = {*self.source.parameters, *stored_names([self.source.node])}
        for array, (rule, _) in permit.items():
            if array not in known:
                raise unknown_name("array", array, known, where="permit")
            if rule != "buffer" and options["backend"] != "threads":
                raise UsageError(
                    f"the back end {options['backend']!r} has no tables",
                    hint="permit 'buffer', or use 'threads'",
                    where=f"permit[{array!r}]",
                )
        return Settings(
            options["workers"], backend_named(options["backend"]), options["ordered"],
            tuple(sorted(permit)), rates_of(permit), options["max_delay"], options["fastmath"],
            LiveNames(self.function).value,
        )  # fmt: skip

    @functools.cached_property
    def _skip(self) -> list[int]:
        """Per loop: number of next entries to leave to Python; negative while an entry is being
        timed.
        """
        return [0] * (max(self.runners, default=0) + 1)

    @functools.cached_property
    def _host(self) -> Callable[..., Any]:
        """The function with loops replaced by runner calls; it shares the original's closure."""
        function = self.function
        assert isinstance(function, FunctionType)
        free = function.__code__.co_freevars
        code = _host_code(self.source, self.runners, free)
        cells = dict(zip(free, function.__closure__ or (), strict=True))
        own = (self._ask, self._end, self._skip)
        # hocket's names come from the closure, so the user's globals stay untouched.
        cells |= {name: CellType(value) for name, value in zip(_OWN, own, strict=True)}
        closure = tuple(cells[name] for name in code.co_freevars)
        host = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, closure
        )
        # `FunctionType` accepts no defaults of keyword-only arguments.
        host.__kwdefaults__ = function.__kwdefaults__
        return host

    def _ask(self, number: int, variables: Mapping[str, Any]) -> Any:
        found = self._run(number, variables)
        if found is False:
            runner = self.runners[number]
            # A negative count makes the generated code report the end of the entry; see `_ASK`.
            self._skip[number] = -1 if runner.is_timing else runner.num_to_skip
            runner.num_to_skip = 0
        return found

    def _end(self, number: int) -> None:
        self._skip[number] = 0
        if self.runners[number].is_timing:
            self.runners[number].end_plain()

    def _run(self, number: int, variables: Mapping[str, Any]) -> Any:
        return self.runners[number].run(variables)


Permission = tuple[str, float]
"""A rule of ``permit``, and the step size of adaptive revision."""


def permitted(permit: Mapping[str, Any]) -> dict[str, Permission]:
    """Return the rule and the step size of each array, from ``"buffer"`` or ``("revise", 0.1)``."""
    found: dict[str, Permission] = {}
    for array, given in permit.items():
        rule, rate = given if isinstance(given, tuple) else (given, DEFAULT_RATE)
        where = f"permit[{array!r}]"
        if rule not in PERMISSIONS:
            raise unknown_name("permission", str(rule), PERMISSIONS, where=where)
        if not 0 < rate < np.inf:
            raise UsageError(f"the rate is {rate}", hint="give a step size above 0", where=where)
        found[array] = rule, rate
    return found


def rates_of(permit: Mapping[str, Permission]) -> dict[str, float | None]:
    """Return the arrays in tables with the step size of adaptive revision; None for addition."""
    return {
        array: rate if rule == "revise" else None
        for array, (rule, rate) in permit.items()
        if rule != "buffer"
    }


def backend_named(name: str) -> Callable[[LoopJob], list[tuple[Any, ...]]]:
    """Return the back end with a name."""
    if name == "in-turn":
        return run_in_turn
    from hocket.loops.thread_workers import run_on_threads

    return run_on_threads


def _host_code(
    source: LoopSource, runners: Mapping[int, SiteRunner], free: tuple[str, ...]
) -> CodeType:
    """Compile the function with its loops replaced, as a closure over ``free`` and hocket's
    names."""
    # Both trees are walked in the same order, because the rewriting changed only the heads of
    # loops.
    tree = copy.deepcopy(source.written)
    loops = zip(_loops(source.node), _loops(tree), strict=True)
    numbers = {id(site.nest.node): site.number for site in source.all_sites}
    calls = {id(own): runners[numbers[id(node)]] for node, own in loops if id(node) in numbers}
    host = _RunnerCalls(calls).visit(tree)
    # An enclosing function turns the free names into closure cells.
    names = [ast.arg(name) for name in (*_OWN, *free)]
    arguments = ast.arguments([], names, None, [], [], None, [])
    maker = ast.FunctionDef("hocket_make_", arguments, [host], [], None)
    module = ast.fix_missing_locations(ast.Module([maker], []))
    code = compile(module, source.place or "<loop>", "exec")
    # Only the code object is extracted: executing the module would evaluate decorators and defaults
    # again.
    for name in ("hocket_make_", host.name):
        codes = [each for each in code.co_consts if isinstance(each, CodeType)]
        code = next(each for each in codes if each.co_name == name)
    return code


def _loops(tree: ast.AST) -> list[Loop]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]


_ASK = """
if hocket_skip_[{number}]:
    hocket_skip_[{number}] -= 1
    hocket_done_ = False
else:
    hocket_done_ = hocket_run_({number}, locals())
if hocket_done_ is None:
    pass
elif hocket_done_ is False:
    try:
        pass
    finally:
        if hocket_skip_[{number}] < 0:
            hocket_end_({number})
else:
    pass
"""
"""Code that replaces a loop.

A call of the runner takes longer than a few iterations, so entries of a loop that stays in Python
are only counted.
"""


class _RunnerCalls(ast.NodeTransformer):
    """Replaces each loop by a call of its runner."""

    def __init__(self, runners: Mapping[int, SiteRunner]) -> None:
        self.runners = runners

    def visit_For(self, node: Loop) -> Any:
        """Replace a loop by a runner call; without a result the loop runs here.

        Its inner loops then call their own runners, or run in plain Python.
        """
        runner = self.runners.get(id(node))
        # Copied before inner loops are replaced, so that this copy runs in plain Python entirely.
        plain = copy.deepcopy(node)
        self.generic_visit(node)
        if runner is None:
            return node
        ask, chosen = ast.parse(_ASK.format(number=runner.site.number)).body
        match chosen:
            case ast.If(_, inside, [ast.If(_, [ast.Try(in_python)], bind)]):
                inside[:], in_python[:], bind[:] = [node], [plain], _bound(runner)
        return [ast.copy_location(part, node) for part in (ask, chosen)]

    visit_While = visit_For  # noqa: N815


def _rough_sizes(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Bit lengths of the sizes of arrays and integers, which determine the loops' work."""
    sizes = (value.size if type(value) is np.ndarray else value for value in arguments)
    return tuple(size.bit_length() if type(size) is int else 0 for size in sizes)


def _bound(runner: SiteRunner) -> list[ast.stmt]:
    """Statements that bind a compiled loop's results, or execute the exit that the loop took."""
    exits = runner.site.exits
    chosen = [_binding(runner.results, "hocket_done_[1]" if exits else "hocket_done_")]
    leaving = leaving_statements(runner.site.nest.node)
    for number, (leave, statement) in enumerate(zip(exits, leaving, strict=True), 1):
        took = parsed(f"hocket_done_[0] == {number}")
        left = [_binding(leave.names, "hocket_done_[1]"), copy.deepcopy(statement)]
        chosen = [ast.If(took, left, chosen)]
    return chosen


def _binding(names: Sequence[str], values: str) -> ast.stmt:
    return ast.parse(f"({', '.join(names)},) = {values}" if names else "pass").body[0]


@overload
def parallel_for(function: Callable[P, R], /) -> ParallelFunction[P, R]: ...


@overload
def parallel_for(
    *,
    ordered: bool = ...,
    permit: Mapping[str, str | tuple[str, float]] | None = ...,
    workers: int | None = ...,
    backend: str = ...,
    max_delay: int | None = ...,
    fastmath: bool = ...,
) -> Callable[[Callable[P, R]], ParallelFunction[P, R]]: ...


def parallel_for(
    function: Callable[..., Any] | None = None,
    /,
    *,
    ordered: bool = False,
    permit: Mapping[str, str | tuple[str, float]] | None = None,
    workers: int | None = None,
    backend: str = "threads",
    max_delay: int | None = None,
    fastmath: bool = False,
) -> Any:
    """Run the loops of a function in parallel if that is proven not to change their meaning.

    Unless ``ordered``, iterations that access the same cell may run in another order than the
    loop's, provided that some serial order gives the same result. An order that the code states,
    such as by ``A[i - 1]``, is always kept. ``permit`` names arrays whose updates other workers may
    see late. ``{"totals": "buffer"}`` exchanges them after ``max_delay`` iterations of each worker,
    so the bits are reproducible. ``"table"`` updates them through a table, without barriers.
    ``("revise", 0.1)`` uses a table that treats the amounts subtracted by a tile as gradients, and
    takes AdaGrad steps with step size 0.1.
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
    if backend not in BACKENDS:
        raise unknown_name("back end", backend, BACKENDS)
    options = {
        "ordered": ordered, "permit": permit or {}, "backend": backend, "max_delay": max_delay,
        "workers": workers or len(os.sched_getaffinity(0)), "fastmath": fastmath,
    }  # fmt: skip
    if function is None:
        return lambda decorated: ParallelFunction(decorated, options)
    return ParallelFunction(function, options)
