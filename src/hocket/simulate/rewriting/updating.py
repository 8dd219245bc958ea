"""The updates of a rewritten step: where the optimizer changes the parameters of each block.

A block is updated when the backward pass has left its visits, and its gradients are held until
then: on the device they are given up together, those that are on their way to the host, or that an
update beside the computation reads, when the next block's are ready. Parameters that are no block's
own are updated at the end of the step. O(ops + reads).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.base.arrays import LongArray, spans
from hocket.graph.graph import Phase, Stream
from hocket.simulate.rewriting.emit import Emitter
from hocket.simulate.rewriting.groups import GroupWriter
from hocket.simulate.rewriting.homes import NUM_BERTHS, ParameterHomes, num_parts
from hocket.simulate.rewriting.uses import Uses

_NONE: LongArray = np.zeros(0, dtype=np.int64)


class UpdateWriter:
    """Writes updates of blocks as their gradients are whole."""

    def __init__(
        self, uses: Uses, homes: ParameterHomes, groups: GroupWriter, out: Emitter,
        done: dict[tuple[str, int], int],
    ) -> None:  # fmt: skip
        """``done`` are control tensors of the last ops of the passes of blocks."""
        self._graph, self._names, self._updates = uses.graph, uses.blocks.names, uses.updates
        self._homes, self._groups, self._out, self._done = homes, groups, out, done
        self._asked: list[list[int]] = [list(ops) for ops in homes.updates]
        """Per block: updates that are still to be made."""
        self.berths: list[int] = []
        """What stands for the room of state that comes to the device."""
        self._sent: tuple[LongArray, list[int]] = _NONE, []
        """Gradients that are on their way to the host, and what tells that they are there."""
        self._used: tuple[LongArray, list[int]] = _NONE, []
        """Likewise gradients that are read beside the computation."""
        self._visitors: list[tuple[list[int], int]] = []
        """Pieces of state, and their blocks, that are still to come to the device."""
        self._left: list[int] = []
        """Control tensors of the pieces of state that last went home."""
        self._changed: list[int] = []
        """What tells that the last piece of a block is changed."""

    def finish(self, block: int) -> None:
        """The backward pass has left a block."""
        self._asked[block] = self._update(self._asked[block], block)

    def finish_step(self) -> None:
        """The backward pass is over: what is no block's own is updated, or waited for gradients of
        others, and what has come to the device goes home."""
        for block in reversed(range(len(self._asked))):
            self.finish(block)
        self._update(self._homes.last_updates, 0, "shared")
        self.visit()
        self._give_up(self._sent)
        self._give_up(self._used)

    def _update(self, ops: list[int], block: int, how: str = "") -> list[int]:
        """Updates whose gradients are there; returns the others."""
        if not ops:
            return []
        has_all = self._have_gradients(np.array(ops))
        ready = {op for op, is_ready in zip(ops, has_all, strict=True) if is_ready}
        pieces = [piece for piece in self._homes.visits.get(block, ()) if piece[0] in ready]
        visiting = {op for piece in pieces for op in piece}
        on_host = [op for op in ops if op in ready and op in self._homes.host_updates]
        here = [op for op in ops if op in ready.difference(on_host, visiting)]
        gradients = self._gradients(here)
        self._out.run(here)
        self._out.hold(gradients)
        if pieces:
            self._visitors += [(piece, block) for piece in pieces]
            gradients = self._gradients(visiting)
            self._give_up(self._used)
            self.visit(NUM_BERTHS)
            self._used = gradients, self._changed
        if on_host:
            self._update_on_host(on_host, block, how)
        return [op for op in ops if op not in ready]

    def _give_up(self, lent: tuple[LongArray, list[int]]) -> None:
        """What is read beside the computation gives up its room once that is over."""
        tensors, told = lent
        self._out.hold(tensors)
        self._out.wait(told)

    def _gradients(self, ops: Sequence[int] | set[int]) -> LongArray:
        """What stands for the gradients that updates read."""
        found = [t for op in ops for t in self._updates[op].gradients]
        return self._out.now[np.array(found, dtype=np.int64)]

    def _have_gradients(self, ops: LongArray) -> list[bool]:
        """Of each update, whether all that it reads is there or at home."""
        graph = self._graph
        at, reader = spans(graph.read_ptr, ops)
        reads = graph.reads[at]
        is_missing = ~(self._out.has(reads) | self._homes.is_on_host[graph.root_of[reads]])
        have: list[bool] = (np.bincount(reader[is_missing], minlength=len(ops)) == 0).tolist()
        return have

    # ── beside the computation ───────────────────────────────────────────────────────────────────

    def visit(self, most: int | None = None) -> None:
        """Updates of the next pieces of state that come to the device, or of all."""
        most = len(self._visitors) if most is None else most
        for piece, block in self._visitors[:most]:
            self._update_visitor(piece, block)
        del self._visitors[:most]

    def _update_visitor(self, ops: list[int], block: int) -> None:
        """State and parameters in full come in a piece, when an earlier one has left its berth, are
        changed beside the computation, and go home, rounded parameters with their twin. One large
        parameter goes in parts."""
        visiting = list(dict.fromkeys(t for op in ops for t in self._at_home(op)))
        count = num_parts([self._updates[op] for op in ops])
        for number in range(count):
            self._update_part(ops, block, visiting, number, count)

    def _update_part(
        self, ops: list[int], block: int, visiting: list[int], number: int, count: int
    ) -> None:
        graph, name = self._graph, self._graph.op_names[ops[0]]
        part = f":{number}" if count > 1 else ""
        told = self._done.get(("backward", block + 1))
        waits = self.berths + ([] if told is None else [told])
        # There is room when an earlier piece has left.
        waits += self._left[:1] if len(self._left) == NUM_BERTHS else []
        here = self._out.fetch(
            f"{name}@fetch{part}", visiting, -(-graph.tensor_bytes // count), reads=waits,
            beside=ops[0], phase=Phase.OPTIMIZER, is_held=False,
        )  # fmt: skip
        changed = self._out.beside(ops, number, count)
        whole, copied = graph.tensor_bytes[visiting], self._homes.copied[visiting]
        size = int((whole + np.where(copied < whole, copied, 0)).sum())
        self._changed = changed[-1:]
        left = self._out.copy(
            f"{name}@return{part}", Stream.COPY_OUT, -(-size // count), reads=[*changed, *here],
            beside=ops[0],
        )  # fmt: skip
        self._left = [*self._left[1 - NUM_BERTHS :], left]
        self._out.forget(visiting)

    def _at_home(self, op: int) -> list[int]:
        """What an update reads that is at home on the host."""
        reads = self._graph.reads_of(op)
        found: list[int] = reads[self._homes.is_on_host[self._graph.root_of[reads]]].tolist()
        return found

    # ── on the host ──────────────────────────────────────────────────────────────────────────────

    def _update_on_host(self, ops: list[int], block: int, how: str) -> None:
        updates, landed = [self._updates[op] for op in ops], self._groups.landed
        whole = [u for u in updates if not any(root in landed for root in u.roots)]
        leaving = self._gradients([u.op for u in whole])
        sent = [told for u in updates for root in u.roots for told in landed.get(root, ())]
        self._give_up(self._sent)
        if len(leaving):
            sent.append(self._out.copy(
                f"{self._names[block]}@gradients" + (f":{how}" if how else ""), Stream.COPY_OUT,
                sum(u.sent_bytes for u in whole), reads=leaving.tolist(), beside=ops[0],
            ))  # fmt: skip
        self._sent = leaving, sent
        self._out.at_home(ops, sent, np.array([u.host_bytes for u in updates]))
