"""Parts of divided matrices while they are unfolded: what they make is summed where it leaves them.

All devices of a stage have the same samples and a part of every divided op each; a sum begins when
all of them have what is added, and what reads it waits. Where a block runs again before its
backward pass, so do the sums inside it. O(sums x devices).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.cost.collectives import ring_all_reduce_s
from hocket.graph.graph import Graph, Role
from hocket.plan.problem import Problem
from hocket.simulate.shares.copies import ReplicaCopy
from hocket.simulate.shares.matrices import Regions
from hocket.simulate.shares.prices import best_ring, priced_at
from hocket.simulate.shares.sheet import Sheet
from hocket.simulate.shares.together import (
    Exchanges,
    JoinedNames,
    all_reduced_bytes,
    exchange_all,
)

_NEXT = 0.25
"""After an op, before the one that follows it."""
_CLOSE = 1e-6
"""Likewise among second runs, which stand close together."""
_BEGIN = 1e-5
"""From when all are ready to the sum."""


def join_parts(
    problem: Problem, regions: Regions, copies: Sequence[ReplicaCopy], degree: int, sheet: Sheet
) -> None:
    """Add the sums over the parts of every replica; copies stand replica by replica."""
    for start in range(0, len(copies), degree):
        group = copies[start : start + degree]
        for number in range(len(group[0].replica.microbatches)):
            for runs in (_first_runs(group, number), _second_runs(group, number)):
                _sum_all(problem, regions, group, number, runs, sheet)


class _MicrobatchRuns(NamedTuple):
    """One run of a microbatch's ops on all parts."""

    op: list[IntArray]
    """Per part and op of the graph; -1 where it does not run."""
    priority: list[FloatArray]
    tensor: list[IntArray] | None
    """Per part and tensor of the graph; None where only ops are known."""
    close: float
    label: str


def _first_runs(group: Sequence[ReplicaCopy], number: int) -> _MicrobatchRuns:
    passes = [own.passes[number] for own in group]
    return _MicrobatchRuns(
        [p.op for p in passes], [p.priority for p in passes], [p.tensor for p in passes], _NEXT,
        f"#{number}",
    )  # fmt: skip


def _second_runs(group: Sequence[ReplicaCopy], number: int) -> _MicrobatchRuns:
    passes = [own.passes[number] for own in group]
    return _MicrobatchRuns(
        [p.again for p in passes], [p.again_priority for p in passes], None, _CLOSE,
        f"#{number}@again",
    )  # fmt: skip


def _sum_all(
    problem: Problem,
    regions: Regions,
    group: Sequence[ReplicaCopy],
    number: int,
    runs: _MicrobatchRuns,
    sheet: Sheet,
) -> None:
    """The sums of one run, all at once."""
    makers = np.array([each.maker for each in regions.sums])
    runs_here = runs.op[0][makers] >= 0
    sums = [each for each, is_here in zip(regions.sums, runs_here, strict=True) if is_here]
    if not sums:
        return
    makers, num_parts = makers[runs_here], len(group)
    sized = priced_at(problem, group[0].replica.microbatches[number]).graph
    devices = np.stack([own.device_of[makers] for own in group], axis=1)
    rings = [best_ring(problem, tuple(row)) for row in devices.tolist()]
    when = np.stack([priority[makers] for priority in runs.priority], axis=1) + runs.close
    sizes = sized.tensor_bytes[[each.tensor for each in sums]]
    exchanges = Exchanges(
        names=tuple(f"sum.{maker}{runs.label}" for maker in makers.tolist()),
        labels=tuple(own.label for own in group),
        devices=devices,
        ready_priority=when,
        priority=when + _BEGIN,
        seconds=ring_all_reduce_s(
            sizes, num_parts,
            [ring.latency_s for ring in rings], [ring.bandwidth_bps for ring in rings],
        ),
        sent_bytes=all_reduced_bytes(sizes, num_parts),
    )  # fmt: skip
    waiting = _waits(sized, makers, runs, sheet)
    ops = exchange_all(sheet, "exchange", exchanges, waiting, len(problem.costs.kind_names))
    names = JoinedNames(exchanges.names, exchanges.labels, "#done")
    told = sheet.add_tensors(names, role=Role.CONTROL, producer=ops.ravel()).reshape(ops.shape)
    for part, op_of in enumerate(runs.op):
        readers = op_of[np.concatenate([each.readers for each in sums])]
        done = np.repeat(told[:, part], [len(each.readers) for each in sums])
        sheet.add_reads(readers[readers >= 0], done[readers >= 0])


def _waits(
    sized: Graph, makers: LongArray, runs: _MicrobatchRuns, sheet: Sheet
) -> tuple[IntArray, LongArray]:
    """What sums wait for, and the flat number of the sum and part that does."""
    num_parts, number = len(runs.op), np.arange(len(makers))
    if runs.tensor is None:
        # Of second runs it is known when they end, and that is all a sum has to know.
        found = [
            sheet.add_tensors([""] * len(makers), role=Role.CONTROL, producer=op_of[makers])
            for op_of in runs.op
        ]
        at = [number * num_parts + part for part in range(num_parts)]
        return np.concatenate(found), np.concatenate(at)
    made = [sized.made_by(int(maker)) for maker in makers]
    flat = np.concatenate([np.array(some, dtype=np.int64) for some in made])
    number = np.repeat(number, [len(some) for some in made])
    return (
        np.concatenate([tensor[flat] for tensor in runs.tensor]),
        np.concatenate([number * num_parts + part for part in range(num_parts)]),
    )
