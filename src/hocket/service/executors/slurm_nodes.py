"""The devices of a Slurm cluster: slots of its nodes, from ``scontrol show node``.

A node with generic resources (``Gres=gpu:v100:4``) has as many devices as GPUs, of the type named
there. Any other node has one device per core, of the type that its first feature names. Nodes that
are down, drained or powered off have none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hocket.fleet.rounds.state import FleetDevice

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""Valid names of nodes and device types; in options of Slurm other characters have a meaning.

With ``device_types``, only these features count as types; else the first feature of a node does.
``before`` are nodes that worked earlier: a restarted controller reports them as unknown at first.
"""
_FIELD = re.compile(r"(?:^|\s)([A-Za-z_]+)=(\S*)")
_GPUS = re.compile(r"gpu:(?:([A-Za-z0-9_.-]+):)?([0-9]{1,4})(?:\(|$)")
_WORKING = frozenset(("IDLE", "MIXED", "ALLOCATED", "COMPLETING"))
_HARMLESS = frozenset(("CLOUD", "COMPLETING", "DYNAMIC_NORM", "PLANNED", "RESERVED"))


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
    """A node that can run jobs."""

    name: str
    device_type: str
    num_devices: int
    cpus_per_device: int
    """Cores per device; 0 if devices are GPUs."""
    gpu_type: str
    """GPU type in Slurm; empty if devices are no GPUs, or GPUs without a type."""

    @property
    def devices(self) -> tuple[FleetDevice, ...]:
        """Devices of the node, one per slot."""
        names = (f"{self.name}/{slot}" for slot in range(self.num_devices))
        return tuple(
            FleetDevice(name=name, device_type=self.device_type, server=self.name) for name in names
        )


def parse_nodes(
    text: str, device_types: Collection[str] = (), before: Collection[str] = ()
) -> dict[str, SlurmNode]:
    """Working nodes of ``scontrol --oneliner show node``, by name.

    With ``device_types``, only these features count as types; else the first feature of a node
    does. ``before`` are nodes that worked earlier: a restarted controller reports them as unknown
    at first.
    """
    nodes = (_node(line, device_types, before) for line in text.splitlines())
    return {node.name: node for node in nodes if node is not None}


def node_of(device: str) -> str:
    """The node of a device."""
    return device.rpartition("/")[0]


def devices_per_node(devices: Iterable[str]) -> dict[str, int]:
    """Number of devices of each node, in order of the first."""
    return dict(Counter(node_of(device) for device in devices))


def _node(line: str, device_types: Collection[str], before: Collection[str]) -> SlurmNode | None:
    fields: dict[str, str] = {}
    for key, value in _FIELD.findall(line):
        # Free-text remarks come last and may look like fields, so the first occurrence counts.
        fields.setdefault(key, value)
    name = fields.get("NodeName", "")
    state = fields.get("State", "")
    is_working = _is_working(state) or (state.startswith("UNKNOWN") and name in before)
    if not _WORD.fullmatch(name) or not is_working:
        return None
    features = fields.get("ActiveFeatures", "").split(",")
    feature = next((word for word in features if not device_types or word in device_types), "")
    gpus = _GPUS.match(fields.get("Gres", ""))
    device_type = (gpus[1] or feature) if gpus else feature
    if (
        not _WORD.fullmatch(device_type)
        or device_type == "(null)"
        or (device_types and device_type not in device_types)
    ):
        return None
    threads = max(_whole(fields.get("ThreadsPerCore")), 1)
    return SlurmNode(
        name=name,
        device_type=device_type,
        num_devices=int(gpus[2]) if gpus else _whole(fields.get("CPUTot")) // threads,
        cpus_per_device=0 if gpus else threads,
        gpu_type=(gpus[1] or "") if gpus else "",
    )


def _is_working(state: str) -> bool:
    # A star means that the node does not respond; Slurm reports it as down if that lasts.
    base, *flags = state.replace("*", "").split("+")
    return base in _WORKING and _HARMLESS.issuperset(flags)


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 10 else 0
