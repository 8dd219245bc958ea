"""Recompute in a traced step: blocks run a second time for their backward pass.

Recompute (Chen et al. 2016, sublinear memory) is a rewrite of the program. Forward calls of a block
are inserted a second time right before the first backward call that needs their results, and
backward calls read the results of this second run. Results of the first run are dropped after their
last forward use, like any other tensor. The recomputed calls are those of the simulator
(`second_run`), without collectives and without calls whose inputs have been overwritten since. The
second run of a batch norm writes to copies of its running statistics, so that they change once per
step. O(calls).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from hocket.base.arrays import IntArray
from hocket.capture.assemble import graph_of
from hocket.capture.perform import generator_of
from hocket.capture.program import Call, Program, TensorSpec
from hocket.capture.recording import Cost, Ref, Returned, map_tree
from hocket.graph.graph import Graph, Phase, Role
from hocket.simulate.parallel.recompute_and_host import SecondRun, second_run_of

RecomputedBlocks = Callable[[Graph, Program], IntArray]
"""Returns the block of each forward op of a traced step to recompute; -1 for no recompute."""
_NORMS = "batch_norm"
_COLLECTIVE = "_c10d_functional."


def with_recompute(graph: Graph, program: Program, block_of: IntArray) -> tuple[Graph, Program]:
    """Rewrite a step so that blocks are recomputed; ``block_of`` is read for forward ops only."""
    found = second_run_of(graph, block_of)
    again = _repeatable(program, found)
    if not again:
        return graph, program
    written = _Rewriting(program, found, again).written()
    return graph_of(written, graph.name, graph.meta), written


# ── what may run again ───────────────────────────────────────────────────────────────────────────


def _repeatable(program: Program, found: SecondRun) -> frozenset[int]:
    """Return the calls whose second run gives the same results as the first."""
    maker = _makers(program)
    last_write = _last_writes(program)
    again = {op for op in found.ops.tolist() if not _is_exchange(program.calls[op])}
    while True:
        fresh = {storage for storage, op in maker.items() if op in again}
        wrong = {op for op in again if not _is_faithful(program, op, fresh, last_write)}
        # If a call is not repeated, the memory that it writes in place lacks this write, so the
        # call that allocates that memory cannot be repeated either.
        for op in wrong:
            stale = {program.tensors[t].storage for t in program.calls[op].targets}
            wrong = wrong | {maker[storage] for storage in stale & fresh}
        if not wrong:
            return frozenset(again)
        again -= wrong


def _is_faithful(program: Program, op: int, fresh: set[int], last_write: dict[int, int]) -> bool:
    call, specs = program.calls[op], program.tensors
    if _is_norm(call):
        # In training mode a batch norm writes running statistics without reading them.
        targets = {specs[t].storage for t in call.targets}
    elif any(specs[t].storage not in fresh for t in call.targets):
        return False
    else:
        targets = set()
    read = {specs[t].storage for t in call.reads} - fresh - targets
    return all(last_write.get(storage, -1) < op for storage in read)


def _is_norm(call: Call) -> bool:
    return _NORMS in call.cost.kind and bool(call.targets)


def _is_exchange(call: Call) -> bool:
    return call.cost.kind.startswith(_COLLECTIVE)


def _makers(program: Program) -> dict[int, int]:
    """Map each storage of the step to the call that allocates it."""
    return {
        spec.storage: spec.producer
        for spec in program.tensors
        if spec.storage >= 0 and spec.alias_of < 0 and spec.producer >= 0
    }


def _last_writes(program: Program) -> dict[int, int]:
    """Return the last call, except optimizer calls, that writes to each storage in place."""
    return {
        program.tensors[target].storage: op
        for op, call in enumerate(program.calls)
        if call.phase != Phase.OPTIMIZER
        for target in call.targets
    }


# ── the program with second runs ─────────────────────────────────────────────────────────────────


class _Rewriting:
    """Writes the calls of the rewritten program, with second runs inserted."""

    def __init__(self, program: Program, found: SecondRun, again: frozenset[int]) -> None:
        self._old, self._block_of = program, found.block_of.tolist()
        self._made: dict[int, list[int]] = {}
        for number, spec in enumerate(program.tensors):
            self._made.setdefault(spec.producer, []).append(number)
        self._before: dict[int, list[int]] = {}
        for op, first in zip(found.ops.tolist(), found.before.tolist(), strict=True):
            if op in again:
                self._before.setdefault(first, []).append(op)
        self._storages = 1 + max(spec.storage for spec in program.tensors)
        self._calls: list[Call] = []
        self._tensors: list[TensorSpec] = []
        self._first: dict[int, int] = {}
        """New number of each tensor of the old program."""
        self._second: dict[int, int] = {}
        """New number of the second run's result for each recomputed tensor."""
        self._op: dict[int, int] = {}
        self._repeats: dict[int, int] = {}

    def written(self) -> Program:
        old = self._old
        for tensor in self._made.get(-1, ()):
            self._first[tensor] = self._add(old.tensors[tensor]._replace(alias_of=-1))
        for tensor in self._made.get(-1, ()):
            alias = old.tensors[tensor].alias_of
            if alias >= 0:
                at = self._first[tensor]
                self._tensors[at] = self._tensors[at]._replace(alias_of=self._first[alias])
        for op in range(len(old.calls)):
            for repeated in self._before.get(op, ()):
                self._write(repeated, again=True)
            self._write(op)
        first = self._first
        return replace(
            old,
            calls=tuple(self._calls),
            tensors=tuple(self._tensors),
            names={first[tensor]: name for tensor, name in old.names.items()},
            gradients={first[p]: first[gradient] for p, gradient in old.gradients.items()},
            outputs=tuple(first[tensor] for tensor in old.outputs),
            returned=_renumbered(old.returned, first),
            repeats=self._repeats,
        )

    def _write(self, op: int, *, again: bool = False) -> None:
        """Append a call, or with ``again`` its second run as a call of the backward pass."""
        call = self._old.calls[op]
        known = self._known(op, call)
        if again and _is_norm(call):
            known |= self._copied(call, known)
        index, made = len(self._calls), dict[int, int]()
        for tensor in self._made.get(op, ()):
            spec = self._spec(tensor, known, index)
            if again:
                # A tensor of a second run never outlives the step.
                role = spec.role if spec.role == Role.CONTROL else Role.ACTIVATION
                is_new = spec.alias_of < 0 and spec.storage >= 0
                storage = self._new_storage() if is_new else spec.storage
                spec = spec._replace(role=role, storage=storage)
            made[tensor] = self._add(spec)
            (self._second if again else self._first)[tensor] = made[tensor]
        written = _with_tensors(call, known | made)
        if again:
            self._repeats[index] = self._op[op]
            written = written._replace(phase=Phase.BACKWARD, partner=self._op[op])
        else:
            self._op[op] = index
            written = written._replace(partner=self._op.get(call.partner, -1))
        self._calls.append(written)

    def _copied(self, call: Call, known: dict[int, int]) -> dict[int, int]:
        """Add copies of tensors that a second run must not write to."""
        found = {}
        for target in call.targets:
            layout = self._tensors[known[target]].layout
            assert layout is not None
            size = layout.size_bytes
            spec = TensorSpec(
                layout._replace(offset=0), self._new_storage(), size, Role.ACTIVATION, -1,
                len(self._calls),
            )  # fmt: skip
            found[target] = self._add(spec)
            cost = Cost("aten.clone", "", call.cost.dtype, 0.0, 2 * size)
            clone = Call(
                torch.ops.aten.clone.default, (Ref(known[target]),), {}, (found[target],),
                (), (), (known[target],), Phase.BACKWARD, call.module, -1, False, False, cost,
            )  # fmt: skip
            self._calls.append(clone)
        return found

    def _known(self, op: int, call: Call) -> dict[int, int]:
        """Return the new number of each tensor that a call reads or returns."""
        used = {*call.reads, *call.targets, *(t for t in call.outputs if t is not None)}
        return {tensor: self._seen(op, tensor) for tensor in used if tensor in self._first}

    def _seen(self, op: int, tensor: int) -> int:
        maker = self._old.tensors[tensor].producer
        is_own = maker >= 0 and self._block_of[maker] == self._block_of[op]
        return self._second.get(tensor, self._first[tensor]) if is_own else self._first[tensor]

    def _spec(self, tensor: int, known: dict[int, int], producer: int) -> TensorSpec:
        spec = self._old.tensors[tensor]
        if spec.alias_of < 0:
            return spec._replace(producer=producer)
        base = known[spec.alias_of]
        storage = self._tensors[base].storage
        return spec._replace(alias_of=base, storage=storage, producer=producer)

    def _add(self, spec: TensorSpec) -> int:
        self._tensors.append(spec)
        return len(self._tensors) - 1

    def _new_storage(self) -> int:
        self._storages += 1
        return self._storages - 1


def _with_tensors(call: Call, number: dict[int, int]) -> Call:
    def change(leaf: Any) -> Any:
        return Ref(number[leaf.number]) if isinstance(leaf, Ref) else leaf

    def each(tensors: Iterable[int]) -> tuple[int, ...]:
        return tuple(number[tensor] for tensor in tensors)

    return call._replace(
        args=map_tree(call.args, change),
        kwargs=map_tree(call.kwargs, change),
        outputs=tuple(None if tensor is None else number[tensor] for tensor in call.outputs),
        targets=each(call.targets),
        written=each(call.written),
        reads=tuple(sorted(each(call.reads))),
    )


def _renumbered(returned: Returned | None, number: dict[int, int]) -> Returned | None:
    if returned is None:
        return None
    leaves = (Ref(number[x.number]) if isinstance(x, Ref) else x for x in returned.leaves)
    return returned._replace(leaves=tuple(leaves))


# ── draws ────────────────────────────────────────────────────────────────────────────────────────


class RecomputedDraws:
    """Restores generator states, so that second runs draw the same numbers as first runs.

    Draws with seeds of their own do not need this.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        pairs = program.repeats.items()
        self._first_of = {again: op for again, op in pairs if program.calls[again].draws}
        self._firsts = frozenset(self._first_of.values())
        self._generator = generator_of(device) if self._firsts else None
        self._states: dict[int, torch.Tensor] = {}

    def run(self, op: int, do: Callable[[], None]) -> None:
        """Run an op; a second run starts with the generator state from before the first run."""
        generator = self._generator
        if generator is None or (op not in self._firsts and op not in self._first_of):
            do()
            return
        now = generator.get_state()
        if op in self._firsts:
            self._states[op] = now
            do()
            return
        generator.set_state(self._states[self._first_of[op]])
        do()
        # Later draws continue as if nothing had been recomputed.
        generator.set_state(now)
