"""MSCCL++'s execution plans (JSON): written from planned collectives, read into programs.

Ranks read each other's memory: a signal says that chunks are ready, the other waits for it and
copies (``get``) or adds (``rre``) them. Every tree is a thread block of its own on every rank,
since trees share no chunks; each pair of neighbours in a tree has a channel. Plans of its own
programs also push (``put``), combine both (``res``, ``rres``), and divide an op among a group of
thread blocks, which read here as smaller chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import lcm
from typing import Any

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.export.compile_trees import RangeSend, moves_of
from hocket.export.program import BlockStep, CollectiveProgram, Slot, ThreadBlock
from hocket.plan.sections.communication import Communication

_MOVES = ("copy", "put", "get", "res", "rre", "rres", "re")
_SIGNALS, _WAITS = ("signal", "rlxsignal"), ("wait", "rlxwait")
_NAMES = {"reducescatter": "reducescatter", "reduce_scatter": "reducescatter"}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


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


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def to_mscclpp(section: Communication) -> dict[str, Any]:
    """The plan of a collective as data."""
    compiled = moves_of(section)
    count, each = len(section.ranks), compiled.num_chunks // len(section.ranks)
    is_gather = section.collective == "allgather"
    is_scatter = section.collective == "reducescatter"
    buffer = "o" if is_gather else "i"
    gpus = [_Gpu(rank, buffer) for rank in range(count)]
    for tree, (first, size) in enumerate(compiled.ranges):
        for gpu in gpus:
            gpu.begin_block()
        root = section.ranks.index(section.trees[tree].root)
        if is_gather and size:
            gpus[root].copy(("i", first - root * each), ("o", first), size)
        for move in compiled.moves:
            if move.tree == tree:
                gpus[move.src].signal(move)
                gpus[move.dst].take(move)
        if is_scatter and size:
            gpus[root].copy(("i", first), ("o", first - root * each), size)
    total = compiled.num_chunks
    return {
        "name": f"hocket {section.algorithm}",
        "collective": section.collective,
        "protocol": "Simple",
        "inplace": not (is_gather or is_scatter),
        "reuse_resources": False,
        "gpus": [
            gpu.to_data(each if is_gather else total, each if is_scatter else total) for gpu in gpus
        ],
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": 2**64 - 1,
    }


class _Gpu:
    """One rank's part of a plan under construction."""

    def __init__(self, rank: int, buffer: str) -> None:
        self.rank, self.buffer = rank, buffer
        self.connected: list[int] = []
        self.remote: dict[int, int] = {}
        """Number of the remote buffer of each neighbour."""
        self.blocks: list[dict[str, Any]] = []

    def begin_block(self) -> None:
        """Go on with the next tree."""
        self.blocks.append({"ops": [], "channels": {}, "buffers": {}})

    def _channel(self, peer: int) -> int:
        channels: dict[int, int] = self.blocks[-1]["channels"]
        if peer not in channels:
            channels[peer] = len(self.connected)
            self.connected.append(peer)
        return list(channels).index(peer)

    def signal(self, move: RangeSend) -> None:
        """Say that chunks are ready for another rank."""
        channel = self._channel(move.dst)
        self.blocks[-1]["ops"] += [
            {"name": "nop"},
            {"name": "signal", "channel_ids": [channel], "channel_type": "memory"},
        ]

    def take(self, move: RangeSend) -> None:
        """Wait for chunks of another rank, then copy or add them."""
        channel = self._channel(move.src)
        buffers: dict[int, int] = self.blocks[-1]["buffers"]
        self.remote.setdefault(move.src, len(self.remote))
        buffers.setdefault(move.src, self.remote[move.src])
        there = {"buffer_id": list(buffers).index(move.src), "index": move.first,
                 "size": move.count}  # fmt: skip
        here = {"type": self.buffer, "index": move.first, "size": move.count}
        op: dict[str, Any] = {
            "name": "rre" if move.is_reduce else "get",
            "src_buff": [here, there] if move.is_reduce else [there],
            "dst_buff": [here],
            "channel_type": "memory",
        }
        if move.is_reduce:
            op["reduce_op"] = "sum"
        else:
            op["channel_ids"] = [channel]
        wait = {"name": "wait", "channel_ids": [channel], "channel_type": "memory"}
        self.blocks[-1]["ops"] += [wait, {"name": "nop"}, op]

    def copy(self, src: tuple[str, int], dst: tuple[str, int], size: int) -> None:
        """Copy chunks between own buffers."""
        self.blocks[-1]["ops"] += [
            {"name": "nop"},
            {
                "name": "copy",
                "src_buff": [{"type": src[0], "index": src[1], "size": size}],
                "dst_buff": [{"type": dst[0], "index": dst[1], "size": size}],
            },
        ]

    def to_data(self, num_input: int, num_output: int) -> dict[str, Any]:
        """The rank as the plan holds it."""
        blocks = [block for block in self.blocks if block["ops"]]
        return {
            "id": self.rank,
            "input_chunks": num_input,
            "output_chunks": num_output,
            "scratch_chunks": 0,
            "threadblocks": [
                {
                    "id": index,
                    "ops": block["ops"],
                    "channels": [
                        {"channel_type": "memory", "channel_ids": list(block["channels"].values())}
                    ],
                    "remote_buffer_refs": [
                        {
                            "access_channel_type": "memory",
                            "remote_buffer_ids": list(block["buffers"].values()),
                        }
                    ],
                }
                for index, block in enumerate(blocks)
            ],
            "channels": [{"channel_type": "memory", "connected_to": self.connected}],
            "remote_buffers": [
                {"rank": peer, "type": self.buffer, "access_channel_types": ["memory"]}
                for peer in self.remote
            ],
            "semaphores": [],
        }
