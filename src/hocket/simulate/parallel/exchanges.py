"""Exchanges that begin when all who take part are ready, many of them added at once.

An exchange is one op on the communication stream of each device, which waits until the others have
what is exchanged as well: a short op says so, and all read what all say. O(exchanges x devices).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.graph import Phase, Role, Stream
from hocket.simulate.parallel.graph_builder import StepBuilder


@dataclass(frozen=True)
class JoinedNames:
    """Names of exchanges on devices, with a label behind each; made only where wanted."""

    names: tuple[str, ...]
    labels: tuple[str, ...]
    suffix: str

    def __len__(self) -> int:
        return len(self.names) * len(self.labels)

    def __iter__(self) -> Iterator[str]:
        return (f"{name}{label}{self.suffix}" for name in self.names for label in self.labels)


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Exchanges between the same parties, in columns ``[exchange, party]``."""

    names: tuple[str, ...]
    labels: tuple[str, ...]
    """Of the parties."""
    devices: IntArray
    ready_priority: FloatArray
    priority: FloatArray
    seconds: FloatArray
    """``[exchange]``: it takes all of them the same."""
    sent_bytes: LongArray
    """``[exchange]``: bytes that each party sends, reported as the bytes that its op touches."""


def all_reduced_bytes(size_bytes: LongArray, num_parties: int) -> LongArray:
    """Bytes that each party of an all-reduce sends, in a ring or, on average, along trees."""
    return 2 * size_bytes * (num_parties - 1) // num_parties


def exchange_all(
    builder: StepBuilder,
    kind: str,
    exchanges: Exchanges,
    waiting: tuple[IntArray, LongArray],
    num_kinds: int,
    **columns: Any,
) -> IntArray:
    """Add exchanges; their ops, ``[exchange, party]``.

    ``waiting`` are tensors that have to be there before, and for each the flat number of the
    exchange and party that waits for it.
    """
    shape = exchanges.devices.shape
    count, num_parties = exchanges.devices.size, shape[1]
    common: dict[str, Any] = {
        "kind": builder.kind(kind), "phase": Phase.BACKWARD, "stream": Stream.COMMUNICATION,
        "device": exchanges.devices.ravel(),
    }  # fmt: skip

    def named(suffix: str) -> JoinedNames:
        return JoinedNames(exchanges.names, exchanges.labels, suffix)

    ready = builder.add_ops(
        named("/ready"), np.zeros((num_kinds, count)), priority=exchanges.ready_priority.ravel(),
        **common,
    )  # fmt: skip
    tensors, at = waiting
    builder.add_reads(ready[at], tensors)
    signal = builder.add_tensors(named("#ready"), role=Role.CONTROL, producer=ready)
    ops = builder.add_ops(
        named(""), np.tile(np.repeat(exchanges.seconds, num_parties), (num_kinds, 1)),
        priority=exchanges.priority.ravel(),
        bytes_touched=np.repeat(exchanges.sent_bytes, num_parties), **common, **columns,
    )  # fmt: skip
    # Every party of an exchange reads what all of them say.
    all_signals = np.repeat(signal.reshape(shape), num_parties, axis=0).ravel()
    builder.add_reads(np.repeat(ops, num_parties), all_signals)
    found: IntArray = ops.reshape(shape)
    return found
