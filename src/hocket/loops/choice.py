"""Choose the cheapest legal schedule of a call by predicted time.

Every option is cut into tiles for the actual data. Its predicted time is that of the longest chain
of tiles, plus the transfer of moved bytes, plus a constant per tile. The time of an iteration is
estimated from the operations in the body. An exact schedule is preferred if it takes at most 1.5
times as long as the cheapest. A buffered schedule is chosen only if there is no other.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from hocket.loops.body import inner_atom
from hocket.loops.evaluate import number
from hocket.loops.flow import loaded_names, stored_names
from hocket.loops.form import Refusal
from hocket.loops.legal import Shape
from hocket.loops.space import Space
from hocket.loops.tiles import TileCosts, Tiling, tiling_of
from hocket.loops.verdict import LoopOption

STEP_S = 30e-6
"""Seconds to start a tile on a worker."""
BYTES_PER_S = 5e9
"""Bytes per second of one core for scattered rows."""
NEIGHBOURS_BYTES_PER_S = 20e9
"""Bytes per second of one core for neighbouring cells."""
OPERATION_S = 0.3e-9
"""Seconds per operation in a dependent chain: stencils, sums, gathered rows."""
VECTOR_OPERATION_S = 0.05e-9
"""Seconds per operation in an inner loop that the compiler vectorises."""
CALL_OPERATIONS = 20
"""Cost of a call such as ``exp``, in operations."""
UNKNOWN_LENGTH = 8.0
"""Assumed number of iterations of an inner loop with an unknown range."""
_INSTRUCTIONS = {
    "sqrt": CALL_OPERATIONS, "abs": 1, "fabs": 1, "min": 1, "max": 1, "floor": 1, "ceil": 1,
}  # fmt: skip
"""Cost of calls that compile to vector instructions, in operations."""
_LISTED_BYTES = 64
"""Bytes read to look up one iteration in a list: its indices and scattered cells."""


@dataclass(frozen=True)
class TiledOption:
    """A legal schedule with its tiles and their predicted cost."""

    option: LoopOption
    space: Space
    tiling: Tiling
    moved_bytes: int
    work_s: float
    """Predicted time of the loop on one worker."""

    @property
    def iteration_s(self) -> float:
        """Predicted time of one iteration in a tile, including its lookup in a list."""
        picked_s = _LISTED_BYTES / BYTES_PER_S if self.option.shape.is_listed else 0.0
        return self.work_s / max(self.tiling.num_iterations, 1) + picked_s

    @cached_property
    def spans_s(self) -> list[tuple[float, float]]:
        """Predicted start and end of every tile."""
        return self.tiling.spans(self._costs)

    @cached_property
    def predicted_s(self) -> float:
        """Predicted time of one pass, including the last exchange of replicated arrays."""
        return max((end for _, end in self.spans_s), default=STEP_S) + self._costs.exchange_s

    @property
    def speed_up(self) -> float:
        """Predicted speed-up over one worker."""
        return self.work_s / self.predicted_s

    @property
    def _costs(self) -> TileCosts:
        moved_s = self.moved_bytes / BYTES_PER_S
        # Rows move either to each tile that waits for another worker's tile, or all at once at the
        # end of a step.
        num_handed = sum(1 for tile in self.tiling.tiles if tile.after)
        handed_s = moved_s / num_handed if num_handed else 0.0
        steps = self.tiling.num_steps if self.option.buffered else 1
        exchange_s = 0.0 if num_handed else moved_s / steps
        return TileCosts(self.iteration_s, STEP_S, handed_s, exchange_s, bool(self.option.buffered))


def choose(
    options: Sequence[LoopOption],
    values: Mapping[str, Any],
    num_workers: int,
    max_delay: int | None,
) -> tuple[TiledOption | None, list[Refusal]]:
    """Return the best option whose conditions hold, and the refusals of the others."""
    spaces: dict[int, Space | Refusal] = {}
    candidates: list[TiledOption] = []
    refusals: list[Refusal] = []
    for option in options:
        reading = option.reading
        try:
            if reading.depth not in spaces:
                space = Space.of(reading, values)
                space.check()
                spaces[reading.depth] = space
            found = spaces[reading.depth]
            if isinstance(found, Refusal):
                raise found
            _check_private(option, values)
            _check_flags(option, values)
            # Both orientations are tried, because the number of moved bytes depends on the
            # dimension that stays.
            for turned in _orientations(option):
                steps = _num_steps(turned, found, num_workers, max_delay)
                tiling = tiling_of(found, turned.shape, num_workers, steps)
                moved_bytes = _moved_bytes(turned, found, tiling)
                candidates.append(TiledOption(turned, found, tiling, moved_bytes, work_s(found)))
        except Refusal as refusal:
            named = refusal if refusal.lines else Refusal(refusal.reason, reading.line)
            spaces.setdefault(reading.depth, named)
            refusals.append(named)
    return _best(candidates), refusals


def _best(candidates: Sequence[TiledOption]) -> TiledOption | None:
    """The cheapest candidate, or an exact one if it takes at most 1.5 times as long.

    Buffered candidates give other results, with the user's permission. They are considered only if
    there are no others.
    """
    allowed = [each for each in candidates if not each.option.buffered] or candidates
    cheapest = min(allowed, key=lambda each: each.predicted_s, default=None)
    exact = [each for each in allowed if each.option.is_exact]
    faithful = min(exact, key=lambda each: each.predicted_s, default=None)
    if cheapest is None or faithful is None:
        return cheapest
    return faithful if faithful.predicted_s <= 1.5 * cheapest.predicted_s else cheapest


def _orientations(option: LoopOption) -> list[LoopOption]:
    """A rotation in both orientations: each of its dimensions as the one that stays with a
    worker."""
    shape = option.shape
    if shape.kind != "rotation":
        return [option]
    turned = replace(option, shape=Shape("rotation", shape.time, shape.space))
    if shape.is_listed:
        return [option, turned]
    # For two real loops the kernel expects the outer loop's blocks to stay and the inner loop's to
    # move.
    return [option if shape.space == option.reading.dims[0] else turned]


def _check_private(option: LoopOption, values: Mapping[str, Any]) -> None:
    """Refuse scratch arrays that are not filled completely, or whose final content no worker
    has."""
    shape, line = option.shape, option.reading.line
    knows_last = shape.is_listed or shape.kind in ("independent", "rotation")
    knows_last |= shape.kind == "1d" and shape.space == option.reading.dims[0]
    for name in sorted(option.private):
        if not knows_last:
            raise Refusal(f"{name} keeps the last iteration's content", line)
        for length, stop in zip(values[name].shape, option.reading.private[name], strict=False):
            if number(stop, values) < length:
                raise Refusal(
                    f"{name} holds {length} but only {stop} are filled by each iteration; "
                    "the rest goes from one iteration to the next",
                    line,
                )


def _check_flags(option: LoopOption, values: Mapping[str, Any]) -> None:
    """Refuse a flag that is not a bool before the loop, because an unset flag keeps that value."""
    for reduction in option.reading.reductions:
        is_bool = isinstance(values.get(reduction.name), (bool, np.bool_))
        if reduction.kind == "bool" and not is_bool:
            raise Refusal(f"{reduction.name} is no bool before the loop", reduction.line)


def _num_steps(option: LoopOption, space: Space, num_workers: int, max_delay: int | None) -> int:
    """Number of steps in which the loop runs; buffered arrays are exchanged after each step."""
    if not option.buffered or option.shape.kind not in ("independent", "1d"):
        return 1
    # A sixteenth of the pass by default: exchanges then cost little, and changes are not seen too
    # late.
    delay = max_delay or max(space.num_iterations // 16, 1)
    return max(1, min(-(-space.num_iterations // (delay * num_workers)), 4096))


def _moved_bytes(option: LoopOption, space: Space, tiling: Tiling) -> int:
    """Number of bytes that move between workers in one pass."""
    workers = tiling.num_workers

    def total(names: frozenset[str] | set[str]) -> int:
        return sum(int(getattr(space.values[name], "nbytes", 0)) for name in names)

    # A replica is filled at the start, and merged at every exchange.
    found = total(option.private) + 2 * workers * total(option.summed)
    found += 2 * workers * tiling.num_steps * total(option.buffered)
    if option.shape.kind == "rotation":
        hidden = option.private | option.summed | option.buffered
        moving = {
            vector.first.array
            for vector in option.reading.vectors
            if vector.distance.get(option.shape.space) != 0  # type: ignore[arg-type]
        }
        found += total(moving - hidden) * (workers - 1) // workers
    return found


def work_s(space: Space) -> float:
    """Estimated time of the loop on one core: its operations, each with a typical time."""
    reading = space.reading
    body_s = sum(_seconds(statement, space) for statement in reading.statements)
    turns = float(space.num_iterations)
    if not _is_vector(reading.levels[-1].name, reading.statements):
        return turns * body_s
    names = {access.array for access in reading.body.accesses} & space.values.keys()
    touched_bytes = turns * sum(int(space.values[name].itemsize) for name in names)
    return max(_vector_turns(turns) * body_s, touched_bytes / NEIGHBOURS_BYTES_PER_S)


def _seconds(node: ast.AST, space: Space) -> float:
    """Estimated time of a statement; the body of an inner loop counts once per iteration of that
    loop.
    """
    if isinstance(node, (ast.For, ast.While)):
        turns = UNKNOWN_LENGTH
        if isinstance(node, ast.For):
            length = space.length_of(inner_atom(node))
            turns = turns if length is None else float(np.mean(length) if np.size(length) else 0)
            if _is_vector(ast.unparse(node.target), node.body):
                turns = _vector_turns(turns)
        return turns * (sum(_seconds(child, space) for child in node.body) + OPERATION_S)
    length = _row_length(getattr(node, "lineno", 0), space)
    return _operations(node) * OPERATION_S * (_vector_turns(length) if length > 1 else 1.0)


@lru_cache(maxsize=1024)
def _operations(node: ast.AST) -> int:
    """Number of operations of a statement; cached, because inner loops are estimated often."""
    kinds = (ast.BinOp, ast.Compare, ast.Subscript, ast.AugAssign, ast.UnaryOp)
    count = sum(1 for part in ast.walk(node) if isinstance(part, kinds))
    return count + sum(_INSTRUCTIONS.get(name, CALL_OPERATIONS) for name in _called([node]))


def _vector_turns(turns: float) -> float:
    """Number of scalar iterations that take as long as ``turns`` vectorised ones."""
    return max(turns * VECTOR_OPERATION_S / OPERATION_S, min(turns, 1.0))


def _called(nodes: Sequence[ast.AST]) -> list[str]:
    """Last component of the name of every called function."""
    parts = (part for node in nodes for part in ast.walk(node))
    return [ast.unparse(p.func).rpartition(".")[2] for p in parts if isinstance(p, ast.Call)]


def _is_vector(turn: str, body: Sequence[ast.stmt]) -> bool:
    """True if iterations over ``turn`` are independent and access neighbouring cells."""
    written: dict[str, str] = {}
    for statement in body:
        match statement:
            case ast.Assign([ast.Subscript() as cell]) | ast.AugAssign(ast.Subscript() as cell):
                written[ast.unparse(cell.value)] = ast.unparse(cell)
            case ast.Assign([ast.Name()]):
                pass
            case _:
                return False
    cells = [
        part
        for statement in body
        for part in ast.walk(statement)
        if isinstance(part, ast.Subscript)
    ]
    assigned = stored_names(body)
    return (
        all(written.get(ast.unparse(c.value), ast.unparse(c)) == ast.unparse(c) for c in cells)
        and all(_is_next_to(cell, turn, assigned) for cell in cells)
        and _INSTRUCTIONS.keys() >= set(_called(body))
    )


def _is_next_to(cell: ast.Subscript, turn: str, assigned: frozenset[str]) -> bool:
    """True if consecutive iterations access neighbouring cells, or the same cell."""
    *outer, last = cell.slice.elts if isinstance(cell.slice, ast.Tuple) else [cell.slice]
    if loaded_names([cell.slice]) & assigned or turn in loaded_names(outer):
        return False
    match last:
        case ast.Name() | ast.BinOp(ast.Name(), ast.Add() | ast.Sub(), ast.Constant()):
            return True
    return turn not in loaded_names([last])


def _row_length(line: int, space: Space) -> float:
    """Number of elements of the largest whole-row access in a source line; 1 if there is none."""
    lengths = [1]
    for access in space.reading.body.accesses:
        if access.line == line and access.array in space.values:
            shape = space.values[access.array].shape
            whole = [shape[axis] for axis, sub in enumerate(access.subs) if sub.whole]
            lengths.append(int(np.prod(whole)))
    return float(max(lengths))
