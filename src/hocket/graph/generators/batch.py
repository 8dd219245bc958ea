"""Build a Graph from arrays of ops: a `GraphBuilder` for a million of them.

Each call adds one kind of op for all layers, steps or blocks at once, with the position of each op
in the step. O(ops log ops + reads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import positions
from hocket.graph.build import OpColumns, TensorColumns, assemble
from hocket.graph.graph import Graph, Phase, Role

Numbers = NDArray[np.integer[Any]]
"""Array of op, tensor or block numbers."""


@dataclass
class _Columns:
    """Chunks of columns, concatenated at the end."""

    count: int = 0
    names: list[str] = field(default_factory=list)
    chunks: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, names: Sequence[str], **values: Any) -> Numbers:
        """Append one entry per name, broadcasting values; returns the numbers of the entries."""
        first, self.count = self.count, self.count + len(names)
        self.names.extend(names)
        for key, value in values.items():
            self.chunks.setdefault(key, []).append(np.broadcast_to(value, len(names)))
        return np.arange(first, self.count, dtype=np.int32)

    def joined(self, key: str) -> Any:
        """Return a complete column."""
        return np.concatenate(self.chunks[key]) if self.count else np.empty(0, dtype=np.int64)


@dataclass
class BatchBuilder:
    """Collects arrays of ops, tensors and reads."""

    name: str
    _ops: _Columns = field(default_factory=_Columns)
    _tensors: _Columns = field(default_factory=_Columns)
    _kinds: list[str] = field(default_factory=list)
    _modules: list[str] = field(default_factory=list)
    _readers: list[Numbers] = field(default_factory=list)
    _read: list[Numbers] = field(default_factory=list)

    @property
    def num_tensors(self) -> int:
        """Number of tensors so far, which is the number of the next tensor."""
        return self._tensors.count

    def ops(
        self,
        names: Sequence[str],
        kind: str,
        *,
        position: Any,
        phase: Phase = Phase.FORWARD,
        flops: Any = 0.0,
        partner: Any = -1,
        modules: Sequence[str] = (),
    ) -> Numbers:
        """Add ops that run at the given positions of the step and return their numbers."""
        self._kinds.extend([kind] * len(names))
        self._modules.extend(modules or [""] * len(names))
        return self._ops.add(names, position=position, phase=phase, flops=flops, partner=partner)

    def tensors(
        self,
        names: Sequence[str],
        size_bytes: Any,
        *,
        producer: Any = -1,
        role: Role = Role.ACTIVATION,
        alias_of: Any = -1,
    ) -> Numbers:
        """Add tensors and return their numbers."""
        return self._tensors.add(
            names, bytes=size_bytes, producer=producer, role=role, alias_of=alias_of
        )

    def reads(self, ops: Numbers, tensors: Numbers) -> None:
        """Add reads: each op reads the tensor at the same index of the other array."""
        self._readers.append(ops)
        self._read.append(tensors)

    def build(self, meta: dict[str, Any]) -> Graph:
        """Return the finished, verified graph; an op touches the bytes that it reads and makes."""
        num_ops = self._ops.count
        order = np.argsort(self._ops.joined("position"), kind="stable")
        rank = positions(order).astype(np.int32)
        size_bytes = self._tensors.joined("bytes")
        made_by = self._tensors.joined("producer")
        producer = np.where(made_by >= 0, rank[made_by], -1)
        reader, read = rank[np.concatenate(self._readers)], np.concatenate(self._read)
        touched = _sums(reader, size_bytes[read], num_ops)
        touched += _sums(producer[producer >= 0], size_bytes[producer >= 0], num_ops)
        partner = self._ops.joined("partner")[order]
        by_reader = np.argsort(reader, kind="stable")
        places = order.tolist()
        return assemble(
            self.name,
            OpColumns(
                name=[self._ops.names[i] for i in places],
                kind=[self._kinds[i] for i in places],
                module=[self._modules[i] for i in places] if any(self._modules) else (),
                phase=self._ops.joined("phase")[order],
                flops=self._ops.joined("flops")[order],
                partner=np.where(partner >= 0, rank[partner], -1),
                bytes_touched=touched,
            ),
            TensorColumns(
                name=self._tensors.names,
                bytes=size_bytes,
                producer=producer,
                role=self._tensors.joined("role"),
                alias_of=self._tensors.joined("alias_of"),
            ),
            np.searchsorted(reader[by_reader], np.arange(num_ops + 1)),
            read[by_reader],
            meta=meta,
        )


def _sums(index: Any, values: Any, count: int) -> Any:
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, index, values)
    return sums
