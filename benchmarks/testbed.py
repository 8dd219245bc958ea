"""Machines in one machine: a network namespace per host, each link shaped to a rate and a delay.

    with Testbed({"server": Shape(10e6 / 8), "worker": Shape(10e6 / 8, delay_s=0.001)}) as bed:
        process = bed.start("worker", [sys.executable, "-m", "..."], stdout=subprocess.PIPE)
        bed.address("server")                       # 10.x.y.z, reachable from every host

All hosts hang on one bridge; what a host sends and what it receives is held to its rate (token
bucket filters at both ends of its link). Two hosts may have a cable of their own beside it, which
the system then takes: that is how ranks with unequal links, islands and a PCIe star are built
(`of_cluster`: every rank is a host, links between devices are cables, the rest is the bridge).
`Testbed.shape` and `Testbed.cut` change a cable while things run. Needs root and iproute2; names
are unique to the process, and leaving the block ends what was started in the hosts and removes
everything.

python benchmarks/testbed.py            measures the rate of a shaped link
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A host's link, the same in both directions."""

    bandwidth_bps: float
    """Bytes per second."""
    delay_s: float = 0.0
    burst_bytes: int = 0
    """At once; 0: what 10 ms bring."""
    packet_bytes: int = 1500
    """At most; headers take 66 of them."""


class Testbed:
    """Hosts on one bridge."""

    __test__ = False

    def __init__(
        self, hosts: Mapping[str, Shape], cables: Mapping[tuple[str, str], Shape] | None = None
    ) -> None:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            sys.exit("the testbed needs root and iproute2 (apt install iproute2)")
        self.hosts = dict(hosts)
        self.cables = dict(cables or {})
        self._processes: list[subprocess.Popen[Any]] = []
        self._tag = f"hk{os.getpid() % 100000}"
        self._bridge = f"{self._tag}b"
        self._subnet = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"

    def __enter__(self) -> Testbed:
        try:
            # The bridge has a namespace of its own: rules of this machine do not touch it.
            _run("ip", "netns", "add", self._bridge)
            _run("ip", "-n", self._bridge, "link", "add", "bridge0", "type", "bridge")
            _run("ip", "-n", self._bridge, "link", "set", "bridge0", "up")
            for number, (name, shape) in enumerate(self.hosts.items()):
                self._add(number, name, shape)
            for (a, b), shape in self.cables.items():
                self._join(a, b, shape)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: str) -> str:
        """The address of a host."""
        return f"{self._subnet}.{list(self.hosts).index(host) + 1}"

    def start(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host."""
        inside = ["ip", "netns", "exec", self.space(host), *command]
        process = subprocess.Popen(inside, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End everything that runs on the hosts and remove them."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for space in (*map(self.space, self.hosts), self._bridge):
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)

    def space(self, host: str) -> str:
        """The name of the namespace that a host is."""
        return f"{self._tag}n{list(self.hosts).index(host)}"

    def _add(self, number: int, name: str, shape: Shape) -> None:
        space, outer = self.space(name), f"{self._tag}v{number}"
        _run("ip", "netns", "add", space)
        _run("ip", "-n", self._bridge, "link", "add", outer, "type", "veth",
             "peer", "name", "eth0", "netns", space)  # fmt: skip
        for where, device in ((self._bridge, outer), (space, "eth0")):
            _run("ip", "-n", where, "link", "set", device, "mtu", str(shape.packet_bytes))
        _run("ip", "-n", self._bridge, "link", "set", outer, "master", "bridge0", "up")
        _run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        for where, device in ((self._bridge, outer), (space, "eth0")):
            _shape(where, device, shape)

    def _join(self, a: str, b: str, shape: Shape) -> None:
        """A cable without addresses: each end knows that the other is behind it."""
        ends = self._ends(a, b)
        _run("ip", "-n", ends[0][0], "link", "add", ends[0][1], "type", "veth",
             "peer", "name", ends[1][1], "netns", ends[1][0])  # fmt: skip
        for (space, device), here, there in zip(ends, (a, b), (b, a), strict=True):
            _run("ip", "-n", space, "link", "set", device, "mtu", str(shape.packet_bytes), "up")
            _run("ip", "-n", space, "route", "add", f"{self.address(there)}/32", "dev", device,
                 "src", self.address(here))  # fmt: skip
            _shape(space, device, shape)

    def _ends(self, a: str, b: str) -> tuple[tuple[str, str], tuple[str, str]]:
        number = list(self.hosts).index
        return ((self.space(a), f"to{number(b)}"), (self.space(b), f"to{number(a)}"))

    def shape(self, a: str, b: str, shape: Shape) -> None:
        """Give a cable another rate, now."""
        for space, device in self._ends(a, b):
            _run("tc", "-n", space, "qdisc", "del", "dev", device, "root")
            _shape(space, device, shape)

    def cut(self, a: str, b: str) -> None:
        """Let nothing through a cable any more; nobody is told."""
        for space, device in self._ends(a, b):
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", "handle", "1:",
                 "tbf", "rate", "8bit", "burst", "1", "limit", "1")  # fmt: skip


class Loopback:
    """This machine itself instead of hosts: nothing is shaped."""

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def start(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(command, **options)


def _shape(space: str, device: str, shape: Shape) -> None:
    bits = int(shape.bandwidth_bps * 8)
    # A burst of 10 ms, at least two packets; a queue of 0.2 s, as a small router has.
    burst = shape.burst_bytes or max(3200, int(shape.bandwidth_bps * 0.01))
    _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "handle", "1:", "tbf",
         "rate", f"{bits}bit", "burst", str(burst), "latency", "200ms")  # fmt: skip
    if shape.delay_s:
        _run("tc", "-n", space, "qdisc", "add", "dev", device, "parent", "1:1", "netem",
             "delay", f"{shape.delay_s * 500:g}ms")  # fmt: skip


def drive_or_follow(
    parser: argparse.ArgumentParser,
    drive: Callable[[argparse.Namespace], None],
    follow: Callable[[Path], None],
) -> None:
    """Begin a benchmark that starts itself once per rank, with ``--rank FILE``."""
    parser.add_argument("--rank", type=Path)
    options = parser.parse_args()
    if options.rank:
        follow(options.rank)
    else:
        # Leaving the block of the testbed removes it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        drive(options)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


_WHOLE_SEGMENTS_BYTES = 100_000
"""Systems hand on up to 64 KiB at once; a bucket that holds less halves the rate both ways."""
JUMBO_BYTES = 9000
"""Packets of networks between machines that train: headers take 0.7 % instead of 4.4 %."""


def link_shape(rate_bps: float) -> Shape:
    """A link of a cluster."""
    return Shape(rate_bps, burst_bytes=_WHOLE_SEGMENTS_BYTES, packet_bytes=JUMBO_BYTES)


def of_cluster(cluster: Any, ranks: Sequence[str], scale: float) -> Testbed:
    """The ranks of a `hocket` cluster, all rates times ``scale``.

    A cable for every pair of ranks with links of their own; the bridge stands for the rest, each
    rank's port as fast as its fastest way to a place that is no device.
    """

    def shape(rate_bps: float) -> Shape:
        return link_shape(rate_bps * scale)

    devices, cables, ports = set(cluster.device_names), {}, dict.fromkeys(ranks, 0.0)
    for link in cluster.links:
        if devices.issuperset(link.ends):
            if set(ranks).issuperset(link.ends):
                cables[link.ends] = cables.get(link.ends, 0.0) + link.bandwidth_bps
        else:
            for end in set(link.ends) & set(ranks):
                ports[end] = max(ports[end], link.bandwidth_bps)
    slowest = min(
        (rate for rate in ports.values() if rate), default=min(cables.values(), default=1)
    )
    # Where no way but the cables is described, ranks must still be able to meet.
    hosts = {rank: shape(rate or slowest) for rank, rate in ports.items()}
    return Testbed(hosts, {ends: shape(rate) for ends, rate in cables.items()})


_SEND = """
import socket, sys
s = socket.create_connection((sys.argv[1], 5000)); data = b"x" * 65536
for _ in range(int(sys.argv[2]) // len(data)): s.sendall(data)
"""
_RECEIVE = """
import socket, time
server = socket.create_server(("", 5000)); print("ready", flush=True)
s, _ = server.accept(); n = len(s.recv(65536)); start = time.monotonic()
while got := s.recv(65536): n += len(got)
print(n / (time.monotonic() - start))
"""


def main() -> None:
    for mbit in (1, 10, 100):
        shape = Shape(mbit * 1e6 / 8)
        with Testbed({"a": shape, "b": shape}) as bed:
            receiver = bed.start("b", [sys.executable, "-c", _RECEIVE], stdout=subprocess.PIPE)
            receiver.stdout.readline()
            num_bytes = str(int(max(262144, shape.bandwidth_bps * 2)))
            bed.start("a", [sys.executable, "-c", _SEND, bed.address("b"), num_bytes])
            rate = float(receiver.stdout.readline()) * 8 / 1e6
            print(f"{mbit} Mbit/s asked, {rate:.2f} Mbit/s measured")
            time.sleep(0.1)


if __name__ == "__main__":
    main()
