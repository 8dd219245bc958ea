"""Collectives in an expanded graph, which start when all participants are ready.

A collective is one op on each device, usually on its communication stream. A short "ready" op per
device signals that its input exists, and every device's collective reads all signals.
O(collectives x devices).
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
    """Names of collectives on devices, ``name + label + suffix``, made only when they are read."""

    names: tuple[str, ...]
    labels: tuple[str, ...]
    suffix: str

    def __len__(self) -> int:
        return len(self.names) * len(self.labels)

    def __iter__(self) -> Iterator[str]:
        return (f"{name}{label}{self.suffix}" for name in self.names for label in self.labels)


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Collectives of the same participants, in columns ``[collective, participant]``."""

    names: tuple[str, ...]
    labels: tuple[str, ...]
    """Label of each participant."""
    devices: IntArray
    ready_priority: FloatArray
    priority: FloatArray
    seconds: FloatArray
    """``[collective]``: duration, equal for all participants."""
    sent_bytes: LongArray
    """``[collective]``: bytes that each participant sends, reported as the bytes that its op
    touches."""


def all_reduced_bytes(size_bytes: LongArray, num_parties: int) -> LongArray:
    """Return the bytes that each participant of an all-reduce sends, on average."""
    return 2 * size_bytes * (num_parties - 1) // num_parties


def exchange_all(
    builder: StepBuilder,
    kind: str,
    exchanges: Exchanges,
    waiting: tuple[IntArray, LongArray],
    num_kinds: int,
    *,
    stream: Stream = Stream.COMMUNICATION,
    **columns: Any,
) -> IntArray:
    """Add collectives and return their ops, ``[collective, participant]``.

    ``waiting`` are tensors that must exist before, and for each the position, in the flattened
    array of collectives and participants, of the op that waits for it. Devices run the collectives
    on ``stream``.
    """
    shape = exchanges.devices.shape
    count, num_parties = exchanges.devices.size, shape[1]
    common: dict[str, Any] = {
        "kind": builder.kind(kind), "phase": Phase.BACKWARD, "stream": stream,
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
    # Every participant waits for the signals of all, as in a real collective.
    all_signals = np.repeat(signal.reshape(shape), num_parties, axis=0).ravel()
    builder.add_reads(np.repeat(ops, num_parties), all_signals)
    found: IntArray = ops.reshape(shape)
    return found
