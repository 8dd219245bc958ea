"""The Graph: ops and tensors of one training step, as frozen arrays in topological order.

An op reads tensors and makes tensors; a tensor has at most one producer and any number of readers.
All data for algorithms are arrays indexed by op or by tensor, so that 200,000 ops take megabytes
and numba loops can process them. The order of the ops is topological: an op only reads tensors that
exist before the step (producer -1) or that an earlier op makes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers

_T = TypeVar("_T", bound=np.generic)


class Phase(IntEnum):
    """Part of a training step to which an op belongs."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class Stream(IntEnum):
    """Stream of a device on which an op runs; each stream runs one op at a time, concurrently."""

    COMPUTE = 0
    COPY_IN = 1
    """Copies from host memory."""
    COPY_OUT = 2
    """Copies to host memory."""
    COMMUNICATION = 3
    """Collectives of several devices."""
    SECOND = 4
    """A second compute stream."""
    HOST = 5
    """Work of the host CPU for the device, such as updates of parameters in host memory."""


class Role(IntEnum):
    """Role of a tensor, which decides how long its bytes are held."""

    ACTIVATION = 0
    """Made by an op, freed after its last reader."""
    PARAMETER = 1
    """Exists before the step and is held throughout."""
    OPTIMIZER_STATE = 2
    """Exists before the step and is held throughout."""
    BUFFER = 3
    """Exists before the step and is held throughout (running statistics, masks, constants)."""
    INPUT = 4
    """The batch: on every device that reads it, from the start of the step to its end."""
    GRADIENT = 5
    """Made by an op and held until the end of the step."""
    OUTPUT = 6
    """Made by an op and held until the end of the step (the loss, the logits)."""
    CONTROL = 7
    """No bytes: only an order, its readers run after its producer."""


PERSISTENT_ROLES = (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.BUFFER, Role.INPUT)
"""Roles of tensors that exist before the step."""

HELD_ROLES = (*PERSISTENT_ROLES, Role.GRADIENT, Role.OUTPUT)
"""Roles of tensors that, once present, are held until the end of the step."""

DTYPES = ("float32", "float64", "bfloat16", "float16", "float8", "int8", "other")
"""Arithmetic types that hardware has separate peak rates for; ``op_dtype`` indexes this."""

ANY_KIND = "*"
"""Key of `StatedTimes.op_s` for times that hold on every device type."""

CPU_KIND = "cpu"
"""Key of `StatedTimes.op_s` for times that hold on every CPU."""


@dataclass(frozen=True, eq=False)
class StatedTimes:
    """Times given with the graph, instead of by a cost model (published profiles)."""

    op_s: Mapping[str, FloatArray]
    """By device type (or ``ANY_KIND``, ``CPU_KIND``): seconds per op; infinite if it cannot run."""
    tensor_s: FloatArray | None = None
    """Per tensor: seconds over one link, used instead of latency and bandwidth."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OtherBatch:
    """The columns of the same step, op by op, for another number of samples in its batch.

    Two sizes show which quantities grow with the batch; see `hocket.graph.batches`.
    """

    num_samples: int
    """Samples in the batch of the graph itself."""
    other_samples: int
    """Samples in the batch of these columns."""
    signatures: tuple[str, ...]
    op_signature: IntArray
    flops: FloatArray
    bytes_touched: LongArray
    workspace_bytes: LongArray
    tensor_bytes: LongArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """Ops and tensors of one step. Build one with `GraphBuilder`, `assemble` or `read_graph`."""

    name: str
    op_names: tuple[str, ...]
    kinds: tuple[str, ...]
    """Names of op kinds, such as ``aten.mm``; ``op_kind`` indexes this."""
    op_kind: IntArray
    modules: tuple[str, ...]
    """Module paths, such as ``transformer.h.0.attn``; ``op_module`` indexes this."""
    op_module: IntArray
    """Per op: index into ``modules``; -1 if unknown."""
    signatures: tuple[str, ...]
    """Kind, shapes, dtypes and constants of an op as one string; equal strings have equal cost."""
    op_signature: IntArray
    """Per op: index into ``signatures``; -1 if unknown."""
    op_phase: NDArray[np.int8]
    op_dtype: NDArray[np.int8]
    flops: FloatArray
    bytes_touched: LongArray
    """Per op: device memory bytes read and written; 0 for ops that launch no kernel (views)."""
    workspace_bytes: LongArray
    """Per op: bytes allocated only while it runs."""
    partner: IntArray
    """Per backward op: the forward op to which it belongs; -1 if none."""
    group: IntArray
    """Per op: group whose ops must share a device; -1 if none."""
    rng_order: IntArray
    """Per op: position among the ops that draw random numbers; -1 if it draws none."""

    tensor_names: tuple[str, ...]
    tensor_bytes: LongArray
    """Per tensor: bytes of a transfer, and of its storage unless it is an alias."""
    tensor_role: NDArray[np.int8]
    tensor_producer: IntArray
    """Per tensor: the op that makes it, never decreasing; -1 if it exists before the step."""
    alias_of: IntArray
    """Per tensor: the tensor, read by the producer, whose storage it shares; -1 if its own."""

    read_ptr: LongArray
    """Inputs of op i: tensors ``reads[read_ptr[i]:read_ptr[i + 1]]``, distinct and ascending."""
    reads: IntArray
    op_stream: NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    """Per op: its `Stream`; the default is compute for all."""
    stated: StatedTimes | None = None
    other_batch: OtherBatch | None = None
    """The same step at another batch size; None if unknown. Not part of the content hash."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the graph (model, batch, versions); not part of the content hash."""

    def __post_init__(self) -> None:
        if not len(self.op_stream):
            object.__setattr__(self, "op_stream", np.zeros(self.num_ops, dtype=np.int8))
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    # ── sizes ────────────────────────────────────────────────────────────────────────────────

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return len(self.tensor_names)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {self.num_ops} ops, {self.num_tensors} tensors)"

    # ── the other directions of the same relation ────────────────────────────────────────────

    @cached_property
    def made_ptr(self) -> LongArray:
        """Outputs of op i: tensors ``made_ptr[i]`` up to ``made_ptr[i + 1]``."""
        # Tensors are sorted by producer, so those of one op are adjacent.
        boundaries = np.arange(self.num_ops + 1)
        found = np.searchsorted(self.tensor_producer, boundaries, side="left")
        return _frozen(found.astype(np.int64))

    @cached_property
    def reader(self) -> LongArray:
        """Per entry of ``reads``: the op that reads."""
        return _frozen(np.repeat(np.arange(self.num_ops), np.diff(self.read_ptr)))

    @cached_property
    def user_ptr(self) -> LongArray:
        """Readers of tensor t: ops ``users[user_ptr[t]:user_ptr[t + 1]]``, ascending."""
        counts = np.bincount(self.reads, minlength=self.num_tensors)
        return _frozen(pointers(counts))

    @cached_property
    def users(self) -> IntArray:
        """Readers of all tensors, indexed by `user_ptr`."""
        return _frozen(self.reader[np.argsort(self.reads, kind="stable")].astype(np.int32))

    @cached_property
    def edges(self) -> tuple[IntArray, IntArray]:
        """Distinct (producer, reader) pairs of ops, sorted by reader, then producer."""
        producer = self.tensor_producer[self.reads].astype(np.int64)
        inner = producer >= 0
        # At least 1, since an empty graph would divide by zero.
        key = distinct(self.reader[inner] * max(self.num_ops, 1) + producer[inner])
        src, dst = key % max(self.num_ops, 1), key // max(self.num_ops, 1)
        return _frozen(src.astype(np.int32)), _frozen(dst.astype(np.int32))

    def reads_of(self, op: int) -> IntArray:
        """Tensors that ``op`` reads."""
        return self.reads[self.read_ptr[op] : self.read_ptr[op + 1]]

    def made_by(self, op: int) -> range:
        """Tensors that ``op`` makes."""
        return range(int(self.made_ptr[op]), int(self.made_ptr[op + 1]))

    def users_of(self, tensor: int) -> IntArray:
        """Ops that read ``tensor``."""
        return self.users[self.user_ptr[tensor] : self.user_ptr[tensor + 1]]

    # ── derived facts ────────────────────────────────────────────────────────────────────────

    @property
    def is_recorded(self) -> bool:
        """True if the ops were captured from a model, one by one."""
        return bool(self.meta.get("level") == "op")

    @cached_property
    def held_bytes(self) -> LongArray:
        """Per tensor: bytes of storage allocated for it; 0 for aliases."""
        return _frozen(np.where(self.alias_of >= 0, 0, self.tensor_bytes))

    @cached_property
    def is_held(self) -> BoolArray:
        """Per tensor: True if it is held until the end of the step."""
        return _frozen(np.isin(self.tensor_role, HELD_ROLES))

    @cached_property
    def works(self) -> BoolArray:
        """Per op: True if it takes device time: compute, memory traffic or a stated time."""
        # Published profiles state times without FLOPs.
        works = (self.flops > 0) | (self.bytes_touched > 0)
        for seconds in self.stated.op_s.values() if self.stated is not None else ():
            works = works | (seconds > 0)
        return _frozen(works)

    @cached_property
    def only_looks(self) -> BoolArray:
        """Per op: True for views: no work, no storage, no random numbers."""
        makes = np.zeros(self.num_ops, dtype=np.bool_)
        makes[self.tensor_producer[(self.tensor_producer >= 0) & (self.held_bytes > 0)]] = True
        return _frozen(~(self.works | makes | (self.rng_order >= 0) | (self.workspace_bytes > 0)))

    @cached_property
    def root_of(self) -> IntArray:
        """Per tensor: the end of its chain of aliases, which is the storage's owner."""
        root = np.where(self.alias_of >= 0, self.alias_of, np.arange(self.num_tensors))
        # Each round doubles the length of the chains that are followed.
        while not np.array_equal(further := root[root], root):
            root = further
        return _frozen(root.astype(np.int32))

    @cached_property
    def owner_op(self) -> IntArray:
        """Per tensor: the op on whose device it is made or stored; -1 if there is none.

        This is its producer; for tensors from before the step, the first op that reads any tensor
        of the same storage.
        """
        first = np.full(self.num_tensors, self.num_ops, dtype=np.int32)
        early = np.flatnonzero((self.tensor_producer < 0) & (np.diff(self.user_ptr) > 0))
        np.minimum.at(first, self.root_of[early], self.users[self.user_ptr[early]])
        first = np.where(first < self.num_ops, first, -1)[self.root_of]
        made = self.tensor_producer >= 0
        return _frozen(np.where(made, self.tensor_producer, first).astype(np.int32))

    def bytes_by_role(self) -> dict[str, int]:
        """Storage bytes by role, for tables."""
        sums = np.zeros(len(Role), dtype=np.int64)
        np.add.at(sums, self.tensor_role, self.held_bytes)
        return {role.name.lower(): int(sums[role]) for role in Role if sums[role]}

    def kind_of(self, op: int) -> str:
        """Name of the kind of ``op``."""
        return self.kinds[int(self.op_kind[op])]

    def module_of(self, op: int) -> str:
        """Module path of ``op``; empty if unknown."""
        index = int(self.op_module[op])
        return self.modules[index] if index >= 0 else ""

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of all data that can change a plan; equal across processes and machines."""
        digest = hashlib.sha256()
        for label, value in self._content():
            digest.update(label.encode())
            digest.update(value)
        return digest.hexdigest()

    def _content(self) -> Iterator[tuple[str, bytes]]:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "op_stream" and not value.any():
                continue  # graphs without further streams keep the hash that they always had
            if isinstance(value, np.ndarray):
                yield spec.name, _canonical_bytes(value)
            elif isinstance(value, tuple):
                # File names may hold bytes that are no UTF-8, which Python reads as surrogates.
                yield spec.name, "\0".join(value).encode(errors="surrogatepass")
        if self.stated is not None:
            for kind in sorted(self.stated.op_s):
                yield f"stated {kind}", _canonical_bytes(self.stated.op_s[kind])
            if self.stated.tensor_s is not None:
                yield "stated tensors", _canonical_bytes(self.stated.tensor_s)


def distinct(keys: LongArray) -> LongArray:
    """Return the distinct keys, ascending; on nearly sorted keys much faster than np.unique."""
    ascending = np.sort(keys, kind="stable")
    # The first key is prepended minus 1, so that it always counts as new.
    return ascending[np.diff(ascending, prepend=ascending[:1] - 1) > 0]


def read_table(
    reader: NDArray[Any], tensor: NDArray[Any], num_ops: int, num_tensors: int
) -> tuple[LongArray, IntArray]:
    """Return ``read_ptr`` and ``reads`` of the given reads, which may repeat in any order."""
    count = max(num_tensors, 1)
    key = distinct(reader.astype(np.int64) * count + tensor)
    return pointers(np.bincount(key // count, minlength=num_ops)), (key % count).astype(np.int32)


def _frozen(array: NDArray[_T]) -> NDArray[_T]:
    array.setflags(write=False)
    return array


def _canonical_bytes(array: NDArray[Any]) -> bytes:
    # Explicit width and byte order make hashes equal on all machines.
    wide = np.float64 if array.dtype.kind == "f" else np.int64
    return array.astype(np.dtype(wide).newbyteorder("<")).tobytes()
