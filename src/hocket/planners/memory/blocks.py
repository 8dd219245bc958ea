"""Cut a training step into blocks: the consecutive ops for which a memory plan chooses policies.

Blocks are usually repeated layers: consecutive ops whose module paths share a numbered part
(``transformer.h.3``), with small neighbours joined. Nested lists of modules are cut by bytes: a
block that makes more bytes than a limit is cut by the lists inside it (``stages.2.blocks.17``). Of
several limits, the one is chosen for which full recompute holds the fewest bytes (the inputs of all
blocks and everything that the largest block makes). A model without numbered parts is cut where few
bytes cross (Wei, TensorFlowMem, CMU-CS-19-135): a dynamic program with a sliding minimum finds the
cuts with the smallest sum of crossing bytes such that no block makes too many bytes. Logits and
their loss stay in one block. `cut_finer` cuts blocks whose parameters take too many bytes again, by
lists of modules such as experts. O(limits · (ops + reads)).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.graph import Graph
from hocket.plan.sections.memory import WITHOUT_MODULE
from hocket.simulate.rewriting.blocks import StepBlocks, make_blocks, num_forward_ops
from hocket.simulate.rewriting.chunks import find_logits
from hocket.simulate.rewriting.host_parameters import runs_within
from hocket.simulate.rewriting.repeated_calls import CALLS, Span, calls_of, outer_modules

FEWEST = 3
"""Smallest number of numbered parts by which a model is cut; with fewer, narrow places are used."""
NUM_NARROW_BLOCKS = 16
"""Approximate number of blocks between narrow places, each making an equal part of all bytes."""
SMALL_OPS = 4
"""Neighbouring parts of one list are joined if both have fewer ops than this."""
NUM_LIMITS, SMALLEST_LIMIT = 20, 1 / 64
"""Number of limits of a block's bytes that are tried; the smallest as a fraction of all bytes."""
WORTH = 0.9
"""Smaller blocks are chosen if full recompute then holds less than this fraction of its bytes."""
Cut = list[tuple[int, str]]
"""Blocks as pairs of first op and name."""


def cut_step(graph: Graph) -> StepBlocks:
    """Cut a step into blocks; raises `UsageError` if the graph is no training step."""
    num_forward = num_forward_ops(graph)
    forward, tail = _Forward(graph, num_forward), _tail(graph, num_forward)
    best, least = Cut(), float("inf")
    for nested in forward.nested_cuts():
        # Logits and loss form the last block, so cuts behind the start of that layer are dropped.
        cut = [(start, name) for start, name in nested if start <= tail]
        held_bytes = forward.held_bytes(cut)
        if (forward.has_layers or len(cut) >= FEWEST) and held_bytes < WORTH * least:
            best, least = cut, held_bytes
    if not forward.has_layers:
        starts = [start for start in narrow_cuts(graph, num_forward) if start < tail]
        starts += [tail] if tail < num_forward else []
        narrow = [(at, graph.module_of(at) or graph.op_names[at]) for at in starts]
        # Without layers, narrow cuts win unless nested ones hold clearly less.
        if WORTH * forward.held_bytes(narrow) <= least:
            best = narrow
    edges = np.array([*(start for start, _ in best), num_forward], dtype=np.int32)
    return make_blocks(graph, _distinct([name for _, name in best]), edges)


@lru_cache(maxsize=2**16)
def layer_label(module: str, depth: int = 1) -> str:
    """The module path up to its ``depth``-th numbered part from the left; empty if it has fewer."""
    parts = module.split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[depth - 1] + 1]) if len(numbered) >= depth else ""


def _child(path: str, module: str) -> str:
    """The direct submodule of ``path`` that contains ``module``; empty for ``path`` itself."""
    if module == path or (path and not module.startswith(path + ".")):
        return ""
    return module[: (module + ".").index(".", len(path) + 1 if path else 0)]


@dataclass(eq=False)
class _Forward:
    """Ops of a forward pass, and the possible cuts by lists of modules."""

    graph: Graph
    num_ops: int
    _found: dict[tuple[int, int, str], list[tuple[Span, str]]] = field(default_factory=dict)

    @cached_property
    def modules(self) -> list[str]:
        """[op]: module path."""
        return [self.graph.module_of(op) for op in range(self.num_ops)]

    @cached_property
    def made(self) -> LongArray:
        """[op]: bytes made before the op; the last entry is the bytes made by all ops."""
        return _made_and_crossing(self.graph, self.num_ops)[0]

    @cached_property
    def has_layers(self) -> bool:
        """True if there are at least `FEWEST` outermost numbered modules."""
        return len({layer_label(module) for module in self.modules} - {""}) >= FEWEST

    def nested_cuts(self) -> Iterator[Cut]:
        """Cuts for descending byte limits: outermost lists, then lists inside large blocks."""
        labels = [layer_label(module) for module in self.modules]
        outermost = list(pairwise([*_joined(labels), self.num_ops]))
        before = Cut()
        limits = int(self.made[-1]) * np.geomspace(1, SMALLEST_LIMIT, NUM_LIMITS)
        # Descending limits repeat the same cut many times; each is judged only once.
        for limit_bytes in [float("inf"), *limits.tolist()]:
            cut = [
                piece for run in outermost for piece in self._cut(run, labels[run[0]], limit_bytes)
            ]
            if cut != before:
                yield cut
            before = cut

    def _cut(self, run: Span, path: str, limit_bytes: float) -> Cut:
        """Blocks of a run of ops: one, or several if it makes more bytes than the limit."""
        start, stop = run
        if self.made[stop] - self.made[start] > limit_bytes and (inner := self._inside(run, path)):
            return [piece for part, name in inner for piece in self._cut(part, name, limit_bytes)]
        return [(start, path or self.modules[start] or WITHOUT_MODULE)]

    def _inside(self, run: Span, path: str) -> list[tuple[Span, str]]:
        """Runs of direct submodules within a run; empty if only one or if they alternate."""
        start, stop = run
        if (start, stop, path) not in self._found:
            labels = [_child(path, module) for module in self.modules[start:stop]]
            runs = [at for at, label in enumerate(labels) if label and label != _before(labels, at)]
            edges = [*_joined(labels), stop - start]
            found = [((start + a, start + b), labels[a]) for a, b in pairwise(edges)]
            if len(found) == 1 and (child := labels[0]):
                found = self._inside(run, child)
            # Alternating submodules cannot be blocks of consecutive ops.
            elif len(found) == 1 or len({labels[at] for at in runs}) < len(runs):
                found = []
            self._found[start, stop, path] = found
        return self._found[start, stop, path]

    @cached_property
    def _passed_on(self) -> tuple[LongArray, LongArray, LongArray]:
        """Producer, last reader and bytes of each storage that forward ops make and later read."""
        graph = self.graph
        last = np.full(graph.num_tensors, -1)
        is_forward = graph.reader < self.num_ops
        np.maximum.at(last, graph.root_of[graph.reads[is_forward]], graph.reader[is_forward])
        producer = graph.tensor_producer
        found = (producer >= 0) & (last > producer) & (graph.held_bytes > 0)
        return producer[found].astype(np.int64), last[found], graph.held_bytes[found]

    def held_bytes(self, cut: Cut) -> float:
        """Bytes that full recompute holds with these blocks.

        They are the inputs of all blocks, results of ops outside of all blocks' modules, and all
        results of the largest block.
        """
        if not cut:
            return float("inf")
        edges = np.array([*(start for start, _ in cut), self.num_ops])
        # The code of a module whose parts are blocks is not recomputed with any of them.
        outer = {module for _, name in cut for module in outer_modules(name)}
        is_outside = np.array([module in outer for module in self.modules], dtype=bool)
        producer, last, size = self._passed_on
        next_edge = edges[np.searchsorted(edges, producer, side="right")]
        stays = (next_edge <= last) | is_outside[producer]
        return float(size[stays].sum() + np.diff(self.made[edges]).max())


def cut_finer(graph: Graph, blocks: StepBlocks, own_bytes: LongArray, most: float) -> StepBlocks:
    """The blocks of a step, finer: a list of modules in a block is cut into groups of neighbours.

    A group's ops read at most ``most`` bytes of parameters (``own_bytes``).
    """
    starts, names = list[int](), list[str]()
    for number, name in enumerate(blocks.names):
        first, last = blocks.start[number : number + 2].tolist()
        # Labels are taken one level below the block's own numbered part.
        depth = 1 + sum(part.isdecimal() for part in name.partition(":")[0].split("."))
        cuts = _inner_cuts(graph, (first, last), depth, own_bytes, most)
        starts += [first, *cuts]
        names += [name, *(layer_label(graph.module_of(at), depth) or name for at in cuts)]
    edges = np.array([*starts, blocks.start[-1]], dtype=np.int32)
    return make_blocks(graph, _distinct([name.partition(":")[0] for name in names]), edges)


def _inner_cuts(
    graph: Graph, block: Span, depth: int, own_bytes: LongArray, most: float
) -> list[int]:
    """First ops of the groups of a list's modules within a block, and the first op after the list.

    Empty if the list has few modules or if they alternate.
    """
    first, last = block
    labels = [layer_label(graph.module_of(op), depth) for op in range(first, last)]
    runs = [at for at, label in enumerate(labels) if label and label != _before(labels, at)]
    if len(runs) < FEWEST or len({labels[at] for at in runs}) != len(runs):
        return []
    end = max(at for at, label in enumerate(labels) if label) + 1
    sizes = []
    for start, stop in pairwise([*runs, end]):
        reads = {int(graph.root_of[t]) for op in range(first + start, first + stop)
                 for t in graph.reads_of(op).tolist()}  # fmt: skip
        sizes.append(int(own_bytes[sorted(reads)].sum()))
    cuts = [first + runs[start] for start, _ in runs_within(sizes, int(most))]
    return [at for at in [*cuts, first + end] if first < at < last] if len(cuts) > 1 else []


def _before(labels: list[str], at: int) -> str:
    """The last non-empty label before position ``at``; empty if there is none."""
    return next((label for label in reversed(labels[:at]) if label), "")


def _joined(labels: list[str]) -> list[int]:
    """Starts of the runs of equal labels, with small neighbours of the same list joined."""
    starts = [at for at in range(len(labels)) if not at or labels[at] != labels[at - 1]]
    stops = [*starts[1:], len(labels)]
    kept: list[int] = []
    before = ""
    for start, stop in zip(starts, stops, strict=True):
        outer = labels[start].rpartition(".")[0]
        both_small = kept and start - kept[-1] < SMALL_OPS and stop - start < SMALL_OPS
        if not both_small or outer != before:
            kept.append(start)
        before = outer
    return kept


def _tail(graph: Graph, num_forward: int) -> int:
    """First op of the layer that makes logits; the end of the forward pass if there is none.

    This layer and the loss stay in one block, so that both can be computed in chunks.
    """
    first = find_logits(graph, 0, num_forward)
    if first is None:
        return num_forward
    module = graph.module_of(first)
    while module and first and graph.module_of(first - 1) == module:
        first -= 1
    return first


def narrow_cuts(graph: Graph, num_forward: int) -> list[int]:
    """First ops of blocks such that few bytes cross the edges between blocks.

    No block starts inside a call of a module that is called repeatedly, since such a call can only
    be executed in one piece.
    """
    made, crossing = _made_and_crossing(graph, num_forward)
    # At least the op that makes most bytes fits a block, so a cut always exists.
    most = max(int(made[-1]) // NUM_NARROW_BLOCKS * 2, int(np.diff(made).max(initial=1)), 1)
    is_inside = np.zeros(num_forward + 1, dtype=bool)
    for first, stop in _whole_calls(graph, num_forward, made, most):
        is_inside[first + 1 : stop] = True
        most = max(most, int(made[stop] - made[first]))
    best = np.zeros(num_forward + 1, dtype=np.int64)
    previous = np.zeros(num_forward + 1, dtype=np.int64)
    # The deque holds candidates for the last cut by ascending cost: a sliding minimum.
    window = deque([0])
    for at in range(1, num_forward + 1):
        while made[at] - made[window[0]] > most:
            window.popleft()
        previous[at] = window[0]
        best[at] = best[window[0]] + crossing[at]
        # A block must not start inside a call, but may end at any op.
        if is_inside[at]:
            continue
        while window and best[window[-1]] >= best[at]:
            window.pop()
        window.append(at)
    starts, at = list[int](), num_forward
    while at > 0:
        at = int(previous[at])
        starts.append(at)
    return starts[::-1]


def _whole_calls(graph: Graph, num_forward: int, made: LongArray, most: int) -> list[Span]:
    """Calls that must not be cut: those of the outermost modules that are called repeatedly.

    Modules that are called only a few times are left out if a call makes more bytes than a block
    may.
    """
    found: dict[str, list[Span]] = {}
    for path, count in sorted(graph.meta.get(CALLS, {}).items(), key=lambda each: len(each[0])):
        if found.keys().isdisjoint(outer_modules(path)):
            calls = calls_of(graph, path, num_forward)
            largest = max((int(made[stop] - made[first]) for first, stop in calls), default=0)
            if calls and (count >= FEWEST or largest <= most):
                found[path] = calls
    return [call for calls in found.values() for call in calls]


def _made_and_crossing(graph: Graph, num_forward: int) -> tuple[LongArray, LongArray]:
    """Two arrays over the positions before each forward op and after the last: bytes and live
    bytes.

    The first counts the bytes made so far, the second those that later forward ops still read.
    """
    producer, size, root = graph.tensor_producer, graph.held_bytes, graph.root_of
    made_here = (producer >= 0) & (producer < num_forward) & (size > 0)
    made = np.zeros(num_forward + 1, dtype=np.int64)
    np.add.at(made, producer[made_here] + 1, size[made_here])
    reader = graph.reader
    is_forward = reader < num_forward
    last = np.full(graph.num_tensors, -1)
    np.maximum.at(last, root[graph.reads[is_forward]], reader[is_forward])
    crossing = np.zeros(num_forward + 2, dtype=np.int64)
    crosses = made_here & (last > producer)
    np.add.at(crossing, producer[crosses] + 1, size[crosses])
    np.add.at(crossing, last[crosses] + 1, -size[crosses])
    return np.cumsum(made), np.cumsum(crossing)[: num_forward + 1]


def _distinct(names: list[str]) -> list[str]:
    """Append a count to the path of a module that runs more than once."""
    seen: Counter[str] = Counter()
    distinct = []
    for name in names:
        distinct.append(f"{name}:{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return distinct
