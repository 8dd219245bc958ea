"""Execution plans of MSCCL++ as programs, and an interpreter that runs them on the CPU.

Plans of its own compiler also push (``put``), combine both (``res``, ``rres``), and divide an op
among a group of thread blocks, which read here as smaller chunks.
Every input chunk is a random number, so that a sum is right only if every contribution came once.
The interpreter knows nothing of how a program was made. O(steps) when nothing waits in vain.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from hocket.base import fields
from hocket.base.errors import CheckError, InputFileError

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


_MOVES = ("copy", "put", "get", "res", "rre", "rres", "re")
_SIGNALS, _WAITS = ("signal", "rlxsignal"), ("wait", "rlxwait")
_NAMES = {"reducescatter": "reducescatter", "reduce_scatter": "reducescatter"}


def program_of_plan(plan: Mapping[str, Any]) -> CollectiveProgram:
    """The program of a plan's data."""
    gpus = [fields.mapping(gpu, f"gpus[{n}]") for n, gpu in enumerate(_list(plan, "gpus", ""))]
    semaphores = _semaphores(gpus)
    parts = _parts(gpus)
    collective = fields.text(plan.get("collective"), "collective").replace("_", "")
    return CollectiveProgram(
        name=fields.text(plan.get("name", "plan"), "name"),
        collective=_NAMES.get(collective, collective),
        blocks=tuple(
            tuple(
                ThreadBlock(
                    tuple(
                        _steps(gpu, fields.mapping(block, "threadblock"), rank, semaphores, parts)
                    )
                )
                for block in _list(gpu, "threadblocks", f"gpus[{rank}]")
            )
            for rank, gpu in enumerate(gpus)
        ),
        num_input=_chunks(gpus, "input_chunks", parts),
        num_output=_chunks(gpus, "output_chunks", parts),
        num_scratch=_chunks(gpus, "scratch_chunks", parts),
        in_place=fields.flag(plan.get("inplace", False), "inplace"),
    )


def _list(data: Mapping[str, Any], key: str, path: str) -> list[Any]:
    return fields.items(data.get(key, []), f"{path}.{key}" if path else key)


def _chunks(gpus: list[Mapping[str, Any]], key: str, parts: int) -> tuple[int, ...]:
    return tuple(
        parts * fields.integer(gpu.get(key, 0), f"gpus[{n}].{key}", 0, 2**20)
        for n, gpu in enumerate(gpus)
    )


def _parts(gpus: list[Mapping[str, Any]]) -> int:
    """Pieces of a chunk, so that every group of thread blocks can share it evenly."""
    sizes = [1]
    for gpu in gpus:
        for block in _list(gpu, "threadblocks", "gpus"):
            for op in _list(block, "ops", "tb"):
                group = op.get("tbg_info", {"tbg_size": 1})
                sizes.append(fields.integer(group.get("tbg_size"), "tbg_size", 1, 64))
    return lcm(*sizes)


def _semaphores(gpus: list[Mapping[str, Any]]) -> dict[tuple[int, str, int], tuple[int, int]]:
    """For each channel of each rank: the semaphore that it raises, and the one that it awaits.

    The n-th channel to a rank is the other end of that rank's n-th channel back.
    """
    own: dict[tuple[int, str, int, int], int] = {}
    ends: list[tuple[int, str, int, int, int]] = []
    for rank, gpu in enumerate(gpus):
        for group in _list(gpu, "channels", f"gpus[{rank}]"):
            kind = fields.text(group.get("channel_type"), "channel_type")
            seen: dict[int, int] = defaultdict(int)
            for index, peer in enumerate(_list(group, "connected_to", "channels")):
                number = fields.integer(peer, "connected_to", 0, len(gpus) - 1)
                own[rank, kind, number, seen[number]] = len(own)
                ends.append((rank, kind, index, number, seen[number]))
                seen[number] += 1
    found = {}
    for rank, kind, index, peer, nth in ends:
        other = own.get((peer, kind, rank, nth))
        if other is None:
            raise InputFileError(f"rank {rank} has a channel to {peer} that {peer} does not have")
        found[rank, kind, index] = (other, own[rank, kind, peer, nth])
    return found


def _steps(
    gpu: Mapping[str, Any], block: Mapping[str, Any], rank: int,
    semaphores: dict[tuple[int, str, int], tuple[int, int]], parts: int,
) -> list[BlockStep]:  # fmt: skip
    channels = {
        entry["channel_type"]: entry["channel_ids"] for entry in _list(block, "channels", "tb")
    }
    remote = {
        entry["access_channel_type"]: entry["remote_buffer_ids"]
        for entry in _list(block, "remote_buffer_refs", "tb")
    }
    buffers = _list(gpu, "remote_buffers", f"gpus[{rank}]")

    def slot(entry: Mapping[str, Any], kind: str, skipped: int) -> Slot:
        index = parts * fields.integer(entry.get("index"), "index", 0, 2**20) + skipped
        if "buffer_id" not in entry:
            return Slot(fields.choice(entry.get("type"), "type", ("i", "o", "s")), index)
        target = buffers[remote[kind][entry["buffer_id"]]]
        return Slot(target["type"], index, target["rank"])

    steps = []
    for op in _list(block, "ops", "tb"):
        name = fields.text(op.get("name"), "ops.name")
        kind = op.get("channel_type", "memory")
        wires = [semaphores[rank, kind, channels[kind][c]] for c in op.get("channel_ids", [])]
        if name in _SIGNALS:
            steps.append(BlockStep(signals=tuple(raises for raises, _ in wires)))
        elif name in _WAITS:
            steps.append(BlockStep(awaits=tuple(awaits for _, awaits in wires)))
        elif name in _MOVES:
            sources, targets = op.get("src_buff", []), op.get("dst_buff", [])
            group = op.get("tbg_info", {"tb_id": 0, "tbg_size": 1})
            size = parts * fields.integer(sources[0].get("size"), "size", 1, 2**20)
            part = size // group["tbg_size"]
            skipped = part * fields.integer(group.get("tb_id"), "tb_id", 0, 63)
            steps.append(
                BlockStep(
                    sources=tuple(slot(entry, kind, skipped) for entry in sources),
                    targets=tuple(slot(entry, kind, skipped) for entry in targets),
                    count=part,
                )
            )
        elif name == "nop":
            steps.append(BlockStep())
        else:
            raise InputFileError(f"the op {fields.shown(name)} is not known here")
    return steps
