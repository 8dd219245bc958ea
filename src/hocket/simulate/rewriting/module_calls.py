"""Module calls around which the hooks of a memory plan run, and the ops inside of them.

The runtime cannot intercept single ops, only calls of modules. A block's policy therefore applies
to the largest modules whose forward ops are all in the block. The layer that makes logits is
separate, so that it can run in chunks. A module that is called several times is handled call by
call if its calls are in several blocks. Ops of the model's own code between modules, such as sums
of a block's input and output, are outside: tensors that they save stay on the device, and they are
not recomputed. O(ops + modules · depth).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.graph import Graph, Phase
from hocket.simulate.rewriting.chunks import logits_module
from hocket.simulate.rewriting.repeated_calls import calls_of, num_calls, outer_modules

_LISTS = "lists"
"""Key of a graph's metadata: paths of modules that are never called, only their members."""
OUTSIDE = -1
"""Module call of ops that are in none."""


class ModuleCall(NamedTuple):
    """One call of a module: forward ops ``start`` up to ``stop``."""

    module: str
    block: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ModuleCalls:
    """Module calls in the order of the forward pass."""

    calls: tuple[ModuleCall, ...]
    call_of: IntArray
    """Module call of each forward and backward op; `OUTSIDE` for ops in none."""

    def __len__(self) -> int:
        return len(self.calls)


def uncalled_lists(graph: Graph) -> set[str]:
    """Return the paths of modules that are never called, from unchecked metadata of the graph."""
    noted = graph.meta.get(_LISTS)
    return {path for path in noted if isinstance(path, str)} if isinstance(noted, list) else set()


def called_modules(graph: Graph, start: IntArray) -> list[list[str]]:
    """Return, per block, the largest modules whose calls are not split by blocks, in execution
    order.

    ``start`` has the first forward op of each block, and the end of the last.
    """
    head = logits_module(graph, *start[-2:].tolist())
    uncalled = {*uncalled_lists(graph), *outer_modules(head)}
    blocks_under: dict[str, set[int]] = {}
    for block, path in _block_paths(graph, start):
        # Every module around the op contains the block, too.
        while path and block not in blocks_under.setdefault(path, set()):
            blocks_under[path].add(block)
            path = path.rpartition(".")[0]
    whole = {
        path
        for path, blocks in blocks_under.items()
        if path not in uncalled and (len(blocks) == 1 or _is_cut_by_calls(graph, path, start))
    }
    found: list[list[str]] = [[] for _ in start[1:]]
    for path, blocks in blocks_under.items():
        outer = next((each for each in outer_modules(path) if each not in uncalled), "")
        if path in whole and outer not in whole:
            for block in sorted(blocks):
                found[block].append(path)
    return found


def _is_cut_by_calls(graph: Graph, path: str, start: IntArray) -> bool:
    """Return True if no block begins within a call of a module."""
    calls = calls_of(graph, path, int(start[-1]))
    edges = start[1:-1].tolist()
    return bool(calls) and not any(first < edge < stop for first, stop in calls for edge in edges)


def _block_paths(graph: Graph, start: IntArray) -> list[tuple[int, str]]:
    """Return pairs of a block and a module of its forward ops, each once, in execution order."""
    block = np.repeat(np.arange(len(start) - 1), np.diff(start))
    pairs = np.stack([block, graph.op_module[: len(block)]], axis=1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    return [(int(block[op]), graph.module_of(op)) for op in np.sort(first).tolist()]


def find_module_calls(graph: Graph, start: IntArray, block_of: IntArray) -> ModuleCalls:
    """Return the module calls of a step; a backward op is in the call of its forward op.

    Graphs that were not recorded from a model have no known modules, so each block is one call.
    """
    num_forward = int(start[-1])
    if not graph.is_recorded:
        module_calls = [
            ModuleCall("", block, *span) for block, span in enumerate(pairwise(start.tolist()))
        ]
    else:
        module_calls = _calls(graph, start)
    call_of = np.full(graph.num_ops, OUTSIDE, dtype=np.int32)
    for number, module_call in enumerate(module_calls):
        call_of[module_call.start : module_call.stop] = number
    backward = np.flatnonzero(graph.op_phase == Phase.BACKWARD)
    partner = graph.partner[backward]
    own = np.where((partner >= 0) & (partner < num_forward), call_of[partner], OUTSIDE)
    of_block = np.array([module_call.block for module_call in module_calls], dtype=np.int32)
    inside = own >= 0
    # A backward op that was counted to another block than its partner is outside of all calls.
    inside[inside] = of_block[own[inside]] == block_of[backward[inside]]
    call_of[backward] = np.where(inside, own, OUTSIDE)
    return ModuleCalls(tuple(module_calls), call_of)


def _calls(graph: Graph, start: IntArray) -> list[ModuleCall]:
    """Return consecutive forward ops of each called module, split at known starts of calls."""
    of_blocks = called_modules(graph, start)
    paths = list(dict.fromkeys(path for of_block in of_blocks for path in of_block))
    number = {path: at for at, path in enumerate(paths)}
    of_module = np.array(
        [next((number[each] for each in (path, *outer_modules(path)) if each in number), OUTSIDE)
         for path in (*graph.modules, "")]
    )  # fmt: skip
    inside = of_module[graph.op_module[: int(start[-1])]]
    changes = np.flatnonzero(np.diff(inside, prepend=OUTSIDE, append=OUTSIDE)).tolist()
    repeated = [path for path in paths if num_calls(graph, path) > 1]
    calls = [first for path in repeated for first, _ in calls_of(graph, path, int(start[-1]))]
    edges = sorted({*changes, *calls})
    block = np.searchsorted(start, edges, side="right") - 1
    return [
        ModuleCall(paths[inside[first]], int(block[at]), first, stop)
        for at, (first, stop) in enumerate(pairwise(edges))
        if inside[first] != OUTSIDE
    ]
