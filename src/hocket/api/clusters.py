"""The cluster of this machine with measured host times, and clusters with measured links."""

from __future__ import annotations

from dataclasses import replace

from hocket.base.extras import require
from hocket.hardware.cluster import Cluster


def detect(processes: int = 1) -> Cluster:
    """Return the cluster of this machine; measure host times if PyTorch can use its GPUs.

    The dispatch of ops, copies between host and device, and updates on the host are measured.
    ``processes`` is the number of devices that stand for the CPU in the cluster.
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

    # The first GPU stands for all: `with_dispatch` sets its result on every accelerator.
    device = torch.device("cuda", 0)
    return with_dispatch(with_measured_host(cluster, device), measure_dispatch_s(device))


def with_dispatch(cluster: Cluster, dispatch_s: float) -> Cluster:
    """Return the cluster with a measured dispatch time on every accelerator."""
    devices = (
        device
        if device.kind.is_cpu
        else replace(device, kind=replace(device.kind, dispatch_s=dispatch_s))
        for device in cluster.devices
    )
    return replace(cluster, devices=tuple(devices))


def probe_links() -> tuple[int, Cluster]:
    """Return this rank and a cluster with measured links; every rank must call this function."""
    require("torch", "probing links")
    from hocket.runtime.collectives.link_probe import probe_launched

    return probe_launched()
