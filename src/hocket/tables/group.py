"""Shards and clients inside one process, for the threads of one machine and for tests."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hocket.tables.node import Node
from hocket.tables.server import ShardServer
from hocket.tables.spec import Layout, TableSpec
from hocket.tables.worker import Worker

# Clients and shards of one process: messages are handed over.


class InsidePort:
    """Port inside a process: a queue, and the queues of the peers."""

    address = ""

    def __init__(self, number: int) -> None:
        self.number, self.process = number, secrets.randbits(62) + 1
        self.peers: list[InsidePort] = []
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._something = threading.Event()

    def send(self, peer: int, data: bytes, process: int = 0) -> None:
        """Put a message into a peer's queue."""
        other = self.peers[peer]
        other._inbox.append((self.number, data))
        other._something.set()

    def receive(self) -> tuple[int, bytes] | None:
        """The next message and its sender."""
        return self._inbox.popleft() if self._inbox else None

    def wait(self, timeout_s: float) -> None:
        """Wait until a message has arrived, `wake` is called, or the time is over."""
        self._something.wait(timeout_s)
        self._something.clear()

    def wake(self) -> None:
        """End a wait."""
        self._something.set()

    def lose(self) -> None:
        """Drop messages that have not been received, as when a process dies."""
        self._inbox.clear()

    def close(self) -> None:
        """Do nothing: no resource is held."""


def inside_ports(num_shards: int, num_clients: int) -> tuple[list[InsidePort], list[InsidePort]]:
    """Connected ports of shards and of clients."""
    shards = [InsidePort(number) for number in range(num_shards)]
    clients = [InsidePort(number) for number in range(num_clients)]
    for port in shards:
        port.peers = clients
    for port in clients:
        port.peers = shards
    return shards, clients


class Group:
    """Running shards and nodes; `kill_shard` injects a failure."""

    def __init__(self, layout: Layout, ports: list[InsidePort], folder: Path | None) -> None:
        self.layout, self.folder = layout, folder
        self.nodes: list[Node] = []
        self.servers: list[ShardServer] = []
        self._ports = ports
        self._stops: list[threading.Event] = []
        self._threads: list[threading.Thread] = []
        for shard in range(layout.num_shards):
            self.servers.append(self._server(shard))
            self._stops.append(threading.Event())
            self._threads.append(self._started(shard))

    @property
    def workers(self) -> list[Worker]:
        """The workers of all nodes."""
        return [worker for node in self.nodes for worker in node.workers]

    def kill_shard(self, shard: int) -> None:
        """Kill a shard with its state and the messages in flight to it."""
        self._stops[shard].set()
        self._threads[shard].join()
        # Messages in flight to a killed process are lost with it. 1272 Shards and clients inside
        # one process, for the threads of one machine and for tests.
        self._ports[shard].lose()
        self.servers[shard].abandon()

    def restart_shard(self, shard: int) -> None:
        """Start a killed shard from its last checkpoint."""
        self.servers[shard] = self._server(shard)
        self._stops[shard] = threading.Event()
        self._threads[shard] = self._started(shard)

    def close(self) -> None:
        """End all shards."""
        for shard in range(len(self.servers)):
            self._stops[shard].set()
            self._threads[shard].join()
            self.servers[shard].close()

    def _server(self, shard: int) -> ShardServer:
        path = None if self.folder is None else self.folder / f"shard-{shard}.npz"
        return ShardServer(
            self.layout, shard, self._ports[shard], checkpoint=path, checkpoint_s=0.2
        )

    def _started(self, shard: int) -> threading.Thread:
        thread = threading.Thread(
            target=self.servers[shard].run, args=(self._stops[shard],), daemon=True
        )
        thread.start()
        return thread


@contextmanager
def local_tables(
    tables: Sequence[TableSpec],
    *,
    num_shards: int = 1,
    num_clients: int = 1,
    workers_per_client: int = 1,
    checkpoints: Path | None = None,
    timeout_s: float = 60.0,
) -> Iterator[Group]:
    """Tables inside this process; changes that are unsent at the end are sent."""
    layout = Layout(tuple(tables), num_shards, num_clients)
    shard_ports, client_ports = inside_ports(num_shards, num_clients)
    group = Group(layout, shard_ports, checkpoints)
    try:
        with ExitStack() as stack:
            for client, port in enumerate(client_ports):
                node = Node(layout, client, port, num_workers=workers_per_client,
                            timeout_s=timeout_s)  # fmt: skip
                group.nodes.append(stack.enter_context(node))
            yield group
    finally:
        group.close()
