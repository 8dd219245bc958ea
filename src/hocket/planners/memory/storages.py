"""Storages: which bytes an order of a graph's ops holds, and when.

The unit is the storage, not the tensor: views and in-place writes use the bytes of the tensor that
they alias (`Graph.root_of`), and each other result of an op is a storage of its own. A storage is
held from the op that makes it until the last op that reads any tensor in it, or to the end of the
step if its role says so. A reordering must keep producers before readers (in-place writes appear as
versions and control tensors, so this covers read after write, write after read and write after
write) and the graph's sequence of random draws. Bytes that exist before the step are a constant.
O(ops + reads).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from hocket.base.arrays import BoolArray, LongArray, pointers, positions
from hocket.graph.graph import Graph, distinct
from hocket.kernels import kernel
from hocket.kernels.containers import Heaps, new_heaps, table, zeros
from hocket.kernels.heaps import pop, push
from hocket.simulate.instructions import Instructions

# The order nearest to a given one that keeps further precedences: smallest position first.
#
# Kahn's algorithm with a heap of positions. O((ops + precedences) log ops).

_ZERO = cast(int, np.int64(0))
"""A typed 0: with a plain 0 as argument numba would compile another version of a function."""


@kernel
def _sort(
    tables: OpTables, waits: LongArray, position: LongArray, heap: Heaps, order: LongArray
) -> None:
    for op in range(len(waits)):
        if waits[op] == 0:
            push(heap, _ZERO, float(position[op]), op)
    for count in range(len(order)):
        op = pop(heap, _ZERO)
        order[count] = op
        for at in range(tables.after_ptr[op], tables.after_ptr[op + 1]):
            other = tables.after[at]
            waits[other] -= 1
            if waits[other] == 0:
                push(heap, _ZERO, float(position[other]), other)


def legal(storages: Storages, order: LongArray) -> LongArray:
    """Return the order, changed as little as the precedences of ``storages`` require."""
    tables, num_ops = storages.tables, storages.num_ops
    found, heap = zeros(num_ops), new_heaps(np.array([0, num_ops + 1]))
    _sort(tables, tables.num_waits.copy(), positions(order), heap, found)
    return found


class OpTables(NamedTuple):
    """Ops, storages and precedences as compiled code reads them."""

    taken_bytes: LongArray
    """[op]: bytes that it allocates when it starts: its results, workspace included."""
    passing_bytes: LongArray
    """[op]: bytes that are held only while it runs."""
    num_bytes: LongArray
    read_ptr: LongArray
    reads: LongArray
    """Op v reads storages ``reads[read_ptr[v]:read_ptr[v + 1]]``."""
    reader_ptr: LongArray
    readers: LongArray
    """Storage x is read by ops ``readers[reader_ptr[x]:reader_ptr[x + 1]]``."""
    num_closers: LongArray
    """[storage]: number of readers, plus one if it is held to the end of the step."""
    num_waits: LongArray
    """[op]: number of ops that it must follow."""
    after_ptr: LongArray
    after: LongArray
    """Op v must precede ops ``after[after_ptr[v]:after_ptr[v + 1]]``."""
    before_ptr: LongArray
    before: LongArray
    """Op v must follow ops ``before[before_ptr[v]:before_ptr[v + 1]]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Storages:
    """Storages that the ops of a graph make, with bytes and readers, and ops' precedences."""

    num_ops: int
    num_bytes: LongArray
    producer: LongArray
    """The op that makes each storage, ascending."""
    is_kept: BoolArray
    """[storage]: True if it is held to the end of the step."""
    reader_ptr: LongArray
    readers: LongArray
    """Ops that read each storage, without duplicates, ascending."""
    passing_bytes: LongArray
    """[op]: bytes of its workspace, and of results that no op reads."""
    before: LongArray
    after: LongArray
    """Pairs of ops: ``before[i]`` runs before ``after[i]``."""
    start_bytes: int
    """Bytes that exist before the step."""

    @cached_property
    def tables(self) -> OpTables:
        """The same facts by op and by storage, in the form that compiled code reads."""
        taken_bytes = self.passing_bytes.copy()
        np.add.at(taken_bytes, self.producer, self.num_bytes)
        storage = np.repeat(np.arange(len(self.producer)), np.diff(self.reader_ptr))
        num_reads, num_before, num_after = (
            np.bincount(ops, minlength=self.num_ops)
            for ops in (self.readers, self.after, self.before)
        )
        columns = (
            taken_bytes, self.passing_bytes, self.num_bytes,
            pointers(num_reads), storage[np.argsort(self.readers, kind="stable")],
            self.reader_ptr, self.readers, np.diff(self.reader_ptr) + self.is_kept,
            num_before,
            pointers(num_after), self.after[np.argsort(self.before, kind="stable")],
            pointers(num_before), self.before[np.argsort(self.after, kind="stable")],
        )  # fmt: skip
        return OpTables(*(table(column, np.int64) for column in columns))


def storages_of(graph: Graph) -> Storages:
    """The storages of a step that runs on one device."""
    root = graph.root_of.astype(np.int64)
    is_kept = np.zeros(graph.num_tensors, dtype=np.bool_)
    is_kept[root[graph.is_held]] = True
    return gathered(
        num_ops=graph.num_ops,
        bytes_of=graph.held_bytes,
        producer=graph.tensor_producer.astype(np.int64),
        is_kept=is_kept,
        read=(root[graph.reads], graph.reader),
        workspace_bytes=graph.workspace_bytes,
        precedence=_precedence(graph),
    )


def device_storages(graph: Graph, tables: Instructions, device: int) -> Storages:
    """The storages of one device of a placed step, among the ops of all devices.

    A tensor from another device is on this one as soon as its op has run. A tensor that is sent
    leaves at once. A tensor that arrives before the step's first op is held from the start.
    """
    places = tables.places
    here = places.device == device
    return gathered(
        num_ops=graph.num_ops,
        bytes_of=np.where(here, places.num_bytes, 0),
        producer=graph.tensor_producer[places.tensor].astype(np.int64),
        is_kept=places.is_kept,
        read=(places.storage[places.read_place], places.reader),
        workspace_bytes=np.where(tables.runs.device == device, graph.workspace_bytes, 0),
        precedence=_precedence(graph),
    )


def _precedence(graph: Graph) -> tuple[LongArray, LongArray]:
    """Pairs of ops (before, after): from producers to readers, and between random draws."""
    src, dst = graph.edges
    drawing = np.flatnonzero(graph.rng_order >= 0)
    return (
        np.concatenate((src, drawing[:-1])).astype(np.int64),
        np.concatenate((dst, drawing[1:])).astype(np.int64),
    )


def gathered(
    *,
    num_ops: int,
    bytes_of: LongArray,
    producer: LongArray,
    is_kept: BoolArray,
    read: tuple[LongArray, LongArray],
    workspace_bytes: LongArray,
    precedence: tuple[LongArray, LongArray],
) -> Storages:
    """Build storages from columns by owner; ``read`` holds pairs of owner and reading op.

    Owners with producer -1 exist before the step; owners without bytes hold nothing.
    """
    num_owners = len(bytes_of)
    # Results that no op reads live only while their op runs.
    is_read = np.zeros(num_owners, dtype=np.bool_)
    is_read[read[0]] = True
    made = (producer >= 0) & (bytes_of > 0)
    passing = made & ~is_read & ~is_kept
    passing_bytes = workspace_bytes.astype(np.int64).copy()
    np.add.at(passing_bytes, producer[passing], bytes_of[passing])
    owner = np.flatnonzero(made & ~passing)
    owner = owner[np.argsort(producer[owner], kind="stable")]
    number = np.full(num_owners, -1, dtype=np.int64)
    number[owner] = np.arange(len(owner))
    counted = number[read[0]] >= 0
    pair = distinct(number[read[0][counted]] * max(num_ops, 1) + read[1][counted])
    storage, reader = pair // max(num_ops, 1), pair % max(num_ops, 1)
    edge = distinct(precedence[0] * max(num_ops, 1) + precedence[1])
    return Storages(
        num_ops=num_ops,
        num_bytes=bytes_of[owner].astype(np.int64),
        producer=producer[owner],
        is_kept=is_kept[owner],
        reader_ptr=pointers(np.bincount(storage, minlength=len(owner))),
        readers=reader,
        passing_bytes=passing_bytes,
        before=edge // max(num_ops, 1),
        after=edge % max(num_ops, 1),
        start_bytes=int(bytes_of[producer < 0].sum()),
    )


def passing_through(storages: Storages, has_run: BoolArray, op: int) -> Storages:
    """The storages with precedences that run exactly the ops of ``has_run`` before ``op``.

    The set must contain all predecessors of its ops; all other ops run after ``op``.
    """
    # Only the last ops inside and the first outside need an arc; the others follow from these.
    inside, outside = has_run, ~has_run
    outside[op] = False
    ends, begins = inside.copy(), outside.copy()
    within = inside[storages.before] & inside[storages.after]
    ends[storages.before[within]] = False
    beyond = outside[storages.before] & outside[storages.after]
    begins[storages.after[beyond]] = False
    last, first = np.flatnonzero(ends), np.flatnonzero(begins)
    return preceded(
        storages,
        np.concatenate((last, np.full(len(first), op))),
        np.concatenate((np.full(len(last), op), first)),
    )


def preceded(storages: Storages, before: LongArray, after: LongArray) -> Storages:
    """The storages with additional precedences: ``before[i]`` runs before ``after[i]``."""
    num_ops = max(storages.num_ops, 1)
    edge = distinct(
        np.concatenate((storages.before, before)) * num_ops
        + np.concatenate((storages.after, after))
    )
    return replace(storages, before=edge // num_ops, after=edge % num_ops)
