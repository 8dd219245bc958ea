"""Products of experts written group by group: each is fetched, multiplied and released.

Groups take turns in a ring of the device. What a product makes is whole; what is made of the
parameter alone exists for one group. The gradient of a group goes to the host as soon as it is
made, and at most one goes while the next one is made. O(products · groups).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.graph import Phase, Stream
from hocket.simulate.rewriting.emit import Emitter
from hocket.simulate.rewriting.experts import BatchedExperts
from hocket.simulate.rewriting.host_parameters import NUM_TURNS, HostParameters
from hocket.simulate.rewriting.uses import Uses


class GroupWriter:
    """Writes the ops of experts that are streamed in groups."""

    def __init__(self, out: Emitter, uses: Uses, host: HostParameters) -> None:
        self._out, self._graph, self._groups = out, uses.graph, host.groups
        chosen = [uses.experts[root] for root in host.groups]
        self._products = {op: each for each in chosen for op in each.turned}
        self._makers = {each.maker: each for each in chosen if each.maker >= 0}
        self._aside = sorted({op for each in chosen for op in each.aside})
        self._ring: list[int] = []
        """Control tensors: previous groups have been used."""
        self._sent: list[int] = []
        """Control tensors: gradients of previous groups are on the host."""
        self.landed: dict[int, list[int]] = {}
        """Parameters to the control tensors of their gradients' copies, group by group."""
        self._coming = host.copied.copy()
        for root, count in self._groups.items():
            self._coming[root] = -(-self._coming[root] // count)

    def others(self, ops: LongArray) -> LongArray:
        """Ops without those that are written with a product and not by themselves."""
        return ops[~np.isin(ops, self._aside)] if self._aside else ops

    def has(self, op: int) -> bool:
        """True if an op is written in groups."""
        return op in self._products or op in self._makers

    def write(self, op: int, *, buffer: Iterable[int], suffix: str, is_recompute: bool) -> None:
        """An op in groups."""
        if op in self._makers:
            self._write_gradient(self._makers[op])
        else:
            self._write_product(
                op, self._products[op], list(buffer), suffix, is_recompute=is_recompute
            )

    def _write_product(
        self,
        op: int,
        experts: BatchedExperts,
        buffer: list[int],
        suffix: str,
        *,
        is_recompute: bool,
    ) -> None:
        out, count = self._out, self._groups[experts.root]
        is_forward = self._graph.op_phase[op] == Phase.FORWARD and not is_recompute
        phase = Phase.FORWARD if is_forward else Phase.BACKWARD
        whole = {int(self._graph.root_of[t]) for t in self._graph.made_by(op)}
        for number in range(count):
            out.fetch(
                f"{self._graph.op_names[op]}@experts{number}{suffix}", [experts.root],
                self._coming, reads=[*buffer, *self._place_left()],
                beside=op, phase=phase, is_held=False,
            )  # fmt: skip
            for turn in experts.turned[op]:
                out.part(
                    turn, 0, count, (), suffix=f"@{op}.{number}{suffix}", is_recompute=is_recompute
                )
            new = out.part(
                op, number, count, whole, suffix=f"@{number}{suffix}", is_recompute=is_recompute
            )
            self._ring = [*self._ring[-NUM_TURNS + 1 :], out.columns.signal(new)]
        out.forget([experts.root])

    def _place_left(self) -> list[int]:
        """Control tensors to wait for until the ring has a free place for another group."""
        return self._ring[:1] if len(self._ring) == NUM_TURNS else []

    def _write_gradient(self, experts: BatchedExperts) -> None:
        out, graph, count = self._out, self._graph, self._groups[experts.root]
        maker = experts.maker
        last = experts.gradient[-1] if experts.gradient else maker
        gradient = max(graph.made_by(last), key=lambda t: int(graph.tensor_bytes[t]))
        size = -(-int(graph.tensor_bytes[gradient]) // count)
        for number in range(count):
            out.wait(self._sent[:1] if len(self._sent) == 2 else [])
            out.part(maker, 0, count, (), suffix=f"@{number}")
            for turn in experts.gradient:
                out.part(turn, 0, count, (), suffix=f"@{number}")
            signal = out.copy(
                f"{graph.op_names[maker]}@gradients:{number}", Stream.COPY_OUT, size,
                reads=[int(out.now[gradient])], beside=maker,
            )  # fmt: skip
            self._sent = [*self._sent[-1:], signal]
            self.landed.setdefault(experts.root, []).append(signal)
