"""All-reduces of gradient buckets, overlapped with the backward pass as in PyTorch's DDP.

A bucket is reduced when all replicas have its gradients, one bucket after the other. O(replicas x
gradients).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.graph import Role
from hocket.plan.gradient_buckets import fill_buckets
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication
from hocket.simulate.parallel.batch_costs import exchange_s, gradients_of
from hocket.simulate.parallel.exchanges import (
    Exchanges,
    JoinedNames,
    all_reduced_bytes,
    exchange_all,
)
from hocket.simulate.parallel.graph_builder import StepBuilder
from hocket.simulate.parallel.replica_copy import ReplicaCopy


def exchange_alike(
    problem: Problem,
    copies: list[ReplicaCopy],
    degree: int,
    planned: Communication | None,
    builder: StepBuilder,
    num_updates: int = 1,
) -> dict[int, IntArray]:
    """Add the all-reduces of `exchange` among the ranks with each tensor-parallel shard."""
    done: dict[int, IntArray] = {}
    for part in range(min(degree, len(copies))):
        alike = range(part, len(copies), degree)
        if len(copies[part].peers) > 1:
            found = exchange(
                problem, [copies[i] for i in alike], planned, builder, is_between=degree > 1,
                num_updates=num_updates,
            )  # fmt: skip
            done |= {alike[i]: ends for i, ends in found.items()}
    return done


def exchange(
    problem: Problem,
    copies: list[ReplicaCopy],
    planned: Communication | None,
    builder: StepBuilder,
    *,
    is_between: bool = False,
    num_updates: int = 1,
) -> dict[int, IntArray]:
    """Add the all-reduces of gradient buckets, ``num_updates`` times as long if every wave has one.

    Returns, per replica and tensor, the control tensor that signals the end of its bucket's
    all-reduce. With ``is_between`` the all-reduces are ordered among other collectives of the
    backward pass, by the time at which their gradients are complete.
    """
    graph, gradients = problem.graph, gradients_of(problem.graph)
    maker = graph.tensor_producer[gradients]
    owners = np.stack([device_of[maker] for device_of in copies[0].peers])
    done = {i: np.full(graph.num_tensors, -1, dtype=np.int32) for i in range(len(copies))}
    filled = list(buckets(graph.tensor_bytes[gradients], owners))
    if not filled:
        return done
    sizes = [int(graph.tensor_bytes[gradients[members]].sum()) for members in filled]
    rings = np.stack([owners[:, members[0]] for members in filled])
    devices = np.stack(
        [[own.device_of[maker[members[0]]] for own in copies] for members in filled]
    ).astype(np.int32)
    when = np.repeat(2.0 * np.arange(len(filled))[:, None], len(copies), axis=1)
    if is_between:
        last = [[float(own.passes[-1].priority[maker[members]].max()) for own in copies]
                for members in filled]  # fmt: skip
        # After accumulation (+0.5) and before the next op (+1).
        when = np.array(last) + 0.75
    exchanges = Exchanges(
        names=tuple(f"bucket.{bucket}" for bucket in range(len(filled))),
        labels=tuple(own.label for own in copies),
        devices=devices,
        seconds=np.array([
            exchange_s(problem, tuple(row), size, planned) * num_updates
            for row, size in zip(rings.tolist(), sizes, strict=True)
        ]),
        sent_bytes=all_reduced_bytes(np.array(sizes), len(owners)) * num_updates,
        ready_priority=when,
        priority=when + (0.1 if is_between else 1),
    )  # fmt: skip
    bucket_of = np.repeat(np.arange(len(filled)), [len(members) for members in filled])
    sent = gradients[np.concatenate(filled)]
    waiting = (
        np.concatenate([own.sums[sent] for own in copies]),
        np.concatenate([bucket_of * len(copies) + party for party in range(len(copies))]),
    )
    ops = exchange_all(
        builder, "all_reduce", exchanges, waiting, len(problem.costs.kind_names),
        # Workspace: the flat buffer of a bucket, as DDP copies gradients into one.
        workspace_bytes=np.repeat(sizes, len(copies)),
    )  # fmt: skip
    names = JoinedNames(exchanges.names, exchanges.labels, "#done")
    ends = builder.add_tensors(names, role=Role.CONTROL, producer=ops.ravel()).reshape(ops.shape)
    for party in range(len(copies)):
        done[party][sent] = ends[bucket_of, party]
    return done


def buckets(sizes: LongArray, owners: IntArray) -> Iterator[IntArray]:
    """Yield the positions of each bucket's gradients, which are all made on the same devices."""
    keyed = zip(map(tuple, owners.T.tolist()), sizes.tolist(), strict=True)
    for members in fill_buckets(keyed):
        yield np.array(members, dtype=np.int32)
