"""Gradients that replicas add up: in buckets, in the order in which these are ready.

As PyTorch's DistributedDataParallel does it: a bucket goes when all replicas have it, beside the
backward pass, one after the other. O(replicas x gradients).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.graph import Phase, Role, Stream
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication
from hocket.simulate.shares.copies import ReplicaCopy
from hocket.simulate.shares.prices import exchange_s, gradients_of
from hocket.simulate.shares.sheet import Sheet

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""What DistributedDataParallel exchanges at once, by default."""


def exchange_alike(
    problem: Problem,
    copies: list[ReplicaCopy],
    degree: int,
    planned: Communication | None,
    sheet: Sheet,
) -> dict[int, IntArray]:
    """As `exchange`, between those that have the same part of every matrix."""
    done: dict[int, IntArray] = {}
    for part in range(degree):
        alike = range(part, len(copies), degree)
        if len(alike) > 1:
            found = exchange(
                problem, [copies[i] for i in alike], planned, sheet, is_between=degree > 1
            )
            done |= {alike[i]: ends for i, ends in found.items()}
    return done


def exchange(
    problem: Problem,
    copies: list[ReplicaCopy],
    planned: Communication | None,
    sheet: Sheet,
    *,
    is_between: bool = False,
) -> dict[int, IntArray]:
    """All-reduces of buckets; per replica and tensor, what says that its bucket is done.

    Where they stand between other exchanges of the backward pass, they come when they are made.
    """
    graph, gradients = problem.graph, gradients_of(problem.graph)
    maker = graph.tensor_producer[gradients]
    homes = np.stack([own.device_of[maker] for own in copies])
    done = {i: np.full(graph.num_tensors, -1, dtype=np.int32) for i in range(len(copies))}
    num_kinds = len(problem.costs.kind_names)
    for bucket, members in enumerate(buckets(graph.tensor_bytes[gradients], homes)):
        num_bytes = int(graph.tensor_bytes[gradients[members]].sum())
        devices = homes[:, members[0]]
        seconds = exchange_s(problem, tuple(devices.tolist()), num_bytes, planned)
        common: dict[str, Any] = {
            "kind": sheet.kind("all_reduce"), "phase": Phase.BACKWARD,
            "stream": Stream.COMMUNICATION, "device": devices,
        }  # fmt: skip
        names = [f"bucket.{bucket}{own.label}" for own in copies]
        when = np.full(len(copies), 2.0 * bucket)
        if is_between:
            last = [own.passes[-1].priority[maker[members]].max() for own in copies]
            when = np.array(last) + 0.75
        ready = sheet.add_ops(
            [f"{name}/ready" for name in names], np.zeros((num_kinds, len(copies))),
            priority=when, **common,
        )  # fmt: skip
        told = sheet.add_tensors([f"{n}#ready" for n in names], role=Role.CONTROL, producer=ready)
        for own, op in zip(copies, ready, strict=True):
            sheet.add_reads(np.full(len(members), op), own.sums[gradients[members]])
        reduced = sheet.add_ops(
            [f"{name}/all_reduce" for name in names],
            np.full((num_kinds, len(copies)), seconds),
            # The flat copy in which the gradients of a bucket travel.
            workspace_bytes=num_bytes,
            priority=when + (0.1 if is_between else 1),
            **common,
        )
        sheet.add_reads(np.repeat(reduced, len(copies)), np.tile(told, len(copies)))
        ends = sheet.add_tensors([f"{n}#done" for n in names], role=Role.CONTROL, producer=reduced)
        for index in range(len(copies)):
            done[index][gradients[members]] = ends[index]
    return done


def buckets(sizes: LongArray, homes: IntArray) -> Iterator[IntArray]:
    """Gradients that travel together: in order, of the same devices, up to a size."""
    open_buckets: dict[tuple[int, ...], list[int]] = {}
    filled: dict[tuple[int, ...], int] = {}
    limit: dict[tuple[int, ...], int] = {}
    for index, size in enumerate(sizes.tolist()):
        key = tuple(homes[:, index].tolist())
        bucket = open_buckets.setdefault(key, [])
        bucket.append(index)
        filled[key] = filled.get(key, 0) + size
        if filled[key] >= limit.get(key, FIRST_BUCKET_BYTES):
            yield np.array(open_buckets.pop(key), dtype=np.int32)
            filled[key], limit[key] = 0, BUCKET_BYTES
    for bucket in open_buckets.values():
        yield np.array(bucket, dtype=np.int32)
