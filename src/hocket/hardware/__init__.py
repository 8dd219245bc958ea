"""The Cluster: what to compute on."""

from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link
from hocket.hardware.routes import Routes

__all__ = ["Cluster", "Device", "DeviceKind", "Link", "Routes"]
