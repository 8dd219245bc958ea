"""Describe a placement by modules: a short list of lines with the device of each layer.

Modules form a tree by the dots of their paths. A module that spends nearly all of its time on one
device gets one line. Any other module is replaced by its submodules, down to the depth at which the
number of lines reaches the limit. O(ops + modules x depth).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem

NEARLY_ALL = 0.98
"""Fraction of a module's time on one device from which the module gets a single line."""


@dataclass(frozen=True, eq=False)
class ModulePlace:
    """One line: a module, or only the ops that a module runs outside its submodules, and their
    devices.
    """

    path: str
    """Path of the module; empty for ops outside all modules."""
    last: str
    """Path of the last module of the line; equal to ``path`` if the line covers one module."""
    share: FloatArray
    """Fraction of the module's time on each device."""
    num_ops: int
    is_own: bool = False
    """True if the line covers only the module's own ops; its submodules have separate lines."""

    @property
    def device(self) -> int:
        """Device that runs the largest fraction of the module."""
        return int(np.argmax(self.share))

    @property
    def is_whole(self) -> bool:
        """True if nearly all of the module's time is on one device."""
        return bool(self.share[self.device] >= NEARLY_ALL)


@dataclass(frozen=True, eq=False)
class _Tree:
    """Seconds per device and number of ops of each module, with and without its submodules."""

    seconds: dict[str, FloatArray]
    own_seconds: dict[str, FloatArray]
    num_ops: dict[str, int]
    own_ops: dict[str, int]
    parts: dict[str, list[str]]


def module_places(problem: Problem, device_of: IntArray, max_lines: int) -> tuple[ModulePlace, ...]:
    """Lines that together cover every op, in the order in which the modules first run.

    At most ``max_lines``, unless the outermost modules alone need more.
    """
    tree = _tree(problem, device_of)
    deepest = max(path.count(".") + 1 for path in tree.seconds)
    lines = tuple(_joined(_lines(tree, "", 1)))
    for depth in range(2, deepest + 1):
        deeper = tuple(_joined(_lines(tree, "", depth)))
        if len(deeper) > max_lines:
            break
        lines = deeper
    return lines


def _tree(problem: Problem, device_of: IntArray) -> _Tree:
    graph, costs = problem.graph, problem.costs
    op_s = costs.op_s[costs.device_row[device_of], np.arange(graph.num_ops)]
    table = np.zeros((len(graph.modules) + 1, problem.cluster.num_devices))
    # An op without a time still belongs to a device, so it gets a tiny weight.
    np.add.at(table, (graph.op_module, device_of), np.maximum(op_s, 1e-12))
    # Ops outside all modules have index -1; the modulo maps them to the last row.
    count = np.bincount(graph.op_module % len(table), minlength=len(table))
    first = np.full(len(table), graph.num_ops)
    np.minimum.at(first, graph.op_module, np.arange(graph.num_ops))
    tree = _Tree({}, {}, {}, {}, {})
    for module in np.argsort(first, kind="stable").tolist():
        if not count[module]:
            continue
        path = graph.modules[module] if module < len(graph.modules) else ""
        tree.own_seconds[path] = table[module]
        tree.own_ops[path] = int(count[module])
        inner = path
        while True:
            is_known = inner in tree.seconds
            tree.seconds[inner] = tree.seconds.get(inner, _nothing(table)) + table[module]
            tree.num_ops[inner] = tree.num_ops.get(inner, 0) + int(count[module])
            if not inner:
                break
            outer = inner.rpartition(".")[0]
            if not is_known:
                tree.parts.setdefault(outer, []).append(inner)
            inner = outer
    return tree


def _nothing(table: FloatArray) -> FloatArray:
    return np.zeros(table.shape[1])


def _lines(tree: _Tree, path: str, depth: int) -> Iterator[ModulePlace]:
    whole = _place(path, tree.seconds[path], tree.num_ops[path])
    if path not in tree.parts or (path and (whole.is_whole or not depth)):
        yield whole
        return
    if path in tree.own_seconds:
        yield replace(_place(path, tree.own_seconds[path], tree.own_ops[path]), is_own=True)
    for part in tree.parts[path]:
        yield from _lines(tree, part, depth - 1)


def _place(path: str, seconds: FloatArray, num_ops: int) -> ModulePlace:
    return ModulePlace(path, path, seconds / seconds.sum(), num_ops)


def _joined(lines: Iterator[ModulePlace]) -> Iterator[ModulePlace]:
    """Merge lines of consecutive list members (``h.0``, ``h.1``, …) on the same device."""
    run: ModulePlace | None = None
    for line in lines:
        if run is not None and _follows(run, line):
            total = run.num_ops + line.num_ops
            run = ModulePlace(run.path, line.path, np.minimum(run.share, line.share), total)
            continue
        if run is not None:
            yield run
        run = line
    if run is not None:
        yield run


def _follows(before: ModulePlace, line: ModulePlace) -> bool:
    outer, _, number = before.last.rpartition(".")
    other, _, next_number = line.path.rpartition(".")
    are_neighbours = number.isdigit() and next_number.isdigit() and outer == other
    in_turn = are_neighbours and int(next_number) == int(number) + 1
    if before.is_own or line.is_own:
        return False
    return in_turn and before.is_whole and line.is_whole and before.device == line.device
