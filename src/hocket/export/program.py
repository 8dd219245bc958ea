"""Programs of collectives as executors run them: chunks in buffers, steps in thread blocks.

One form for MSCCL's XML and MSCCL++'s JSON, and an interpreter that runs it on the CPU.
Every input chunk is a random number, so that a sum is right only if every contribution came once.
The interpreter knows nothing of how a program was made. O(steps) when nothing waits in vain.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass

from hocket.base.errors import CheckError

_PRIME = 2**61 - 1


@dataclass(frozen=True)
class Slot:
    """Chunks of a buffer, of this rank or of another one."""

    buffer: str
    """``i``, ``o`` or ``s``."""
    offset: int
    rank: int = -1
    """-1 for the rank's own."""


@dataclass(frozen=True)
class BlockStep:
    """Instruction of a thread block."""

    sources: tuple[Slot, ...] = ()
    """Added up; with ``receives`` the message is one of them."""
    targets: tuple[Slot, ...] = ()
    """Each gets the sum."""
    count: int = 0
    receives: bool = False
    sends: bool = False
    waits_for: tuple[int, int] | None = None
    """A thread block of the same rank and the step of it that must be done."""
    signals: tuple[int, ...] = ()
    """Semaphores to raise."""
    awaits: tuple[int, ...] = ()
    """Semaphores to lower, each once it is raised."""


@dataclass(frozen=True)
class ThreadBlock:
    """Steps one after the other; messages go over its connections."""

    steps: tuple[BlockStep, ...]
    receives_from: tuple[int, int] | None = None
    """(rank, channel)."""
    sends_to: tuple[int, int] | None = None


@dataclass(frozen=True)
class CollectiveProgram:
    """Instructions of every rank."""

    name: str
    collective: str
    blocks: tuple[tuple[ThreadBlock, ...], ...]
    """Per rank."""
    num_input: tuple[int, ...]
    num_output: tuple[int, ...]
    num_scratch: tuple[int, ...]
    in_place: bool
    root: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.blocks)


def run_program(program: CollectiveProgram) -> None:
    """Run a program; raise `CheckError` where it hangs or ends with a wrong result."""
    memory = _RankBuffers(program)
    done = [[0] * len(blocks) for blocks in program.blocks]
    wires: dict[tuple[int, int, int], deque[list[int]]] = defaultdict(deque)
    raised: dict[int, int] = defaultdict(int)
    work = deque((r, b) for r, blocks in enumerate(program.blocks) for b in range(len(blocks)))
    idle = 0
    while work:
        rank, index = work.popleft()
        block = program.blocks[rank][index]
        before = done[rank][index]
        while done[rank][index] < len(block.steps):
            step = block.steps[done[rank][index]]
            if not _can_go(step, block, rank, done, wires, raised):
                break
            memory.perform(step, block, rank, wires)
            for semaphore in step.awaits:
                raised[semaphore] -= 1
            for semaphore in step.signals:
                raised[semaphore] += 1
            done[rank][index] += 1
        idle = 0 if done[rank][index] > before else idle + 1
        if done[rank][index] < len(block.steps):
            work.append((rank, index))
            if idle > len(work):
                raise _hang(program, rank, index, done[rank][index])
    if any(queue for queue in wires.values()):
        raise CheckError(f"{program.name}: messages were sent that nobody receives")
    memory.check()


def _can_go(
    step: BlockStep, block: ThreadBlock, rank: int, done: list[list[int]],
    wires: dict[tuple[int, int, int], deque[list[int]]], raised: dict[int, int],
) -> bool:  # fmt: skip
    if step.waits_for is not None:
        other, number = step.waits_for
        if other >= len(done[rank]) or done[rank][other] <= number:
            return False
    if step.receives:
        if block.receives_from is None:
            raise CheckError("a step receives in a thread block without a sender")
        src, channel = block.receives_from
        if not wires[src, rank, channel]:
            return False
    return all(raised[semaphore] > 0 for semaphore in step.awaits)


def _hang(program: CollectiveProgram, rank: int, block: int, step: int) -> CheckError:
    return CheckError(
        f"{program.name}: rank {rank} waits for ever in step {step} of thread block {block}",
        hint="a message is missing, or steps wait for each other",
    )


class _RankBuffers:
    """Buffers of all ranks; in place, input and output are the same memory."""

    def __init__(self, program: CollectiveProgram) -> None:
        self.program = program
        draw = random.Random(0)
        self.inputs = [
            [draw.randrange(_PRIME) for _ in range(max(program.num_input[r], 1))]
            for r in range(program.num_ranks)
        ]
        self.held: list[dict[str, list[int]]] = []
        for rank in range(program.num_ranks):
            given, output = list(self.inputs[rank]), [0] * program.num_output[rank]
            if program.in_place:
                self.held.append(self._aliased(rank, given, output))
            else:
                self.held.append({"i": given, "o": output})
            self.held[rank]["s"] = [0] * program.num_scratch[rank]

    def _aliased(self, rank: int, given: list[int], output: list[int]) -> dict[str, list[int]]:
        kind = self.program.collective
        if kind == "allgather":
            output[rank * len(given) : (rank + 1) * len(given)] = given
            return {"i": output, "o": output}
        return {"i": given, "o": given}

    def perform(
        self, step: BlockStep, block: ThreadBlock, rank: int,
        wires: dict[tuple[int, int, int], deque[list[int]]],
    ) -> None:  # fmt: skip
        """Do one step."""
        total = [0] * step.count
        if step.receives and block.receives_from is not None:
            src, channel = block.receives_from
            total = wires[src, rank, channel].popleft()
            if len(total) != step.count:
                raise CheckError(
                    f"{self.program.name}: rank {rank} expects {step.count} chunks from {src} and "
                    f"gets {len(total)}"
                )
        for slot in step.sources:
            part = self._chunks(slot, rank, step.count)
            total = [(a + b) % _PRIME for a, b in zip(total, part, strict=True)]
        for slot in step.targets:
            self._chunks(slot, rank, step.count)
            owner = self.held[rank if slot.rank < 0 else slot.rank]
            owner[slot.buffer][self._start(slot, rank) : self._start(slot, rank) + step.count] = (
                total
            )
        if step.sends:
            if block.sends_to is None:
                raise CheckError("a step sends in a thread block without a receiver")
            dst, channel = block.sends_to
            wires[rank, dst, channel].append(list(total))

    def _start(self, slot: Slot, rank: int) -> int:
        """Where a slot begins: in place, the input of an all-gather lies inside its output."""
        owner = rank if slot.rank < 0 else slot.rank
        is_inner = self.program.in_place and self.program.collective == "allgather"
        shift = owner * self.program.num_input[owner] if is_inner and slot.buffer == "i" else 0
        return slot.offset + shift

    def _chunks(self, slot: Slot, rank: int, count: int) -> list[int]:
        owner = rank if slot.rank < 0 else slot.rank
        start = self._start(slot, rank)
        buffer = self.held[owner].get(slot.buffer, [])
        if start < 0 or start + count > len(buffer):
            raise CheckError(
                f"{self.program.name}: rank {owner} has no chunks {start} to {start + count - 1} "
                f"in buffer {slot.buffer!r}"
            )
        return buffer[start : start + count]

    def check(self) -> None:
        """Compare with what the collective means."""
        program, ranks = self.program, range(self.program.num_ranks)
        for rank in ranks:
            for index, wanted in enumerate(self._wanted(rank)):
                buffer = self.held[rank]["o"]
                if index >= len(buffer) or buffer[index] != wanted:
                    raise CheckError(
                        f"{program.name}: rank {rank} ends with a wrong chunk {index} of its output"
                    )

    def _wanted(self, rank: int) -> list[int]:
        program, ranks = self.program, range(self.program.num_ranks)
        sums = [sum(column) % _PRIME for column in zip(*self.inputs, strict=False)]
        kind, count = program.collective, program.num_ranks
        if kind == "allreduce" or (kind == "reduce" and rank == program.root):
            return sums
        if kind == "broadcast":
            return self.inputs[program.root]
        if kind == "allgather":
            return [value for other in ranks for value in self.inputs[other]]
        if kind == "alltoall":
            each = len(self.inputs[rank]) // count
            return [value for other in ranks for value in self.inputs[other][rank * each :][:each]]
        if kind == "reducescatter":
            each = len(sums) // count
            part = sums[rank * each : (rank + 1) * each]
            return part if not program.in_place else []
        if kind == "reduce":
            return []
        raise CheckError(f"{program.name}: unknown collective {kind!r}")
