"""Pieces: ops that move together when loads are balanced, and the nets that connect pieces.

Ops that must share a device form one piece: a group, or an op that updates a tensor in place with
the op where that tensor is stored. A backward op joins the piece of its forward partner, which
contiguous splits require and which hardly costs other placements anything. A net is a tensor, seen
as the set of
pieces that make or read it. If a device holds some but not all pieces of a net, the tensor crosses
its boundary once, in one of the two directions; so if all links are equal the direction does not
matter, and nets over the same pieces are merged into one with the sum of their times. All of this
is exact: each placement of pieces is a placement of ops with the same loads. O(ops + reads log
reads).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.graph.coarsen.ties import hard_ties, partners
from hocket.graph.coarsen.units import joined
from hocket.graph.graph import Graph, Phase
from hocket.plan.problem import Problem
from hocket.simulate.load import LinkTimes, link_times, summed


@dataclass(frozen=True, eq=False, kw_only=True)
class Pieces:
    """A graph whose ops are gathered into pieces."""

    piece_of: IntArray
    """Per op: its piece."""
    seconds: FloatArray
    """[device, piece]: seconds; infinite if the piece cannot run there."""
    memory_bytes: LongArray
    """Per piece: bytes that stay on its device."""
    net_ptr: LongArray
    """Pieces of net n: ``net_pieces[net_ptr[n]:net_ptr[n + 1]]``, its maker first."""
    net_pieces: IntArray
    net_count: FloatArray
    """Per net: number of tensors that it represents; each pays the latency."""
    net_work: FloatArray
    """Per net: sum of its tensors' work, in the unit of `LinkTimes`."""
    before: IntArray
    """Precedence: piece ``before[i]`` may not be on a later stage than ``after[i]``."""
    after: IntArray
    is_alike: bool = False
    """True if all links are equal.

    Loads then depend on sets of pieces alone, and nets over the same pieces are merged.
    """

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return len(self.memory_bytes)

    @property
    def num_nets(self) -> int:
        """Number of nets."""
        return len(self.net_count)

    @cached_property
    def piece_ptr(self) -> LongArray:
        """Nets of piece p: ``piece_nets[piece_ptr[p]:piece_ptr[p + 1]]``."""
        counts = np.bincount(self.net_pieces, minlength=self.num_pieces)
        return pointers(counts)

    @cached_property
    def piece_nets(self) -> IntArray:
        """Nets of all pieces, indexed by `piece_ptr`."""
        nets = np.repeat(np.arange(self.num_nets, dtype=np.int32), np.diff(self.net_ptr))
        ordered: IntArray = nets[np.argsort(self.net_pieces, kind="stable")]
        return ordered


def pieces_of(problem: Problem, *, with_partners: bool = True) -> Pieces:
    """Return the pieces of a problem, numbered by their first ops.

    Without partners, pieces hold only ops that no legal plan separates, as proofs of bounds
    require.
    """
    graph, links = problem.graph, link_times(problem)
    owner = graph.owner_op
    soft = (partners(graph),) if with_partners else ()
    piece_of = joined(graph.num_ops, *hard_ties(graph), *soft)
    num_pieces = int(piece_of.max(initial=-1)) + 1
    by_kind = np.array([summed(piece_of, row, num_pieces) for row in problem.costs.op_s])
    memory_bytes = np.zeros(num_pieces, dtype=np.int64)
    np.add.at(memory_bytes, piece_of, staying_bytes(graph, owner))
    before, after = _precedence(graph, piece_of)
    net_ptr, net_pieces, tensor = _nets(graph, piece_of, owner, links)
    pieces = Pieces(
        piece_of=piece_of,
        seconds=by_kind[problem.costs.device_row],
        memory_bytes=memory_bytes,
        net_ptr=net_ptr,
        net_pieces=net_pieces,
        net_count=np.ones(len(tensor)),
        net_work=links.work[tensor],
        before=before,
        after=after,
        is_alike=is_uniform(links),
    )
    return merged_nets(pieces) if pieces.is_alike else pieces


def is_uniform(links: LinkTimes) -> bool:
    """True if a tensor costs the same between all devices that pay for it."""
    pairs = links.pays[:, None] | links.pays[None, :]
    # The diagonal is no transfer and may have other values.
    pairs &= ~np.eye(len(links.pays), dtype=np.bool_)
    latency_s, unit_s = links.latency_s[pairs], links.unit_s[pairs]
    return bool(np.all(latency_s == latency_s[:1]) and np.all(unit_s == unit_s[:1]))


def merged_nets(pieces: Pieces) -> Pieces:
    """Return the same pieces with one net per set of pieces; exact if all links are equal."""
    number: dict[tuple[int, ...], int] = {}
    bounds, members = pieces.net_ptr.tolist(), pieces.net_pieces.tolist()
    # The maker does not matter if links are equal, so nets are compared as sets.
    of_net = [
        number.setdefault(tuple(sorted(members[first:stop])), len(number))
        for first, stop in pairwise(bounds)
    ]
    sizes = np.array([len(key) for key in number], dtype=np.int64)
    merged = np.array(of_net, dtype=np.int32)
    return replace(
        pieces,
        net_ptr=pointers(sizes),
        net_pieces=np.array([piece for key in number for piece in key], dtype=np.int32),
        net_count=summed(merged, pieces.net_count, len(number)),
        net_work=summed(merged, pieces.net_work, len(number)),
    )


def gathered(pieces: Pieces, label: IntArray) -> Pieces:
    """Merge pieces with the same label into larger ones."""
    num_pieces = int(label.max(initial=-1)) + 1
    memory_bytes = np.zeros(num_pieces, dtype=np.int64)
    np.add.at(memory_bytes, label, pieces.memory_bytes)
    net = np.repeat(np.arange(pieces.num_nets), np.diff(pieces.net_ptr))
    net_ptr, net_pieces, kept = _as_nets(net, label[pieces.net_pieces], pieces.num_nets)
    before, after = _distinct_pairs(label[pieces.before], label[pieces.after], num_pieces)
    larger = Pieces(
        piece_of=label[pieces.piece_of],
        seconds=np.array([summed(label, row, num_pieces) for row in pieces.seconds]),
        memory_bytes=memory_bytes,
        net_ptr=net_ptr,
        net_pieces=net_pieces,
        net_count=pieces.net_count[kept],
        net_work=pieces.net_work[kept],
        before=before,
        after=after,
        is_alike=pieces.is_alike,
    )
    return merged_nets(larger) if larger.is_alike else larger


def staying_bytes(graph: Graph, owner: IntArray) -> LongArray:
    """Per op: bytes that it keeps on its device for most of the step.

    These are held results, tensors that exist before the step and are stored with the op, and
    activations that an op of a later phase reads.
    """
    made = graph.tensor_producer >= 0
    reader = graph.reader
    phase = np.where(made, graph.op_phase[graph.tensor_producer], Phase.OPTIMIZER)
    stays = graph.is_held.copy()
    np.logical_or.at(stays, graph.reads, graph.op_phase[reader] > phase[graph.reads])
    # A view keeps its whole storage, so the storage stays if any tensor in it does.
    np.logical_or.at(stays, graph.root_of, stays.copy())
    kept = np.flatnonzero(stays & (owner >= 0))
    total = np.zeros(graph.num_ops, dtype=np.int64)
    np.add.at(total, owner[kept], graph.held_bytes[kept])
    return total


def _precedence(graph: Graph, piece_of: IntArray) -> tuple[IntArray, IntArray]:
    """Forward edges between pieces, and reversed later edges of pieces without a forward op.

    Gradients flow through the stages in reverse, so the producer of a tensor read in a later phase
    must be on the same or a later stage. Pieces with forward ops already get their place from the
    forward edges.
    """
    src, dst = graph.edges
    is_forward = graph.op_phase == Phase.FORWARD
    has_forward = np.zeros(int(piece_of.max(initial=-1)) + 1, dtype=np.bool_)
    has_forward[piece_of[is_forward]] = True
    onward = is_forward[src] & is_forward[dst]
    orphaned = ~(has_forward[piece_of[src]] & has_forward[piece_of[dst]])
    mirrored = ~is_forward[src] & ~is_forward[dst] & orphaned
    before = np.concatenate((src[onward], dst[mirrored]))
    after = np.concatenate((dst[onward], src[mirrored]))
    return _distinct_pairs(piece_of[before], piece_of[after], len(has_forward))


def _distinct_pairs(before: IntArray, after: IntArray, count: int) -> tuple[IntArray, IntArray]:
    differs = before != after
    # One integer per pair, which `np.unique` sorts faster than rows.
    key = np.unique(before[differs].astype(np.int64) * max(count, 1) + after[differs])
    first, second = np.divmod(key, max(count, 1))
    return first.astype(np.int32), second.astype(np.int32)


def _nets(
    graph: Graph, piece_of: IntArray, owner: IntArray, links: LinkTimes
) -> tuple[LongArray, IntArray, NDArray[np.int64]]:
    """Return the nets of tensors that more than one piece makes or reads, and these tensors."""
    reader = graph.reader
    read = ~links.is_free[graph.reads]
    made = np.flatnonzero((owner >= 0) & ~links.is_free)
    tensor = np.concatenate((made, graph.reads[read].astype(np.int64)))
    piece = np.concatenate((piece_of[owner[made]], piece_of[reader[read]]))
    return _as_nets(tensor, piece, graph.num_tensors)


def _as_nets(
    net: NDArray[np.int64], piece: IntArray, num_nets: int
) -> tuple[LongArray, IntArray, NDArray[np.int64]]:
    """Return distinct (net, piece) pairs as ragged arrays; each net's first piece stays first."""
    order = np.lexsort((np.arange(len(net)), piece, net))
    is_new = np.ones(len(net), dtype=np.bool_)
    is_new[1:] = (np.diff(net[order]) != 0) | (np.diff(piece[order]) != 0)
    # Back in the original order, so that the maker remains the first piece of its net.
    chosen = np.sort(order[is_new])
    chosen = chosen[np.argsort(net[chosen], kind="stable")]
    sizes = np.bincount(net[chosen], minlength=num_nets)
    # A net within one piece is never cut.
    chosen = chosen[sizes[net[chosen]] > 1]
    kept = np.flatnonzero(sizes > 1)
    ptr = pointers(sizes[kept])
    return ptr, piece[chosen].astype(np.int32), kept
