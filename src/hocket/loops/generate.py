"""Generate the source of a kernel that runs one tile: the user's statements in the tile's loops.

A tile is either a range of the loops (clipped, for a nest of two) or part of a list of iterations.
Names are those of the user's function; helpers that the body calls are written into the same
module.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.loops.body import LoopLevel
from hocket.loops.exits import Exit, Loop, exit_value, with_codes
from hocket.loops.faithful import Deviation, Faithful, deviations_of
from hocket.loops.flow import loaded_names
from hocket.loops.form import Refusal
from hocket.loops.names import Helper, Library, Names, Number
from hocket.loops.rows import HELPERS, Lowered

_CLIP = '''
@njit(**OPTIONS_)
def clip_(start, stop, step, low, high):
    """The part of range(start, stop, step) whose coordinate lies in [low, high)."""
    if step > 0:
        first = start if start >= low else start + ((low - start + step - 1) // step) * step
        return first, min(stop, high)
    first = start if -start >= low else start - ((low + start - step - 1) // -step) * -step
    return first, max(stop, -high)
'''


@dataclass(frozen=True)
class KernelSource:
    """Source of a module with one function ``kernel``."""

    text: str
    arguments: tuple[str, ...]
    """Names of the loop's inputs, in the order in which they follow the tile's bounds."""
    results: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    """Numpy dtype that each result has in plain Python; empty for a Python number."""
    deviations: tuple[Deviation, ...] = ()
    """Operations whose bits may differ from those of the plain loop."""


def range_kernel(
    levels: Sequence[LoopLevel],
    arguments: Sequence[str],
    results: Sequence[str],
    faithful: Faithful,
    lowered: Lowered | None = None,
) -> KernelSource:
    """A kernel over ranges: ``kernel(low, high[, low_1, high_1, skew], *arguments)``."""
    first = levels[0]
    parts = _statements(levels, faithful, lowered)
    step = _step(first)
    lines = [
        f"first_0_, last_0_ = {_low(first)}, high_0_",
        *_counted(first.name, "first_0_", "last_0_", step, "count_0_"),
    ]
    bounds = ["low_0_", "high_0_"]
    lines += _indented(_source(parts[0]))
    if len(levels) == 2:
        second = levels[1]
        start, stop, inner_step = _parts(second.node.iter)
        bounds += ["low_1_", "high_1_", "skew_"]
        sign = -1 if ast.literal_eval(step) < 0 else 1
        inner = [
            f"shift_ = skew_ * {sign} * {first.name}",
            f"first_1_, last_1_ = {_clipped(start, stop, inner_step)}",
            *_counted(second.name, "first_1_", "last_1_", inner_step, "count_1_"),
            *_indented(_source(parts[1])),
        ]
        lines += _indented(inner)
    clip = len(levels) == 2
    return _module(lines, bounds, levels[0].node, arguments, results, faithful, lowered, clip=clip)


def list_kernel(
    levels: Sequence[LoopLevel],
    arguments: Sequence[str],
    results: Sequence[str],
    faithful: Faithful,
    lowered: Lowered | None = None,
) -> KernelSource:
    """A kernel over a list: ``kernel(order_0[, order_1], low, high, *arguments)``."""
    orders = [f"order_{number}_" for number in range(len(levels))]
    lines = ["for place_ in range(low_0_, high_0_):"]
    parts = _statements(levels, faithful, lowered)
    for level, order, part in zip(levels, orders, parts, strict=True):
        lines.append(f"    {level.name} = {order}[place_]")
        lines += _indented(_source(part))
    bounds = [*orders, "low_0_", "high_0_"]
    return _module(lines, bounds, levels[0].node, arguments, results, faithful, lowered)


def serial_kernel(
    loop: Loop,
    exits: Sequence[Exit],
    arguments: Sequence[str],
    results: Sequence[str],
    faithful: Faithful,
) -> KernelSource:
    """Kernel of the loop as written: ``kernel(*arguments)``.

    ``results`` are the names read after the loop. If the loop has exits, the kernel first returns
    the number of the exit taken (0 for none), then the results and the values that exits read.
    """
    every = sorted({*results, *(name for leave in exits for name in leave.names)})
    lines = _source(faithful.rewrite([with_codes(loop, exits, every)]))
    if exits:
        lines.append(f"return {ast.unparse(exit_value(0, results, every))}")
    return _module(lines, [], loop, arguments, every if exits else results, faithful)


def _module(
    lines: Sequence[str],
    bounds: Sequence[str],
    loop: Loop,
    arguments: Sequence[str],
    results: Sequence[str],
    faithful: Faithful,
    lowered: Lowered | None = None,
    *,
    clip: bool = False,
) -> KernelSource:
    returned = f"({', '.join(results)},)" if results else "()"
    head = f"def kernel({', '.join([*bounds, *arguments])}):"
    setup = list(lowered.setup) if lowered is not None else []
    if faithful.needs_zero:
        setup.append(_unknown_zero(arguments, faithful))
    inside = [*setup, *lines, f"return {returned if results else 0}"]
    function = "\n".join([head, *_indented(inside)])
    defined: dict[str, str] = {}
    _collect(loop, faithful.names, set(arguments), defined, faithful.helpers)
    parts = ["from numba import njit", *faithful.pieces.values(), *defined.values()]
    if clip:
        parts.append(_CLIP)
    if lowered is not None:
        parts.append(HELPERS)
    text = "\n".join([*parts, "", "", function, ""])
    if "np_." in text or "math_." in text:
        text = f"import math as math_\nimport numpy as np_\n{text}"
    dtypes = tuple(faithful.dtype_of(name) for name in results)
    return KernelSource(text, tuple(arguments), tuple(results), dtypes, tuple(faithful.deviations))


def _unknown_zero(arguments: Sequence[str], faithful: Faithful) -> str:
    """Expression for 0.0 that depends on an argument, so that ``x ** 2`` does not become ``x *
    x``."""
    for name in arguments:
        value = faithful.values.get(name)
        if isinstance(value, np.ndarray):
            return f"unknown_zero_ = 0.0 * {name}.strides[0]"
    return "unknown_zero_ = 0.0"


def _collect(
    node: ast.AST,
    names: Names,
    known: set[str],
    defined: dict[str, str],
    rewritten: Mapping[str, ast.FunctionDef],
) -> None:
    """Collect imports, constants and helpers for the global names below a node."""
    local = known | {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    if isinstance(node, ast.FunctionDef):
        local |= {argument.arg for argument in node.args.args}
    for name in sorted(loaded_names([node]) - local):
        text = _definition(name, names, defined, rewritten)
        if text is not None and defined.setdefault(name, text) != text:
            raise Refusal(f"two helpers are called {name}")


def _definition(
    name: str,
    names: Names,
    defined: dict[str, str],
    rewritten: Mapping[str, ast.FunctionDef],
) -> str | None:
    meaning = names.meaning(name)
    if isinstance(meaning, Library):
        module, _, member = meaning.path.rpartition(".")
        if module == "builtins":
            return None
        return (
            f"from {module} import {member} as {name}" if module else (f"import {member} as {name}")
        )
    if isinstance(meaning, Number):
        return f"{name} = {meaning.value!r}"
    if isinstance(meaning, Helper):
        if name in defined:
            if not defined[name]:
                raise Refusal(f"{name} calls itself", meaning.node.lineno)
            return defined[name]
        defined[name] = ""
        _collect(meaning.node, meaning.names, set(), defined, rewritten)
        del defined[name]
        function = copy.deepcopy(rewritten.get(name, meaning.node))
        function.name, function.decorator_list, function.returns = name, [], None
        for argument in function.args.args:
            argument.annotation = None
        return "\n@njit(**OPTIONS_)\n" + ast.unparse(ast.fix_missing_locations(function)) + "\n"
    return None


def _statements(
    levels: Sequence[LoopLevel], faithful: Faithful, lowered: Lowered | None
) -> Sequence[Sequence[ast.stmt]]:
    """Statements between the loops, then the body, rewritten for the compiler."""
    parts: Sequence[Sequence[ast.stmt]]
    if lowered is not None:
        parts = lowered.parts
    else:
        parts = [*(level.prelude for level in levels[:-1]), levels[-1].node.body]
    known = [f"{level.name} = 0" for level in levels]
    known += lowered.setup if lowered is not None else ()
    made = iter(faithful.rewrite([statement for part in parts for statement in part], known))
    if lowered is not None:
        # Rows that were written as loops no longer show the products that they are.
        written = [*(s for level in levels[:-1] for s in level.prelude), *levels[-1].node.body]
        faithful.deviations = list(
            deviations_of(written, faithful.values, faithful.names, is_exact=faithful.is_exact)
        )
    return [list(itertools.islice(made, len(part))) for part in parts]


def _source(statements: Sequence[ast.stmt]) -> list[str]:
    return [line for statement in statements for line in ast.unparse(statement).splitlines()]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _parts(head: ast.expr) -> tuple[str, str, str]:
    assert isinstance(head, ast.Call)
    texts = [ast.unparse(argument) for argument in head.args]
    if len(texts) == 1:
        return "0", texts[0], "1"
    return texts[0], texts[1], texts[2] if len(texts) == 3 else "1"


def _low(level: LoopLevel) -> str:
    """First outer value of a tile; a literal start tells the compiler the sign of ``i - 1``."""
    start, _, step = _parts(level.node.iter)
    return f"max(low_0_, {start})" if step == "1" and start.isdigit() else "low_0_"


def _counted(name: str, first: str, last: str, step: str, count: str) -> list[str]:
    """Source lines of a loop's head.

    A loop with step 1 counts from 0, so that the compiler sees that its iterations access
    consecutive memory, which halves the time of a stencil.
    """
    if step != "1":
        return [f"for {name} in range({first}, {last}, {step}):"]
    return [f"for {count} in range({last} - {first}):", f"    {name} = {first} + {count}"]


def _clipped(start: str, stop: str, step: str) -> str:
    low, high = "low_1_ - shift_", "high_1_ - shift_"
    if step == "1":
        return f"max({start}, {low}), min({stop}, {high})"
    return f"clip_({start}, {stop}, {step}, {low}, {high})"


def _step(level: LoopLevel) -> str:
    return _parts(level.node.iter)[2]
