"""A model as Piper describes it: layers with ways to run them per tensor degree, read from JSON.

The format is that of the inputs published with Tarnawski et al., "Piper: Multidimensional Planner
for DNN Parallelization", NeurIPS 2021. Times are seconds (in some files milliseconds) per
microbatch, forward and backward together; sizes are bytes.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.base.fields import integer, items, located, mapping, number, record, text
from hocket.base.jsonfile import read_json

MAX_DEVICES = 65_536
MAX_NODES = 10_000
_MAX_MEMORY_BYTES = 1e14
_MAX_BYTES = 1e18
_MAX_SECONDS = 1e12
_VARIANT_KEYS = (
    "id", "timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB", "syncTimeFw",
    "syncTimeBw",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a layer with some tensor degree, per device."""

    name: str
    time_s: float
    """Forward and backward of one microbatch."""
    parameter_bytes: float
    """What data-parallel replicas synchronise after a batch."""
    activation_bytes: float
    """Kept for each microbatch in flight."""
    fixed_bytes: float
    """Kept always."""
    sync_forward: Mapping[int, float]
    """Bytes exchanged inside the tensor group for what comes from each predecessor."""
    sync_backward: Mapping[int, float]
    """The same for what goes to each successor."""


@dataclass(frozen=True, kw_only=True)
class PiperNode:
    """A layer."""

    id: int
    name: str
    variants: Mapping[int, tuple[Variant, ...]]
    """By tensor degree."""


@dataclass(frozen=True, kw_only=True)
class PiperInput:
    """A model and the devices that it is divided over."""

    max_devices: int
    memory_bytes: float
    """Of one device."""
    bandwidth_bps: float
    num_microbatches: int
    """Microbatches of a batch."""
    nodes: tuple[PiperNode, ...]
    edges: Mapping[tuple[int, int], float]
    """Bytes of a microbatch from one layer to another, by their ids."""


def read_piper(path: str | Path) -> PiperInput:
    """The model of a file; raises `InputFileError` for anything that is not one."""
    with located(str(path)):
        return piper_input(read_json(path))


def piper_input(value: object) -> PiperInput:
    """The model of a JSON value."""
    memory = "maxMemoryPerDevice"
    keys = ("maxDevices", memory, "bandwidth", "mbsInBatch", "nodes", "edges")
    fields = record(value, "file", required=keys)
    edges = _edges(fields["edges"])
    entries = items(fields["nodes"], "nodes")
    nodes = tuple(_node(entry, f"nodes[{index}]") for index, entry in enumerate(entries))
    _check_graph(nodes, edges)
    return PiperInput(
        max_devices=integer(fields["maxDevices"], "maxDevices", 1, MAX_DEVICES),
        memory_bytes=number(fields[memory], memory, 1, _MAX_MEMORY_BYTES),
        bandwidth_bps=number(fields["bandwidth"], "bandwidth", 1e-6, _MAX_BYTES),
        num_microbatches=integer(fields["mbsInBatch"], "mbsInBatch", 1, 10**9),
        nodes=nodes,
        edges=edges,
    )


def _edges(value: object) -> dict[tuple[int, int], float]:
    edges: dict[tuple[int, int], float] = {}
    for index, entry in enumerate(items(value, "edges")):
        path = f"edges[{index}]"
        fields = record(entry, path, required=("sourceId", "destId", "communicationCost"))
        src = _id(fields["sourceId"], f"{path}.sourceId")
        dst = _id(fields["destId"], f"{path}.destId")
        if (src, dst) in edges:
            raise InputFileError(
                f"{path} repeats the edge from {src} to {dst}", hint="join the two into one"
            )
        cost = number(fields["communicationCost"], f"{path}.communicationCost", 0, _MAX_BYTES)
        edges[src, dst] = cost
    return edges


def _node(value: object, path: str) -> PiperNode:
    fields = record(value, path, required=("id", "TMPCs"), optional=("name",))
    variants: dict[int, tuple[Variant, ...]] = {}
    for key, entries in mapping(fields["TMPCs"], f"{path}.TMPCs").items():
        place = f"{path}.TMPCs"
        degree = integer(_whole(key, place), place, 1, MAX_DEVICES)
        found = [
            _variant(entry, f"{path}.TMPCs.{key}[{index}]")
            for index, entry in enumerate(items(entries, f"{path}.TMPCs.{key}"))
        ]
        if len({variant.name for variant in found}) < len(found):
            raise InputFileError(
                f"{path}.TMPCs.{key} has two variants of one id", hint="give each its own id"
            )
        if found:
            variants[degree] = tuple(found)
    if not variants:
        raise InputFileError(f"{path} has no way to be run", hint="add an entry to its TMPCs")
    return PiperNode(
        id=_id(fields["id"], f"{path}.id"),
        name=text(fields.get("name", ""), f"{path}.name"),
        variants=variants,
    )


def _variant(value: object, path: str) -> Variant:
    fields = record(value, path, required=_VARIANT_KEYS)

    def size(key: str) -> float:
        return number(fields[key], f"{path}.{key}", 0, _MAX_BYTES)

    return Variant(
        name=text(fields["id"], f"{path}.id"),
        time_s=number(fields["timePerSample"], f"{path}.timePerSample", 0, _MAX_SECONDS),
        parameter_bytes=size("parameterSize"),
        activation_bytes=size("memoryUsageA"),
        fixed_bytes=size("memoryUsageB"),
        sync_forward=_sync(fields["syncTimeFw"], f"{path}.syncTimeFw"),
        sync_backward=_sync(fields["syncTimeBw"], f"{path}.syncTimeBw"),
    )


def _sync(value: object, path: str) -> dict[int, float]:
    return {
        _whole(key, path): number(size, f"{path}.{key}", 0, _MAX_BYTES)
        for key, size in mapping(value, path).items()
    }


def _id(value: object, path: str) -> int:
    return integer(value, path, 0, 2**53)


def _whole(key: str, path: str) -> int:
    """A key that is a whole number."""
    if not (key.isascii() and key.isdigit() and len(key) <= 16):
        raise InputFileError(f"{path} has the key {key[:40]!r}", hint="expected a whole number")
    return int(key)


def _check_graph(nodes: tuple[PiperNode, ...], edges: Mapping[tuple[int, int], float]) -> None:
    """Ids that differ, edges between them without a cycle, and a sync size for every edge."""
    known = {node.id for node in nodes}
    if not 1 <= len(nodes) <= MAX_NODES:
        raise InputFileError(f"{len(nodes)} nodes", hint=f"expected 1 to {MAX_NODES}")
    if len(known) < len(nodes):
        raise InputFileError("two nodes have the same id", hint="give each its own id")
    for ends in edges:
        if not known.issuperset(ends):
            raise InputFileError(
                f"the edge from {ends[0]} to {ends[1]} has no node at one end",
                hint="name ids of nodes",
            )
    before: dict[int, set[int]] = {node.id: set() for node in nodes}
    after: dict[int, set[int]] = {node.id: set() for node in nodes}
    for src, dst in edges:
        before[dst].add(src)
        after[src].add(dst)
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        raise InputFileError("the edges have a cycle", hint="layers must have an order") from None
    for node in nodes:
        for variant in (v for variants in node.variants.values() for v in variants):
            if set(variant.sync_forward) != before[node.id]:
                raise _sync_mismatch(node, variant, "syncTimeFw", "predecessor")
            if set(variant.sync_backward) != after[node.id]:
                raise _sync_mismatch(node, variant, "syncTimeBw", "successor")


def _sync_mismatch(node: PiperNode, variant: Variant, key: str, what: str) -> InputFileError:
    return InputFileError(
        f"{key} of node {node.id}, variant {variant.name[:40]!r}, does not fit the edges",
        hint=f"give one size for every {what}",
    )
