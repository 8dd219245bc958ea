"""Small graphs, devices and profiles for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterable

from hocket.cost.host import HostOverhead
from hocket.cost.profile import Profile, ProfileEntry
from hocket.graph import Graph, GraphBuilder, Phase, Role
from hocket.hardware import Cluster, Device, DeviceKind, Link

TESLA = DeviceKind(
    name="tesla",
    memory_bytes=16 * 2**30,
    peak_flops={"float32": 10e12, "tf32": 40e12, "float16": 100e12},
    memory_bandwidth_bps=1e12,
    launch_s=5e-6,
)
CPU = DeviceKind(
    name="xeon",
    memory_bytes=64 * 2**30,
    peak_flops={"float32": 1e12},
    memory_bandwidth_bps=1e11,
    is_cpu=True,
)


def cluster_of(*kinds: DeviceKind, uses_stated_times: bool = False) -> Cluster:
    devices = tuple(
        Device(name=f"gpu{i}", kind=kind, host="host", memory_bytes=kind.memory_bytes)
        for i, kind in enumerate(kinds)
    )
    links = tuple(
        Link(name=f"pcie{i}", ends=(d.name, "host"), bandwidth_bps=1e10, latency_s=1e-6)
        for i, d in enumerate(devices)
    )
    return Cluster(
        name="test",
        devices=devices,
        hosts=("host",),
        links=links,
        uses_stated_times=uses_stated_times,
    )


def graph_of(ops: Iterable[dict[str, object]]) -> Graph:
    """Ops that all read the batch; each dict holds arguments of `GraphBuilder.op`."""
    builder = GraphBuilder("ops")
    batch = builder.tensor("batch", 64, role=Role.INPUT)
    for index, op in enumerate(ops):
        number = builder.op(f"op{index}", reads=[batch], **op)  # type: ignore[arg-type]
        builder.tensor(f"out{index}", 64, producer=number)
    return builder.build()


def step_graph() -> Graph:
    """One op of each interesting sort, with signatures."""
    return graph_of(
        [
            {"kind": "aten.mm", "flops": 1e12, "bytes_touched": 10**8, "signature": "mm big"},
            {"kind": "aten.add", "bytes_touched": 10**9, "signature": "add big"},
            {"kind": "aten.add", "bytes_touched": 10, "signature": "add small"},
            {"kind": "aten.view", "signature": "view"},
            {"kind": "aten.mm", "flops": 1e12, "bytes_touched": 10**8, "signature": "mm big",
             "phase": Phase.BACKWARD},
            {"kind": "optimizer.adamw", "bytes_touched": 10**8, "phase": Phase.OPTIMIZER},
        ]
    )  # fmt: skip


def profile_of(
    entries: Iterable[ProfileEntry],
    host: HostOverhead = HostOverhead(),  # noqa: B008 frozen
    kind: str = "tesla",
) -> Profile:
    return Profile(
        device_kind=kind,
        device="a test device",
        versions={"torch": "0"},
        host=host,
        entries=tuple(sorted(entries, key=lambda entry: entry.signature)),
    )


def entry_of(signature: str, seconds: float, **changes: object) -> ProfileEntry:
    values: dict[str, object] = {
        "signature": signature,
        "kind": "aten.mm",
        "dtype": "float32",
        "flops": 1e9,
        "bytes_touched": 10**6,
        "count": 1,
        "seconds": seconds,
    }
    return ProfileEntry(**(values | changes))  # type: ignore[arg-type]
