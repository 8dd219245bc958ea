"""ZeroMQ transport across machines: a ROUTER socket per shard, a DEALER per client and shard.

The identity of a client's sockets consists of the client's number and that of its process. A shard
can therefore address answers also after a restart at the same address, and two processes with the
same client number do not receive each other's answers. Queues are unbounded here: clients limit the
bytes in flight. Addresses are those of ZeroMQ (``tcp://10.0.0.1:4000``, ``ipc:///run/…``). There is
neither encryption nor authentication, so bind to a network that only the program's machines can
reach.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from hocket.base.errors import RunError
from hocket.base.extras import require

_POLL_IN = 1


def _socket(kind: str, name: str = "") -> Any:
    require("zmq", "tables across machines")
    import zmq

    socket: Any = zmq.Context.instance().socket(getattr(zmq, kind))
    # A process that ends must not wait for a peer that is gone.
    socket.setsockopt(zmq.LINGER, 0)
    # Clients bound the bytes in flight. With a limit, ZeroMQ would drop messages silently.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if name:
        socket.setsockopt(zmq.IDENTITY, name.encode())
    else:
        # A client that reconnects takes over from its lost connection.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


class _Waiter:
    """Waits for sockets and for `wake` of other threads."""

    def __init__(self, sockets: Sequence[Any]) -> None:
        import zmq

        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_open, self._turn = True, threading.Lock()
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, _POLL_IN)
        self._poller.register(self._read, _POLL_IN)

    def wait(self, timeout_s: float) -> None:
        """Wait until a socket is ready, `wake` is called, or the time is over."""
        found = dict(self._poller.poll(int(timeout_s * 1e3) + 1))
        if self._read in found:
            os.read(self._read, 4096)

    def wake(self) -> None:
        """End a wait; if the pipe is full, the wait ends anyway."""
        # After close, the pipe's descriptor may belong to another file.
        with self._turn, contextlib.suppress(BlockingIOError):
            if self._is_open:
                os.write(self._write, b".")

    def close(self) -> None:
        """Close the pipe."""
        with self._turn:
            self._is_open = False
            os.close(self._read)
            os.close(self._write)


class ZeroMqShardPort:
    """Port of a shard, bound to an address; port 0 or ``*`` selects a free one.

    A message that is longer than any valid one ends its connection.
    """

    def __init__(self, address: str, max_message_bytes: int) -> None:
        self._socket = _socket("ROUTER")
        import zmq

        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        try:
            self._socket.bind(address.replace(":0", ":*") if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise RunError(
                f"cannot listen: {error}", hint="is another shard there?", where=address
            ) from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.process = 0
        self._waiter = _Waiter([self._socket])

    def send(self, peer: int, data: bytes, process: int = 0) -> None:
        """Send to a client."""
        self._socket.send_multipart((f"{peer}.{process}".encode(), data))

    def receive(self) -> tuple[int, bytes] | None:
        """The next message and its client."""
        import zmq

        while True:
            try:
                name, *rest = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            client = name.partition(b".")[0]
            if client.isdigit() and len(rest) == 1:
                return int(client), rest[0]

    def wait(self, timeout_s: float) -> None:
        """Wait until a message has arrived, `wake` is called, or the time is over."""
        self._waiter.wait(timeout_s)

    def wake(self) -> None:
        """End a wait."""
        self._waiter.wake()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._waiter.close()


class ZeroMqClientPort:
    """The port of a client, connected to the addresses of all shards."""

    address = ""

    def __init__(self, client: int, addresses: Sequence[str]) -> None:
        self.process = secrets.randbits(62) + 1
        self._sockets = [_socket("DEALER", f"{client}.{self.process}") for _ in addresses]
        import zmq

        for socket, address in zip(self._sockets, addresses, strict=True):
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                for each in self._sockets:
                    each.close()
                raise RunError(f"cannot connect: {error}", where=address) from error
        self._waiter = _Waiter(self._sockets)

    def send(self, peer: int, data: bytes, process: int = 0) -> None:
        """Send to a shard."""
        self._sockets[peer].send(data)

    def receive(self) -> tuple[int, bytes] | None:
        """The next message and its shard."""
        import zmq

        for shard, socket in enumerate(self._sockets):
            try:
                return shard, socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                continue
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait until a message has arrived, `wake` is called, or the time is over."""
        self._waiter.wait(timeout_s)

    def wake(self) -> None:
        """End a wait."""
        self._waiter.wake()

    def close(self) -> None:
        """Close all sockets."""
        for socket in self._sockets:
            socket.close()
        self._waiter.close()
