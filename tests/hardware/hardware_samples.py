"""Parts of hardware files for the tests of this room."""

from __future__ import annotations

import tomllib

from hocket.hardware import Cluster, cluster_from_dict

KIND = """
[kinds.small]
memory = "2GiB"
memory_bandwidth = "100GB/s"
peak = { float32 = "1TFLOP/s" }
"""
LINKED = KIND + 'host_link = { bandwidth = "12GB/s", latency = "5us" }\n'
DEVICES = '[[devices]]\nkind = "small"\ncount = 2\n'


def from_toml(text: str) -> Cluster:
    return cluster_from_dict(tomllib.loads(text), "test.toml")
