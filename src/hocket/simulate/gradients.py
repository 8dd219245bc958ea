"""Time of a data-parallel step whose gradient exchange overlaps with compute.

Layers run forward, then backward in reverse order. The gradient of a layer can be sent once its
backward pass has ended, in slices. The layer's next forward pass waits for its own reduced gradient
or, if the end of a step is a barrier, for all of them. One channel sends the slices at the rate of
the all-reduce. Among ready slices it sends the one that was ready first (wait-free backpropagation,
Poseidon, ATC 2017) or the one whose layer runs first (P3, MLSys 2019). Steps are repeated until
they take the same time. O(steps · slices · log slices).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

_STEPS = 6
"""Number of simulated steps. Step times repeat by then, since a step waits only for the previous
one."""


@dataclass(frozen=True)
class LayerWork:
    """Compute time and gradient size of one layer."""

    forward_s: float
    backward_s: float
    gradient_bytes: int


@dataclass(frozen=True)
class GradientChannel:
    """Rate, overhead and latency of the all-reduce of gradients."""

    rate_bps: float
    """Bytes of gradients that are reduced per second."""
    slice_s: float = 0.0
    """Constant overhead per slice."""
    latency_s: float = 0.0
    """Seconds from the end of a slice on the channel until all replicas have its sum."""


@dataclass(frozen=True)
class GradientOrder:
    """Order in which gradients are sent, and what waits for them."""

    name: str
    by_priority: bool
    crosses: bool
    """True if a layer's next forward pass waits for its own gradients only."""
    overlaps: bool = True
    """True if gradients are sent before the backward pass has ended."""
    slice_bytes: float = inf


def step_s(layers: Sequence[LayerWork], channel: GradientChannel, how: GradientOrder) -> float:
    """Return the time per step when many steps follow each other."""
    return _Steps(layers, channel, how).repeated_s()


def lower_bound_s(layers: Sequence[LayerWork], channel: GradientChannel) -> float:
    """Return a lower bound of the step time: the larger of all compute and all transfers."""
    computes_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    travels_s = sum(layer.gradient_bytes for layer in layers) / channel.rate_bps
    return max(computes_s, travels_s)


class _Steps:
    """Simulation of compute and channel, each with its own clock."""

    def __init__(
        self, layers: Sequence[LayerWork], channel: GradientChannel, how: GradientOrder
    ) -> None:
        self.layers, self.channel, self.how = layers, channel, how
        self.arrives_s = [0.0] * len(layers)
        """Time at which the last slice of each layer is reduced."""
        self.waiting: list[tuple[float, int, int, float]] = []
        """Heaps of slices (key, number, layer, bytes): ready ones by order, future ones by ready
        time."""
        self.future: list[tuple[float, int, int, float]] = []
        self.free_s = 0.0
        self.number = 0
        self.num_left = [0] * len(layers)
        """Number of slices of each layer that are not sent yet."""

    def repeated_s(self) -> float:
        now_s, before_s = 0.0, 0.0
        # The first step has no predecessor; the last one shows the steady state.
        for _ in range(_STEPS):
            before_s, now_s = now_s, self._step(now_s)
        return now_s - before_s

    def _step(self, now_s: float) -> float:
        """Run a forward and a backward pass.

        Returns the end of the backward pass or, with a barrier, the time at which all gradients are
        reduced.
        """
        for index, layer in enumerate(self.layers):
            self._run_channel(now_s, needed=index)
            now_s = max(now_s, self.arrives_s[index]) + layer.forward_s
        gradients = []
        for index in reversed(range(len(self.layers))):
            now_s += self.layers[index].backward_s
            gradients.append((now_s, index))
        for ready_s, index in gradients:
            self._hand_in(ready_s if self.how.overlaps else now_s, index)
        if not self.how.crosses:
            self._run_channel(inf, needed=None)
            now_s = max(now_s, *self.arrives_s)
        return now_s

    def _hand_in(self, ready_s: float, index: int) -> None:
        rest = float(self.layers[index].gradient_bytes)
        # Until its slices are sent, the gradient counts as never arriving; without bytes it is
        # there already.
        self.arrives_s[index] = inf if rest else self.arrives_s[index]
        while rest > 0:
            size = min(rest, self.how.slice_bytes)
            rest -= size
            self.number += 1
            self.num_left[index] += 1
            heapq.heappush(self.future, (ready_s, self.number, index, size))

    def _run_channel(self, until_s: float, needed: int | None) -> None:
        """Send slices until a time, and longer until the gradient of ``needed`` is reduced."""
        while self.future or self.waiting:
            # The channel stops only before a slice that starts after the requested time.
            is_there = needed is not None and self.num_left[needed] == 0
            start_s = self.free_s
            if not self.waiting:
                start_s = max(start_s, self.future[0][0])
            if is_there and start_s > until_s:
                return
            while self.future and self.future[0][0] <= start_s:
                ready_s, number, index, size = heapq.heappop(self.future)
                order = float(index) if self.how.by_priority else ready_s
                heapq.heappush(self.waiting, (order, number, index, size))
            _, _, index, size = heapq.heappop(self.waiting)
            self.free_s = start_s + self.channel.slice_s + size / self.channel.rate_bps
            self.num_left[index] -= 1
            if self.num_left[index] == 0:
                self.arrives_s[index] = self.free_s + self.channel.latency_s
