"""What the ranks of a pipeline send to each other: the tensors of one segment in one message.

Between two ranks messages arrive in the order in which they were sent. Both sides know the schedule
of both, so a receiver takes what comes before the message that it waits for and keeps it. Sending
never waits: what is on its way is kept until it has gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hocket.runtime.train.divided.stages import Segment


class SegmentMessage(NamedTuple):
    """What a segment made of one microbatch, for one rank."""

    segment: Segment
    microbatch: int


class Channels:
    """Messages between this rank of a pipeline and the others."""

    def __init__(
        self, ranks: Sequence[int], own: int, device: torch.device, groups: tuple[Any, Any]
    ) -> None:
        """``ranks`` are the global ones of this pipeline, ``own`` is a position in them.

        Each direction has a group of its own, since NCCL finishes the messages of two ranks in a
        group one by one: both would wait for the other to receive.
        """
        self._ranks, self.own, self._device, self._groups = list(ranks), own, device, groups
        self._expected: dict[int, deque[tuple[SegmentMessage, int]]] = {}
        self._arrived: dict[tuple[int, SegmentMessage], torch.Tensor] = {}
        self.waited_s = 0.0
        """In which messages were waited for."""
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def expect(self, src: int, messages: Sequence[tuple[SegmentMessage, int]]) -> None:
        """What will come from a position in one step, in order, with its bytes."""
        self._expected[src] = deque(messages)

    def send(self, dst: int, data: torch.Tensor) -> None:
        """Start to send bytes."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        group = self._groups[self.own < dst]
        self._sent.append((dist.isend(data, self._ranks[dst], group=group), data))

    def receive(self, src: int, wanted: SegmentMessage) -> torch.Tensor:
        """The bytes of a message; waits until it is there."""
        while (src, wanted) not in self._arrived:
            message, num_bytes = self._expected[src].popleft()
            self._arrived[src, message] = self.receive_now(src, num_bytes)
        return self._arrived.pop((src, wanted))

    def receive_now(self, src: int, num_bytes: int) -> torch.Tensor:
        """The next bytes of a position, outside the schedule of a step."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        began_s = time.perf_counter()
        dist.recv(data, self._ranks[src], group=self._groups[src < self.own])
        self.waited_s += time.perf_counter() - began_s
        return data

    def settle(self) -> None:
        """Wait until everything has gone."""
        while self._sent:
            self._sent.popleft()[0].wait()
