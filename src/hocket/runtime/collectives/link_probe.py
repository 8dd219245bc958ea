"""Measure bandwidth and latency between all ranks: each pair alone, then all at once.

Pairs are scheduled as in a tournament (the circle method): every rank has one partner at a time,
and all partners within ranks - 1 rounds. All rounds are time slices of equal length, counted from a
barrier at the store. The first part of a slice is not measured, because it is distorted by token
buckets of traffic shapers and growing TCP windows. A probe takes at most two seconds for any number
of ranks.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from hocket.base.config import rank_variables
from hocket.base.errors import RunError, UsageError
from hocket.hardware.cluster import Cluster
from hocket.hardware.probed import Rates, cluster_of
from hocket.runtime.collectives.peer_sockets import close_all, connect_all

PROBE_S = 1.3
_TOGETHER_S = 0.4
_NOT_COUNTED = 0.4
_BUFFER_BYTES = 1 << 16
_PINGS = 3
_TRIES = 3
_START_S = 60.0
_SLOW_ANSWER_S = 1e-3
"""Latency in seconds that is assumed if no answer arrives in time."""
_DATA = bytes(1 << 18)


def probe(store: Any, rank: int, num_ranks: int, key: str, *, patience_s: float = 5.0) -> Rates:
    """Measure the rates between all ranks; all must call this together."""
    for number in range(_TRIES):
        found = _probe_once(store, rank, num_ranks, f"{key}/probe/{number}", patience_s)
        # On a busy machine a rank may start its slice too late. All ranks have the same result, so
        # all repeat the probe together.
        if found.is_connected:
            break
    return found


def probe_launched() -> tuple[int, Cluster]:
    """Return this rank and the measured links of all launched ranks; all must call it together."""
    if not {"RANK", "WORLD_SIZE"} <= rank_variables().keys():
        raise UsageError(
            "no launcher has started this: there is one rank only",
            hint="start it once per rank: torchrun --nproc-per-node 4 -m hocket probe",
        )
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    try:
        store, rank, num_ranks = next(rendezvous("env://", timeout=timedelta(seconds=_START_S)))
    # The address is missing or malformed, or no store listens there.
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"the ranks do not meet: {str(error).partition(chr(10))[0]}",
            hint="MASTER_ADDR and MASTER_PORT say where; torchrun sets them",
        ) from None
    if num_ranks < 2:
        raise UsageError("links need two ranks or more", hint="raise --nproc-per-node or --nnodes")
    cluster = cluster_of(probe(store, rank, num_ranks, "hocket probe", patience_s=_START_S))
    # Rank 0 may host the store, so it leaves last.
    store.set(f"hocket probe/left/{rank}", "1")
    if rank == 0:
        store.wait([f"hocket probe/left/{other}" for other in range(num_ranks)])
    return rank, cluster


def _probe_once(store: Any, rank: int, num_ranks: int, key: str, patience_s: float) -> Rates:
    sockets = connect_all(store, rank, num_ranks, key, patience_s=patience_s)
    try:
        for each in sockets:
            if each is not None:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        measured = _measure(store, sockets, rank, key)
    finally:
        close_all(sockets)
    store.set(f"{key}/found/{rank}", json.dumps(measured))
    found = [json.loads(store.get(f"{key}/found/{n}")) for n in range(num_ranks)]
    # Each rank reports its receive rates. `Rates` has senders as rows, hence the transposition.
    columns = [np.array([part[index] for part in found]).T for index in range(2)]
    latency_s = np.array([part[2] for part in found])
    return Rates(columns[0], columns[1], np.minimum(latency_s, latency_s.T))


def _measure(
    store: Any, sockets: list[socket.socket | None], rank: int, key: str
) -> tuple[list[float], list[float], list[float]]:
    count = len(sockets)
    rounds = _rounds(count)
    slice_s = (PROBE_S - _TOGETHER_S) / max(len(rounds), 1)
    alone_bps, latency_s = [0.0] * count, [_SLOW_ANSWER_S] * count
    _barrier(store, count, f"{key}/start")
    begin_s = time.monotonic()
    for number, pairs in enumerate(rounds):
        peer = pairs.get(rank, -1)
        end_s = begin_s + (number + 1) * slice_s
        made = sockets[peer] if peer >= 0 else None
        if made is not None:
            # Pings end within 30 % of a slice; the rest is for the measurement of bandwidth.
            latency_s[peer] = _ping(made, is_first=rank < peer, until_s=end_s - 0.7 * slice_s)
            rates = _exchange({peer: made}, time.monotonic(), end_s)
            alone_bps[peer] = rates.get(peer, 0.0)
        time.sleep(max(0.0, end_s - time.monotonic()))
    every = {peer: made for peer, made in enumerate(sockets) if made is not None}
    start_s = time.monotonic()
    rates = _exchange(every, start_s, begin_s + len(rounds) * slice_s + _TOGETHER_S)
    return alone_bps, [rates.get(peer, 0.0) for peer in range(count)], latency_s


def _rounds(count: int) -> list[dict[int, int]]:
    """Return each rank's partner per round (circle method); with an odd count, one rank idles."""
    seats = [*range(count), *([-1] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append({x: y for a, b in pairs if min(a, b) >= 0 for x, y in ((a, b), (b, a))})
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _ping(made: socket.socket, *, is_first: bool, until_s: float) -> float:
    """Return half of the shortest round-trip time of one byte, measured by the first rank."""
    best_s = _SLOW_ANSWER_S
    for _ in range(_PINGS):
        start_s = time.monotonic()
        if is_first:
            made.send(b"?")
        if not _receive_byte(made, until_s):
            return best_s
        if not is_first:
            made.send(b"!")
        best_s = min(best_s, (time.monotonic() - start_s) / 2)
    # The answering rank also waits for the question, so only the asking rank's time is valid.
    return best_s if is_first else _SLOW_ANSWER_S


def _receive_byte(made: socket.socket, until_s: float) -> bool:
    made.settimeout(max(0.001, until_s - time.monotonic()))
    try:
        return bool(made.recv(1))
    except OSError:
        return False
    finally:
        made.settimeout(0)


def _exchange(sockets: dict[int, socket.socket], start_s: float, end_s: float) -> dict[int, float]:
    """Send and receive as much as possible until the end; returns bytes per second received, by
    peer."""
    counted_s = start_s + _NOT_COUNTED * (end_s - start_s)
    got = dict.fromkeys(sockets, 0)
    into = bytearray(1 << 18)
    number = {made: peer for peer, made in sockets.items()}
    with selectors.DefaultSelector() as selector:
        for each in sockets.values():
            selector.register(each, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while (now_s := time.monotonic()) < end_s:
            for key, events in selector.select(end_s - now_s):
                made: Any = key.fileobj
                try:
                    if events & selectors.EVENT_WRITE:
                        made.send(_DATA)
                    if events & selectors.EVENT_READ:
                        size = made.recv_into(into)
                        if time.monotonic() >= counted_s:
                            got[number[made]] += size
                        if size == 0:
                            selector.unregister(made)
                except BlockingIOError:
                    continue
                except OSError:
                    selector.unregister(made)
            if not selector.get_map():
                break
    return {peer: size / (end_s - counted_s) for peer, size in got.items()}


def _barrier(store: Any, count: int, key: str) -> None:
    """Wait at the store until all ranks have arrived."""
    if store.add(f"{key}/count", 1) == count:
        store.set(f"{key}/all", "1")
    store.get(f"{key}/all")
