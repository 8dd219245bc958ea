"""Write a planned collective as an execution plan of MSCCL++ (JSON).

Ranks read each other's memory: a signal says that chunks are ready, the other rank waits for it and
copies (``get``) or adds (``rre``) them. Every tree is a thread block of its own on every rank,
since trees share no chunks; each pair of neighbours in a tree has a channel. The tests run written
plans in an interpreter, also beside plans that MSCCL++'s own compiler wrote.
"""

from __future__ import annotations

from typing import Any

from hocket.export.tree_sends import RangeSend, moves_of
from hocket.plan.sections.communication import Communication


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
        """Begin the thread block of the next tree."""
        self.blocks.append({"ops": [], "channels": {}, "buffers": {}})

    def _channel(self, peer: int) -> int:
        channels: dict[int, int] = self.blocks[-1]["channels"]
        if peer not in channels:
            channels[peer] = len(self.connected)
            self.connected.append(peer)
        return list(channels).index(peer)

    def signal(self, move: RangeSend) -> None:
        """Signal that chunks are ready for another rank."""
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
