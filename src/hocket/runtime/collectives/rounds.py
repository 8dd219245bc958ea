"""Planned trees by the point-to-point calls of another backend, for tensors on GPUs.

Sockets do not reach what a GPU holds; NCCL does. Each tree's share is cut into equal chunks, and in
round r a send of level l (sends that must come before it) moves chunk r - l: all sends of a round
are one batch, and what is reduced is added after it, in the order of the sends, so that a sum has
the same bits in every run. On a GPU nothing here waits: batches and sums are queued on a stream.
O(rounds · sends) calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch.futures import Future

from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import Collective, Communication
from hocket.runtime.collectives.layout import ranges_of
from hocket.runtime.collectives.plans import AgreedPlans
from hocket.simulate.collective import levels_of

_ROUND_S = 40e-6
"""What a round costs beside its bytes: a batch of sends, and the sums."""
_MAX_ROUND_CHUNKS = 64
_MAX_KEPT = 256


@dataclass(frozen=True)
class _RankSend:
    """A send of the plan that this rank takes part in."""

    number: int
    """Among all sends of the plan: all ranks call in this order."""
    level: int
    start: int
    stop: int
    peer: int
    is_mine: bool
    """Whether this rank sends; else it receives."""
    is_added: bool


class PlannedRounds:
    """One rank's part of a collective on messages of one size."""

    def __init__(
        self, section: Communication, rank: int, num_items: int, item_bytes: int, rate_bps: float
    ) -> None:
        number = {name: index for index, name in enumerate(section.ranks)}
        self._sends: list[_RankSend] = []
        count, self._num_levels = 0, 1
        ranges = ranges_of(section, num_items)
        for tree, (start, stop) in zip(section.trees, ranges, strict=True):
            for place, (level, send) in enumerate(levels_of(tree)):
                src, dst = number[send.src], number[send.dst]
                self._num_levels = max(self._num_levels, level + 1)
                if rank in (src, dst):
                    self._sends.append(
                        _RankSend(
                            count, level, start, stop, dst if rank == src else src,
                            is_mine=rank == src, is_added=place < len(tree.reduce),
                        )
                    )  # fmt: skip
                count += 1
        # A pipeline fills for all levels but one, and pays for each round.
        spent_s = num_items * item_bytes / rate_bps
        best = sqrt((self._num_levels - 1) * spent_s / _ROUND_S)
        self.num_chunks = min(max(round(best), 1), _MAX_ROUND_CHUNKS)

    def carry_out(self, data: torch.Tensor, group: Any) -> None:
        """Change flat ``data`` into the result by calls of ``group``, whose ranks all do this."""
        for turn in range(self._num_levels + self.num_chunks - 1):
            calls, sums = [], []
            for send in self._sends:
                part = self._chunk(data, send, turn - send.level)
                if part is None:
                    continue
                if send.is_added and not send.is_mine:
                    arrived = torch.empty_like(part)
                    sums.append((part, arrived))
                    part = arrived
                calls.append((send, part))
            _exchange(group, data.device, calls)
            for part, arrived in sums:
                part += arrived

    def _chunk(self, data: torch.Tensor, send: _RankSend, chunk: int) -> torch.Tensor | None:
        if not 0 <= chunk < self.num_chunks:
            return None
        size = send.stop - send.start
        first, last = (send.start + size * n // self.num_chunks for n in (chunk, chunk + 1))
        return data[first:last] if first < last else None


def _exchange(
    group: Any, device: torch.device, calls: Sequence[tuple[_RankSend, torch.Tensor]]
) -> None:
    """All sends and receives of a round at once."""
    if not calls:
        return
    is_one = bool(group._get_backend(device).supports_coalescing)
    if is_one:
        group._start_coalescing(device)
    works = [
        (group.send if send.is_mine else group.recv)([part], send.peer, send.number)
        for send, part in calls
    ]
    for work in [group._end_coalescing(device)] if is_one else works:
        work.wait()


class RoundsQueue:
    """Planned collectives on tensors of a GPU, queued on a stream beside that of the caller."""

    def __init__(self, group: Any, store: Any, cluster: Cluster) -> None:
        """All that is sent goes by ``send`` and ``recv`` of ``group``."""
        self._group = group
        self._plans = AgreedPlans(store, group.rank(), cluster, group.size(), "rounds")
        self._known: dict[tuple[object, ...], PlannedRounds] = {}
        self._streams: dict[torch.device, Any] = {}

    def put(
        self, collective: Collective, root: int, outputs: Sequence[torch.Tensor],
        take: Callable[[], torch.Tensor], give: Callable[[torch.Tensor], None],
    ) -> Any:  # fmt: skip
        """Queue a collective on what ``take`` copies; the future comes with what ``give`` wrote."""
        device = outputs[0].device
        is_gpu = device.type != "cpu"
        future: Any = Future(devices=[device] if is_gpu else None)
        with torch.no_grad():
            data = take()
            rounds = self._rounds(collective, root, data)
            with self._beside((data, *outputs)) if is_gpu else contextlib.nullcontext():
                rounds.carry_out(data, self._group)
                give(data)
                future.set_result(list(outputs))
        return future

    def _rounds(self, collective: Collective, root: int, data: torch.Tensor) -> PlannedRounds:
        key = (collective, root, data.numel(), data.dtype)
        if key not in self._known:
            if not self._known:
                # Communicators are made by a call of all ranks, and not all send in a first round.
                self._group._get_backend(data.device).allreduce([data.new_ones(1)]).wait()
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            plan = self._plans.plan(collective, root, data.nbytes)
            self._known[key] = PlannedRounds(
                plan.section, self._group.rank(), data.numel(), data.element_size(), plan.rate_bps
            )
        return self._known[key]

    @contextlib.contextmanager
    def _beside(self, used: Sequence[torch.Tensor]) -> Any:
        """What is queued inside runs after what the caller has queued, and beside what follows."""
        device = used[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        for tensor in used:
            tensor.record_stream(stream)
