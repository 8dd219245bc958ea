"""True if every subscript of a loop is inside its array, so that the kernel need not look.

Intervals: each index form is bounded over all iterations from the loops' ranges and the keys'
values. What cannot be bounded keeps the checks of the compiled code. O(iterations).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import numpy as np

from hocket.loops.evaluate import CannotEvaluate, evaluate
from hocket.loops.form import Access, Atom, Linear, Refusal
from hocket.loops.space import Space

Interval = tuple[int, int]


def all_inside(space: Space) -> bool:
    """True if no access can leave its array."""
    if space.reading.body.has_local_arrays or not space.num_iterations:
        return False
    return next(may_leave(space), None) is None


def may_leave(space: Space) -> Iterator[Access]:
    """Accesses whose indices are not proven to be inside their array."""
    known: dict[Atom, Interval | None] = {}
    return (a for a in space.reading.body.accesses if not _inside(space, a, known))


def _inside(space: Space, access: Access, known: dict[Atom, Interval | None]) -> bool:
    array = space.values[access.array]
    for axis, sub in enumerate(access.subs):
        if sub.is_slice:
            continue  # slices are clipped, never out of range
        if sub.index is None:
            return False
        interval = _interval(space, sub.index, known)
        if interval is None or interval[0] < 0 or interval[1] >= array.shape[axis]:
            return False
    return True


def _interval(space: Space, form: Linear, known: dict[Atom, Interval | None]) -> Interval | None:
    low = high = form.const
    for atom, factor in form.terms:
        if atom not in known:
            known[atom] = _of_atom(space, atom)
        ends = known[atom]
        if ends is None:
            return None
        low += min(factor * ends[0], factor * ends[1])
        high += max(factor * ends[0], factor * ends[1])
    return low, high


def _of_atom(space: Space, atom: Atom) -> Interval | None:
    try:
        if atom.kind == "inner":
            return _of_inner(space, atom)
        if atom.kind == "dim" and space.reading.depth == 1:
            return _ends(np.array([space.outer[0], space.outer[-1]]))
        if atom.kind == "invariant":
            return _ends(np.asarray(evaluate(atom.name, space.values)))
        return _ends(space.key(atom))
    except (CannotEvaluate, Refusal, IndexError):
        return None


def _of_inner(space: Space, atom: Atom) -> Interval | None:
    loop = space.reading.body.inner.get(atom.name)
    if loop is None or loop.start is None or loop.stop is None:
        return None
    names = {node.id for node in ast.walk(ast.parse(f"({loop.start}, {loop.stop})"))
             if isinstance(node, ast.Name)}  # fmt: skip
    env: dict[str, Any] = dict(space.values)
    for number, level in enumerate(space.reading.levels):
        if level.name in names:
            env[level.name] = space.columns[number]
    start, stop = evaluate(loop.start, env), evaluate(loop.stop, env)
    return _ends(np.asarray(start))[0], max(_ends(np.asarray(stop))[1] - 1, 0)


def _ends(values: Any) -> Interval:
    return int(values.min()), int(values.max())
