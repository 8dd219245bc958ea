"""Which devices the nodes of a Ray cluster have, and what they are called.

A node offers devices by custom resources ``accel_<kind>``, or by Ray's resource ``GPU`` with a
label that says their kind. Where it has both, both are reserved: then Ray also shows the job
which GPUs are its own. Devices are called ``<node>/<kind>/<number>``.

A node of Ray gets a new id whenever it starts, and several may have one name; people and the state
of a fleet need names that stay. So each node that lives holds a name alone, and gives it up when it
dies: the next node that calls itself the same takes it over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hocket.fleet.rounds.state import FleetDevice

RESOURCE_PREFIX = "accel_"
GPU = "GPU"
KIND_LABELS = ("hocket/kind", "ray.io/accelerator-type")
"""Labels that name the kind of a node's GPUs; the first that is there counts."""
NODE_ID_LABEL = "ray.io/node-id"


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A living node."""

    node_id: str
    title: str
    """Its own name."""
    address: str
    num_devices: Mapping[str, int]
    """By kind."""
    resources: Mapping[str, tuple[str, ...]]
    """Of Ray, by kind; one unit of each is reserved for a device."""


@dataclass(frozen=True, kw_only=True)
class RayBundle:
    """The devices of an attempt on one node."""

    node_id: str
    address: str
    devices: tuple[str, ...]
    first_rank: int
    reserved: Mapping[str, float]


def read_nodes(rows: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """The living nodes of ``ray.nodes()``."""
    return sorted(
        (_read_node(row) for row in rows if row["Alive"]),
        key=lambda node: (node.title, node.node_id),
    )


def _read_node(row: Mapping[str, Any]) -> RayNode:
    resources: Mapping[str, float] = row["Resources"]
    num_gpus = int(resources.get(GPU, 0))
    num_devices = {
        name.removeprefix(RESOURCE_PREFIX): int(amount)
        for name, amount in resources.items()
        if name.startswith(RESOURCE_PREFIX) and name != RESOURCE_PREFIX and amount >= 1
    }
    also = (GPU,) if num_gpus >= sum(num_devices.values()) else ()
    names = {kind: (RESOURCE_PREFIX + kind, *also) for kind in num_devices}
    labels: Mapping[str, str] = row.get("Labels") or {}
    label = next((labels[name] for name in KIND_LABELS if labels.get(name)), "")
    if not num_devices and num_gpus and label:
        num_devices, names = {label.lower(): num_gpus}, {label.lower(): (GPU,)}
    address = row["NodeManagerAddress"]
    return RayNode(
        node_id=row["NodeID"],
        title=row.get("NodeName") or address,
        address=address,
        num_devices=num_devices,
        resources=names,
    )


def name_nodes(nodes: Iterable[RayNode], before: Mapping[str, str]) -> dict[str, RayNode]:
    """A name for each node; ``before`` has the id of each name so far."""
    waiting = {node.node_id: node for node in nodes}
    named = {name: waiting.pop(owner) for name, owner in before.items() if owner in waiting}
    for node in waiting.values():
        named[_free_name(node.title.replace("/", "-"), named)] = node
    return dict(sorted(named.items()))


def _free_name(title: str, taken: Mapping[str, RayNode]) -> str:
    number, name = 1, title
    while name in taken:
        number += 1
        name = f"{title}#{number}"
    return name


def devices_of(named: Mapping[str, RayNode]) -> list[FleetDevice]:
    """All devices of the named nodes."""
    return [
        FleetDevice(name=f"{name}/{kind}/{number}", kind=kind, server=name)
        for name, node in named.items()
        for kind, amount in sorted(node.num_devices.items())
        for number in range(amount)
    ]


def bundles_of(
    devices: Iterable[str], kind: str, named: Mapping[str, RayNode]
) -> list[RayBundle] | str:
    """Resources to reserve for devices, node by node; the name of a device that is missing."""
    by_node: dict[str, list[str]] = {}
    for device in devices:
        name, _, number = device.rpartition(f"/{kind}/")
        node = named.get(name)
        if node is None or not number.isdigit() or int(number) >= node.num_devices.get(kind, 0):
            return device
        by_node.setdefault(name, []).append(device)
    bundles: list[RayBundle] = []
    for name, members in by_node.items():
        node = named[name]
        bundle = RayBundle(
            node_id=node.node_id,
            address=node.address,
            devices=tuple(members),
            first_rank=sum(len(before.devices) for before in bundles),
            reserved=dict.fromkeys(node.resources[kind], float(len(members))),
        )
        bundles.append(bundle)
    return bundles
