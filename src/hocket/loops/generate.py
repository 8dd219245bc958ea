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
from dataclasses import dataclass, field

import numpy as np

from hocket.loops.body import LoopLevel, parts_of
from hocket.loops.exits import Exit, Loop, exit_value, with_codes
from hocket.loops.faithful import Deviation, Faithful
from hocket.loops.flow import loaded_names, stored_names
from hocket.loops.form import Refusal
from hocket.loops.names import Helper, Library, Names, Number
from hocket.loops.rows import DOT, Lengths, with_row_loops

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
    row_lengths: Lengths = field(default_factory=dict)
    """Row lengths on which the code relies; if there are any, different arrays must not share
    memory.
    """


@dataclass(frozen=True)
class _Head:
    """The loop that a kernel runs, with the names of the kernel's arguments and results."""

    loop: Loop
    arguments: Sequence[str]
    results: Sequence[str]
    row_lengths: Lengths


def range_kernel(
    levels: Sequence[LoopLevel], arguments: Sequence[str], results: Sequence[str],
    faithful: Faithful,
) -> KernelSource:  # fmt: skip
    """A kernel over ranges: ``kernel(low, high[, low_1, high_1, skew], *arguments)``."""
    first = levels[0]
    start, _, step = _ends(first)
    parts, lengths = _statements(levels, faithful)
    # A literal start lets the compiler infer the sign of `i - 1`, which avoids wrap-around code.
    low = f"max(low_0_, {start})" if step == "1" and start.isdigit() else "low_0_"
    lines = [
        f"first_0_, last_0_ = {low}, high_0_", *_counted(first.name, 0, step),
        *_indented(_source(parts[0])),
    ]  # fmt: skip
    bounds = ["low_0_", "high_0_"]
    if len(levels) == 2:
        bounds += ["low_1_", "high_1_", "skew_"]
        sign = -1 if ast.literal_eval(step) < 0 else 1
        start, stop, step = _ends(levels[1])
        low, high = "low_1_ - shift_", "high_1_ - shift_"
        clipped = f"clip_({start}, {stop}, {step}, {low}, {high})"
        if step == "1":
            clipped = f"max({start}, {low}), min({stop}, {high})"
        lines += _indented([
            f"shift_ = skew_ * {sign} * {first.name}", f"first_1_, last_1_ = {clipped}",
            *_counted(levels[1].name, 1, step), *_indented(_source(parts[1])),
        ])  # fmt: skip
    return _module(lines, bounds, _Head(first.node, arguments, results, lengths), faithful)


def list_kernel(
    levels: Sequence[LoopLevel], arguments: Sequence[str], results: Sequence[str],
    faithful: Faithful,
) -> KernelSource:  # fmt: skip
    """A kernel over a list: ``kernel(order_0[, order_1], low, high, *arguments)``."""
    orders = [f"order_{number}_" for number in range(len(levels))]
    lines = ["for place_ in range(low_0_, high_0_):"]
    parts, lengths = _statements(levels, faithful)
    for level, order, part in zip(levels, orders, parts, strict=True):
        lines += _indented([f"{level.name} = {order}[place_]", *_source(part)])
    head = _Head(levels[0].node, arguments, results, lengths)
    return _module(lines, [*orders, "low_0_", "high_0_"], head, faithful)


def serial_kernel(
    loop: Loop, exits: Sequence[Exit], arguments: Sequence[str], results: Sequence[str],
    faithful: Faithful, *, has_row_loops: bool,
) -> KernelSource:  # fmt: skip
    """Kernel of the loop as written: ``kernel(*arguments)``.

    ``results`` are the names read after the loop. If the loop has exits, the kernel first returns
    the number of the exit taken (0 for none), then the results and the values that exits read.
    """
    every = sorted({*results, *(name for leave in exits for name in leave.names)})
    loops = [[with_codes(loop, exits, every)]]
    (made,), lengths = _rewritten(loops, faithful, [], has_row_loops=has_row_loops)
    lines = _source(made)
    if exits:
        lines.append(f"return {ast.unparse(exit_value(0, results, every))}")
    head = _Head(loop, arguments, every if exits else results, lengths)
    return _module(lines, [], head, faithful)


def _module(
    lines: Sequence[str], bounds: Sequence[str], head: _Head, faithful: Faithful
) -> KernelSource:
    setup = []
    if faithful.needs_zero:
        # This zero depends on an argument, so the compiler cannot replace `x ** 2` by `x * x`.
        arrays = [n for n in head.arguments if isinstance(faithful.values.get(n), np.ndarray)]
        setup = [f"unknown_zero_ = 0.0{f' * {arrays[0]}.strides[0]' if arrays else ''}"]
    returned = f"({', '.join(head.results)},)" if head.results else "0"
    inside = [*setup, *lines, f"return {returned}"]
    function = [f"def kernel({', '.join([*bounds, *head.arguments])}):", *_indented(inside)]
    defined: dict[str, str] = {}
    _collect(head.loop, faithful.names, set(head.arguments), defined, faithful.helpers)
    parts = ["from numba import njit", *faithful.pieces.values(), *defined.values()]
    text = "\n".join(["", "", *function, ""])
    parts += [piece for name, piece in (("clip_(", _CLIP), ("dot_(", DOT)) if name in text]
    text = "\n".join([*parts, text])
    if "np_." in text or "math_." in text:
        text = f"import math as math_\nimport numpy as np_\n{text}"
    dtypes = tuple(faithful.dtype_of(name) for name in head.results)
    deviations = tuple(sorted(faithful.deviations, key=lambda each: each.line))
    arguments, results = tuple(head.arguments), tuple(head.results)
    return KernelSource(text, arguments, results, dtypes, deviations, head.row_lengths)


def _collect(
    node: ast.AST,
    names: Names,
    known: set[str],
    defined: dict[str, str],
    rewritten: Mapping[str, ast.FunctionDef],
) -> None:
    """Collect imports, constants and helpers for the global names below a node."""
    for name in sorted(loaded_names([node]) - known - stored_names([node])):
        text = _definition(name, names, defined, rewritten)
        if text is not None and defined.setdefault(name, text) != text:
            raise Refusal(f"two helpers are called {name}")


def _definition(
    name: str,
    names: Names,
    defined: dict[str, str],
    rewritten: Mapping[str, ast.FunctionDef],
) -> str | None:
    match names.meaning(name):
        case Library(path):
            module, _, member = path.rpartition(".")
            if module == "builtins":
                return None
            return f"{f'from {module} ' if module else ''}import {member} as {name}"
        case Number(value):
            return f"{name} = {value!r}"
        case Helper(_, node, own):
            if name in defined:
                if not defined[name]:
                    raise Refusal(f"{name} calls itself", node.lineno)
                return defined[name]
            # Marked as in progress, so that a helper that calls itself is detected.
            defined[name] = ""
            arguments = {argument.arg for argument in node.args.args}
            _collect(node, own, arguments, defined, rewritten)
            # The caller adds it again after its own helpers, because a module is executed from top
            # to bottom.
            del defined[name]
            function = copy.deepcopy(rewritten.get(name, node))
            function.name, function.decorator_list, function.returns = name, [], None
            for argument in function.args.args:
                argument.annotation = None
            text = ast.unparse(ast.fix_missing_locations(function))
            return f"\n@njit(**OPTIONS_)\n{text}\n"
    return None


def _statements(
    levels: Sequence[LoopLevel], faithful: Faithful
) -> tuple[list[list[ast.stmt]], Lengths]:
    """Statements between the loops, then the body, rewritten for the compiler."""
    known = [f"{level.name} = 0" for level in levels]
    return _rewritten(parts_of(levels), faithful, known, has_row_loops=True)


def _rewritten(
    parts: Sequence[Sequence[ast.stmt]], faithful: Faithful, known: Sequence[str], *,
    has_row_loops: bool,
) -> tuple[list[list[ast.stmt]], Lengths]:  # fmt: skip
    """Return statements for the compiler, and the lengths that loops over rows rely on."""
    lengths: Lengths = {}
    made = faithful.rewrite(list(itertools.chain(*parts)), known)
    if has_row_loops:
        parts, lengths = with_row_loops(parts, faithful.values, faithful.names, known)
    if lengths:
        # Products of rows that were rewritten as loops are no longer visible, so the first pass's
        # deviations are kept.
        deviations, faithful.deviations = faithful.deviations, []
        made = faithful.rewrite(list(itertools.chain(*parts)), known)
        faithful.deviations = deviations
    rest = iter(made)
    return [list(itertools.islice(rest, len(part))) for part in parts], lengths


def _source(statements: Sequence[ast.stmt]) -> list[str]:
    return [line for statement in statements for line in ast.unparse(statement).splitlines()]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _ends(level: LoopLevel) -> tuple[str, str, str]:
    """Start, stop and step of a loop over a range, as source."""
    assert isinstance(level.node.iter, ast.Call)
    texts = [ast.unparse(argument) for argument in level.node.iter.args]
    start, stop, step = ["0", *texts, "1"] if len(texts) == 1 else [*texts, "1"][:3]
    return start, stop, step


def _counted(name: str, depth: int, step: str) -> list[str]:
    """Source lines of a loop's head.

    A loop with step 1 counts from 0, so that the compiler sees that its iterations access
    consecutive memory. This halves the time of a stencil.
    """
    first, last, count = f"first_{depth}_", f"last_{depth}_", f"count_{depth}_"
    if step != "1":
        return [f"for {name} in range({first}, {last}, {step}):"]
    return [f"for {count} in range({last} - {first}):", f"    {name} = {first} + {count}"]
