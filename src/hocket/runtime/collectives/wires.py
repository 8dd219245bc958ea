"""Connections between all pairs of ranks, which meet at a store.

Every rank listens; the one with the higher number connects. Both say who they are and prove it by
a secret that the store holds. A pair that does not come about in time has no connection: whoever
plans finds no link there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection
from math import inf
from typing import Any

from hocket.base import config

_SECRET_BYTES = 16
_SIOCGIFADDR = 0x8915
_UNSENT_BYTES = 1 << 16
_AHEAD_S = 0.003
_MIN_AHEAD_BYTES, _MAX_AHEAD_BYTES = 1 << 15, 1 << 19
"""Above the most, the system finds what a fast link needs."""
_TCP_NOTSENT_LOWAT = 25
"""Not in every build of Python."""


def connect_all(
    store: Any, rank: int, num_ranks: int, key: str, *, patience_s: float,
    without: Collection[int] = (), rate_bps: float = inf,
) -> list[socket.socket | None]:  # fmt: skip
    """A socket per rank, non-blocking; None for this one and those that cannot be reached.

    Those ``without`` a link are known not to be reached: nobody waits for them. No more than a few
    milliseconds of sending at ``rate_bps`` are given to the system at once: it would fill the
    queues of slow links with them, and what is more urgent would wait behind.
    """
    address = own_address()
    with socket.create_server((address, 0), backlog=num_ranks) as server:
        port = server.getsockname()[1]
        if rank == 0:
            store.set(f"{key}/secret", secrets.token_hex(_SECRET_BYTES))
        store.set(f"{key}/address/{rank}", f"{address} {port}")
        secret = bytes.fromhex(store.get(f"{key}/secret").decode())
        others = [store.get(f"{key}/address/{n}").decode().split() for n in range(num_ranks)]
        until_s = time.monotonic() + patience_s
        found: list[socket.socket | None] = [None] * num_ranks
        waiting: dict[socket.socket, int] = {}
        for peer in set(range(rank)).difference(without):
            made = socket.socket(_family(others[peer][0]), socket.SOCK_STREAM)
            made.setblocking(False)
            made.connect_ex((others[peer][0], int(others[peer][1])))
            waiting[made] = peer
        hello = secret + struct.pack("<i", rank)
        _finish_connecting(waiting, hello, until_s, found)
        later = set(range(rank + 1, num_ranks)).difference(without)
        _accept(server, secret, later, until_s, found)
    for each in found:
        if each is not None:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # What waits in the system can no longer be overtaken by what is more urgent.
            each.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            if rate_bps * _AHEAD_S < _MAX_AHEAD_BYTES:
                ahead = max(int(rate_bps * _AHEAD_S), _MIN_AHEAD_BYTES)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ahead)
    return found


def _finish_connecting(
    waiting: dict[socket.socket, int], hello: bytes, until_s: float,
    found: list[socket.socket | None],
) -> None:  # fmt: skip
    with selectors.DefaultSelector() as selector:
        for each in waiting:
            selector.register(each, selectors.EVENT_WRITE)
        while waiting and (rest_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(rest_s):
                made: Any = key.fileobj
                selector.unregister(made)
                peer = waiting.pop(made)
                # Fits into an empty buffer.
                if made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    with contextlib.suppress(OSError):
                        made.send(hello)
                        found[peer] = made
                        continue
                made.close()
        for each in waiting:
            each.close()


def _accept(
    server: socket.socket, secret: bytes, missing: set[int], until_s: float,
    found: list[socket.socket | None],
) -> None:  # fmt: skip
    while missing and (rest_s := until_s - time.monotonic()) > 0:
        server.settimeout(rest_s)
        try:
            made, _ = server.accept()
            made.settimeout(min(1.0, rest_s))
            said = made.recv(len(secret) + 4, socket.MSG_WAITALL)
        except OSError:
            continue
        peer = struct.unpack("<i", said[-4:])[0] if len(said) == len(secret) + 4 else -1
        if peer in missing and secrets.compare_digest(said[:-4], secret):
            found[peer] = made
            missing.discard(peer)
        else:
            made.close()


def close_all(sockets: list[socket.socket | None], *, at_once: bool = True) -> None:
    """Close; ``at_once`` what is under way is given up, else it still arrives."""
    for each in sockets:
        if each is not None:
            if at_once:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()


def own_address() -> str:
    """Where others reach this rank: the interface that was named, or the one towards the store."""
    interface, meeting = config.rank_network()
    if interface:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            request = struct.pack("256s", interface.split(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(OSError):
        host = meeting or socket.gethostname()
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


_ACK_AGE_AT, _UNACKED_AT, _RETRIES_AT, _READER_AT = 56, 24, 2, 176
"""Places in Linux's struct tcp_info: ms since the last answer, segments without one, tries, and µs
that the other side's window was closed."""
_INFO_BYTES = 192


def is_cut(descriptor: int, silent_s: float) -> bool:
    """Whether what was sent has found no answer for so long: the link is gone, not the reader slow.

    A reader that does not read closes its window, but its system goes on answering.
    """
    info = _tcp_info(descriptor)
    unacked = struct.unpack_from("<I", info, _UNACKED_AT)[0]
    age_ms = struct.unpack_from("<I", info, _ACK_AGE_AT)[0]
    return unacked > 0 and info[_RETRIES_AT] > 0 and age_ms > 1e3 * silent_s


def reader_s(descriptor: int) -> float:
    """How long sending has waited for the reader in all."""
    return float(struct.unpack_from("<Q", _tcp_info(descriptor), _READER_AT)[0]) * 1e-6


def _tcp_info(descriptor: int) -> bytes:
    """What the system knows of a connection; zeros where it tells nothing."""
    with socket.socket(fileno=os.dup(descriptor)) as used:
        try:
            info = used.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            info = b""
    return info.ljust(_INFO_BYTES, b"\0")
