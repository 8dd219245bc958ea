"""The network that parallel training sees of a cluster."""

from __future__ import annotations

from hocket.hardware.cluster import Cluster
from hocket.hardware.network import Network

__all__ = ["Network", "network_of"]


def network_of(cluster: Cluster) -> Network:
    """Devices per host, and what each device gets inside its host and between hosts."""
    return cluster.network
