"""The bound of an order: no order of the same ops holds fewer bytes at its peak, with the proof.

Cuts are taken at the ops with the most bytes until the rest cannot raise the bound; where a gap is
left, pairs of them are ordered both ways (`branch`). The proof is a tree of choices with a flow at
each leaf, and `check_certificate` believes none of it: it follows precedences itself and adds up
every flow. O(cuts) to find, O(leaves · (ops + reads)) to check.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.base.errors import CheckError
from hocket.graph.graph import Graph
from hocket.planners.memory.branch import Choice
from hocket.planners.memory.cut import CutFlow, OpCut, minimum_cut
from hocket.planners.memory.storages import Storages, storages_of
from hocket.planners.memory.walk import memory_curve

_STRETCHES = 12
"""Parts of an order whose fullest ops are asked first."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Certificate:
    """How far an order can be from the best one."""

    peak_bytes: int
    """Of the order, with what exists before the step."""
    start_bytes: int
    """What exists before the step."""
    bound_bytes: int
    """No order has a lower peak; with what exists before the step."""
    proof: Choice | None
    """None where the bound is what stays to the end."""

    @property
    def gap(self) -> float:
        """Share by which the bytes of the order are above the bound, without what exists before."""
        bound = self.bound_bytes - self.start_bytes
        return (self.peak_bytes - self.bound_bytes) / bound if bound else 0.0


def largest_cuts(storages: Storages, order: LongArray, max_cuts: int) -> list[OpCut]:
    """Cuts of the ops at which an order holds most, largest first.

    The first is the largest cut of all ops where an order holds no more than that at the others;
    ``max_cuts`` may end the search before. The op of each stretch of the order that holds most is
    asked first: an order that is bad in one place says little about where the best one peaks.
    """
    curve = memory_curve(storages, order)
    stretches = np.array_split(np.arange(len(order)), min(_STRETCHES, max(len(order), 1)))
    tops = np.array([part[np.argmax(curve[part])] for part in stretches if len(part)])
    tops = tops[np.argsort(-curve[tops], kind="stable")]
    falling = np.argsort(-curve, kind="stable")
    cuts: dict[int, OpCut] = {}
    bound = 0
    for position in (*tops.tolist(), *falling.tolist()):
        op = int(order[position])
        if curve[position] > bound and op not in cuts:
            cuts[op] = minimum_cut(storages, op)
            bound = max(bound, cuts[op].num_bytes)
        if len(cuts) == max_cuts:
            break
    return sorted(cuts.values(), key=lambda cut: -cut.num_bytes)


def check_certificate(graph: Graph, certificate: Certificate) -> None:
    """Raise `CheckError` unless the proof holds for the graph."""
    storages = storages_of(graph)
    kept = int(storages.num_bytes[storages.is_kept].sum())
    proven = kept if certificate.proof is None else _proven(storages, certificate.proof, [], [])
    if certificate.start_bytes != storages.start_bytes:
        raise CheckError("the certificate is of another graph: other bytes exist before the step")
    if certificate.bound_bytes > storages.start_bytes + max(proven, kept):
        raise CheckError(
            f"the certificate claims {certificate.bound_bytes} bytes but proves "
            f"{storages.start_bytes + max(proven, kept)}"
        )


def _proven(storages: Storages, choice: Choice, before: list[int], after: list[int]) -> int:
    if choice.flow is not None:
        return _flow_value(storages, choice.flow, before, after)
    ops = choice.first_of
    if not ops or len(choice.ways) != len(ops) or len(set(ops)) != len(ops):
        raise CheckError("a choice of the certificate has not a way for each of its ops")
    proven = []
    for first, way in zip(ops, choice.ways, strict=True):
        others = [op for op in ops if op != first]
        starts = [*before, *[first] * len(others)]
        proven.append(_proven(storages, way, starts, [*after, *others]))
    return min(proven)


def _flow_value(storages: Storages, flow: CutFlow, before: list[int], after: list[int]) -> int:
    """What a flow proves: bytes that every order with these precedences holds while the op runs."""
    first = np.concatenate((storages.before, np.array(before, dtype=np.int64)))
    second = np.concatenate((storages.after, np.array(after, dtype=np.int64)))
    earlier = _closure(storages.num_ops, flow.op, second, first)
    later = _closure(storages.num_ops, flow.op, first, second)
    later[flow.op] = True
    if np.any(earlier & later):
        raise CheckError("a choice of the certificate contradicts what ops read")
    surplus = _surplus(storages, flow)
    allowed = set(zip(first.tolist(), second.tolist(), strict=True))
    for tail, head, amount in flow.back.tolist():
        if (tail, head) not in allowed or amount < 0:
            raise CheckError("a flow of the certificate goes where nothing orders two ops")
        surplus[tail] += amount
        surplus[head] -= amount
    if np.any(surplus[~earlier & ~later] != 0):
        raise CheckError("a flow of the certificate begins or ends at an op in between")
    # What leaves the ops that ran before reaches those after, or stays to the end.
    taken = storages.passing_bytes[flow.op] + storages.num_bytes[storages.producer == flow.op].sum()
    return int(-surplus[earlier].sum() + taken)


def _surplus(storages: Storages, flow: CutFlow) -> LongArray:
    """What flows into each op through storages, less what flows out."""
    if (
        flow.through.shape != storages.producer.shape
        or flow.to_reader.shape != storages.readers.shape
    ):
        raise CheckError("a flow of the certificate does not fit the graph")
    if np.any(flow.through > storages.num_bytes) or np.any(flow.to_reader < 0):
        raise CheckError("a flow of the certificate is larger than its storage, or negative")
    storage = np.repeat(np.arange(len(flow.through)), np.diff(storages.reader_ptr))
    ends = np.zeros(len(flow.through), dtype=np.int64)
    np.add.at(ends, storage, flow.to_reader)
    if np.any((ends != flow.through) & ~storages.is_kept) or np.any(ends > flow.through):
        raise CheckError("a flow of the certificate ends inside a storage")
    surplus = np.zeros(storages.num_ops, dtype=np.int64)
    np.add.at(surplus, storages.readers, flow.to_reader)
    np.subtract.at(surplus, storages.producer, flow.through)
    return surplus


def _closure(num_ops: int, op: int, tails: LongArray, heads: LongArray) -> BoolArray:
    """All that is reached from an op along pairs, without itself unless they go round."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order

    matrix = coo_array((np.ones(len(tails), dtype=np.int8), (tails, heads)), (num_ops, num_ops))
    found = breadth_first_order(matrix.tocsr(), op, directed=True, return_predecessors=False)
    reached = np.zeros(num_ops, dtype=np.bool_)
    reached[found] = True
    reached[op] = bool(np.any(reached[tails] & (heads == op)))
    return reached
