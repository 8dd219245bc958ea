"""Clusters: presets, files, shorthand, this machine."""

from __future__ import annotations

from dataclasses import replace

from hocket.base.extras import require
from hocket.hardware.cluster import Cluster
from hocket.hardware.files import cluster_to_toml, read_machine
from hocket.hardware.kinds import PRESETS, preset_kinds
from hocket.hardware.shorthand import cluster_from_text, joining_note, machine_names

__all__ = [
    "PRESETS",
    "cluster_from_text",
    "cluster_to_toml",
    "detect",
    "joining_note",
    "machine_names",
    "preset_kinds",
    "probe_links",
    "read_machine",
]


def detect(processes: int = 1) -> Cluster:
    """The cluster of this machine; host times are measured if PyTorch can use its GPUs.

    Measured are the dispatch of ops, copies between host and device, and updates on the host.
    """
    from hocket.hardware.detect import detect as detect_hardware

    cluster = detect_hardware(processes)
    if all(kind.is_cpu for kind in cluster.kinds):
        return cluster
    try:
        import torch
    except ImportError:
        return cluster
    if not torch.cuda.is_available():
        return cluster
    from hocket.cost.dispatch import measure_dispatch_s
    from hocket.runtime.offload.host_bandwidth import with_measured_host

    device = torch.device("cuda", 0)
    return with_dispatch(with_measured_host(cluster, device), measure_dispatch_s(device))


def with_dispatch(cluster: Cluster, dispatch_s: float) -> Cluster:
    """The cluster with a measured dispatch time on every accelerator."""
    kinds = {
        kind.name: kind if kind.is_cpu else replace(kind, dispatch_s=dispatch_s)
        for kind in cluster.kinds
    }
    devices = (replace(device, kind=kinds[device.kind.name]) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def probe_links() -> tuple[int, Cluster]:
    """This rank, and a cluster with measured links between all ranks; every rank must call this."""
    require("torch", "probing links")
    from hocket.runtime.collectives.link_probe import probe_launched

    return probe_launched()
