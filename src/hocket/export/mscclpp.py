"""Export a planned collective as an execution plan of MSCCL++ (JSON).

Ranks read each other's memory: a signal says that chunks are ready, the other rank waits for it and
copies (``get``) or adds (``rre``) them. Every tree gets a range of chunks and, on every rank, a
thread block of its own. Each pair of neighbours in a tree has a channel. The sends of a tree are
ordered by level, and a send only waits for sends of lower levels, so no circular wait is possible.
Shares of the message become whole chunks: exactly if their denominators allow it within a limit,
otherwise rounded. O(sends). Tests run exported plans, and plans of MSCCL++'s own compiler, in an
interpreter.
"""

from __future__ import annotations

from collections import defaultdict
from math import lcm
from typing import Any

from hocket.plan.sections.communication import Communication, Tree

MAX_CHUNKS = 1024
"""Maximum number of chunks of the message; MSCCL++ allocates a table of them."""


def to_mscclpp(section: Communication, *, max_chunks: int = MAX_CHUNKS) -> dict[str, Any]:
    """Return the execution plan of a collective as data."""
    ranges, total = _chunk_ranges(section, max_chunks)
    number = {rank: index for index, rank in enumerate(section.ranks)}
    count, each = len(section.ranks), total // len(section.ranks)
    is_gather = section.collective == "allgather"
    is_scatter = section.collective == "reducescatter"
    gpus = [_Gpu(rank, "o" if is_gather else "i") for rank in range(count)]
    for tree, (first, size) in zip(section.trees, ranges, strict=True):
        for gpu in gpus:
            gpu.begin_block()
        root = number[tree.root]
        if is_gather and size:
            gpus[root].copy(("i", first - root * each), ("o", first), size)
        for src, dst, is_reduce in _ordered_sends(tree) if size else ():
            gpus[number[src]].signal(number[dst])
            gpus[number[dst]].take(number[src], first, size, is_reduce=is_reduce)
        if is_scatter and size:
            gpus[root].copy(("i", first), ("o", first - root * each), size)
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
    """Part of one rank in a plan under construction."""

    def __init__(self, rank: int, buffer: str) -> None:
        self.rank, self.buffer = rank, buffer
        self.connected: list[int] = []
        self.remote: dict[int, int] = {}
        """Number of the remote buffer of each neighbour."""
        self.blocks: list[dict[str, Any]] = []

    def begin_block(self) -> None:
        """Start the thread block of the next tree."""
        self.blocks.append({"ops": [], "channels": {}, "buffers": {}})

    def _channel(self, peer: int) -> int:
        channels: dict[int, int] = self.blocks[-1]["channels"]
        if peer not in channels:
            channels[peer] = len(self.connected)
            self.connected.append(peer)
        return list(channels).index(peer)

    def signal(self, peer: int) -> None:
        """Signal to another rank that chunks are ready."""
        self.blocks[-1]["ops"] += [{"name": "nop"}, self._synchronization("signal", peer)]

    def take(self, peer: int, first: int, num_chunks: int, *, is_reduce: bool) -> None:
        """Wait for chunks of another rank, then copy or add them."""
        buffers: dict[int, int] = self.blocks[-1]["buffers"]
        wait = self._synchronization("wait", peer)
        self.remote.setdefault(peer, len(self.remote))
        buffers.setdefault(peer, self.remote[peer])
        there = {"buffer_id": list(buffers).index(peer), "index": first, "size": num_chunks}
        here = {"type": self.buffer, "index": first, "size": num_chunks}
        op = {
            "name": "rre" if is_reduce else "get",
            "src_buff": [here, there] if is_reduce else [there],
            "dst_buff": [here],
            "channel_type": "memory",
            **({"reduce_op": "sum"} if is_reduce else {"channel_ids": wait["channel_ids"]}),
        }
        self.blocks[-1]["ops"] += [wait, {"name": "nop"}, op]

    def _synchronization(self, name: str, peer: int) -> dict[str, Any]:
        return {"name": name, "channel_ids": [self._channel(peer)], "channel_type": "memory"}

    def copy(self, src: tuple[str, int], dst: tuple[str, int], size: int) -> None:
        """Copy chunks between the rank's own buffers."""
        self.blocks[-1]["ops"] += [
            {"name": "nop"},
            {
                "name": "copy",
                "src_buff": [{"type": src[0], "index": src[1], "size": size}],
                "dst_buff": [{"type": dst[0], "index": dst[1], "size": size}],
            },
        ]

    def to_data(self, num_input: int, num_output: int) -> dict[str, Any]:
        """The rank's part of the plan as data."""
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


def _chunk_ranges(section: Communication, max_chunks: int) -> tuple[list[tuple[int, int]], int]:
    """First chunk and number of chunks of each tree, and the total number of chunks."""
    shares = [tree.share for tree in section.trees]
    by_root = section.collective in ("allgather", "reducescatter")
    # In a gather or scatter each rank owns an equal part of the message, so the number of chunks
    # must be a multiple of the number of ranks.
    groups = len(section.ranks) if by_root else 1
    total = lcm(*(share.denominator for share in shares), groups)
    if total > max_chunks:
        total = max(max_chunks // groups, len(shares)) * groups
    owner = {rank: index if by_root else 0 for index, rank in enumerate(section.ranks)}
    group_of = [owner[tree.root] for tree in section.trees]
    counts = [int(share * total) for share in shares]
    for group in range(groups):
        members = [n for n, own in enumerate(group_of) if own == group]
        missing = total // groups - sum(counts[n] for n in members)
        # Rounding down loses chunks; the largest remainders get them, so the chunks of a group add
        # up.
        for n in sorted(members, key=lambda n: (counts[n] - shares[n] * total, n))[:missing]:
            counts[n] += 1
    starts, at = [0] * len(shares), 0
    for n in sorted(range(len(shares)), key=lambda n: group_of[n]):
        starts[n] = at
        at += counts[n]
    return list(zip(starts, counts, strict=True)), total


def _ordered_sends(tree: Tree) -> list[tuple[str, str, bool]]:
    """Source, destination and kind of every send of a tree (True for a reduction), ordered by
    level.
    """
    sends: list[tuple[int, str, str, bool]] = []
    ready: dict[str, int] = defaultdict(int)
    for send in tree.reduce:
        sends.append((ready[send.src], send.src, send.dst, True))
        # Two children must not add to the same chunks at once: the second comes a level later.
        ready[send.dst] = max(ready[send.dst], ready[send.src]) + 1
    has = {tree.root: ready[tree.root]}
    for send in tree.broadcast:
        sends.append((has[send.src], send.src, send.dst, False))
        has[send.dst] = has[send.src] + 1
    return [send[1:] for send in sorted(sends, key=lambda send: send[0])]
