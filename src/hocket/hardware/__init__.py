"""Clusters: devices, hosts, switches and links."""

from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link
from hocket.hardware.files import (
    cluster_from_dict,
    cluster_to_dict,
    cluster_to_toml,
    read_cluster,
)
from hocket.hardware.routes import Routes
from hocket.hardware.shorthand import cluster_from_text
from hocket.hardware.stated import stated_cluster

__all__ = [
    "Cluster",
    "Device",
    "DeviceKind",
    "Link",
    "Routes",
    "cluster_from_dict",
    "cluster_from_text",
    "cluster_to_dict",
    "cluster_to_toml",
    "read_cluster",
    "stated_cluster",
]
