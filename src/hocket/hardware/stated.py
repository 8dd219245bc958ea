"""The cluster that a graph file states itself (``--on file``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.base.errors import UsageError
from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link

UNLIMITED_BYTES = 2**50
"""Memory of CPUs, for which these files state no limit."""
_HOST = "host"
_MAX_DEVICES = 1024


def stated_cluster(meta: Mapping[str, Any], name: str = "file") -> Cluster:
    """Cluster of the accelerators and CPUs in ``meta["cluster"]`` of a graph, around one host.

    The file states the times of its ops and transfers, so the rates here are placeholders: one op
    and one byte per nanosecond. A transfer crosses two links, one out of a device and one into
    another.
    """
    stated = meta.get("cluster", {})
    stated = stated if isinstance(stated, Mapping) else {}
    accelerators, cpus = (_number(stated, key, 0, name) for key in ("accelerators", "cpus"))
    if not 0 < accelerators + cpus <= _MAX_DEVICES:
        message = f"states a cluster of {accelerators + cpus} devices; at most {_MAX_DEVICES} work"
        raise UsageError(
            f"the graph's file {message if accelerators + cpus else 'states no devices'}",
            where=name,
            hint="name the hardware, such as --on 4xv100-16g",
        )
    memory_bytes = max(1, _number(stated, "accelerator_memory_bytes", UNLIMITED_BYTES, name))
    accelerator, cpu = _kind("accelerator", memory_bytes), _kind("cpu", UNLIMITED_BYTES)
    devices = (
        *(_device(f"acc{index}", accelerator) for index in range(accelerators)),
        *(_device(f"cpu{index}", cpu) for index in range(cpus)),
    )
    links = tuple(
        Link(name=f"{d.name}-{_HOST}", ends=(d.name, _HOST), bandwidth_bps=1e9, latency_s=0.0)
        for d in devices
    )
    return Cluster(
        name=name,
        devices=devices,
        hosts=(_HOST,),
        links=links,
        uses_stated_times=True,
        meta={"from": "file"},
    )


def _number(stated: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = stated.get(key, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 2**62 or value != int(value):
        raise UsageError(
            f"{key} is {str(value)[:40]!r}, not a whole number of 0 or more",
            where=where,
            hint="correct the file, or name the hardware with --on",
        )
    return min(int(value), UNLIMITED_BYTES)


def _kind(name: str, memory_bytes: int) -> DeviceKind:
    return DeviceKind(
        name=name,
        memory_bytes=memory_bytes,
        peak_flops={"float32": 1e9},
        memory_bandwidth_bps=1e9,
        is_cpu=name == "cpu",
        source="stated by the graph's file",
    )


def _device(name: str, kind: DeviceKind) -> Device:
    return Device(name=name, kind=kind, host=_HOST, memory_bytes=kind.memory_bytes)
