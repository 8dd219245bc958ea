"""Placements to compare with: one device, layer blocks, device-map-auto, and expert files.

Layer blocks are equal contiguous blocks of layers, the way models are commonly split by hand.
Layers are module paths up to their first number ("transformer.h.3"), in the order of the forward
pass; an op outside any layer belongs to the layer before it. Every device gets the same number of
layers, or of forward ops if there are fewer layers than devices. A unit that its device cannot run
goes to the nearest device in the order that can. Speeds and sizes are ignored on purpose. O(ops +
reads). The file also holds three further baselines, each described above its code: the best single
device, Accelerate's ``device_map="auto"``, and placements that the user wrote into a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hocket.base import fields
from hocket.base.arrays import IntArray
from hocket.base.errors import InputFileError, NoFeasiblePlanError, did_you_mean
from hocket.base.jsonfile import read_json
from hocket.graph.coarsen import anchor_of, tied_ops
from hocket.graph.graph import Graph, Phase, Role
from hocket.hardware.cluster import Cluster
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.candidates import empty_plan
from hocket.planners.devices import elsewhere, runnable, workers
from hocket.simulate.engine import simulate

# One device: no parallelism, no transfers; the number that every other plan must beat.
#
# Takes the fastest device on which the whole step fits, or, where it fits nowhere, the one with the
# most memory so that the shortage shown is the smallest. O(kinds of device · (ops + reads)).

ONE_DEVICE = "one-device"
"""Name under which the one-device planner is registered."""


def on_one_device(problem: Problem) -> Plan:
    """Return the plan of the one-device planner, starting from an empty plan."""
    return one_device(problem, empty_plan(problem, ONE_DEVICE))


def one_device(problem: Problem, plan: Plan) -> Plan:
    """Place every op on the best single device."""
    seconds = problem.costs.op_s.sum(axis=1)[problem.costs.device_row]
    memory = problem.memory_bytes
    order = sorted(range(len(memory)), key=lambda d: (seconds[d], -memory[d], d))
    tried: set[tuple[int, int]] = set()
    for device in order:
        # Devices of one type and memory size give the same result: only the first is simulated.
        alike = (int(problem.costs.device_row[device]), int(memory[device]))
        if alike in tried or not np.isfinite(seconds[device]):
            continue
        tried.add(alike)
        candidate = _all_on(problem, plan, device)
        if simulate(problem, candidate).peak_bytes[device] <= memory[device]:
            return candidate
    able = [device for device in order if np.isfinite(seconds[device])]
    if not able:
        raise NoFeasiblePlanError("no single device can run every op")
    return _all_on(problem, plan, max(able, key=lambda d: (memory[d], -d)))


def _all_on(problem: Problem, plan: Plan, device: int) -> Plan:
    return plan.having(Placement(np.full(problem.graph.num_ops, device, dtype=np.int32)))


# device-map-auto: fill devices with modules by the size of their parameters alone.
#
# The rule behind ``device_map="auto"`` of Hugging Face Accelerate. Modules are walked in the order
# in which the model defines them; each device takes modules until its equal share of the
# parameters, plus 1.25 times the largest repeated block, is full, and the first device also keeps
# memory free for the largest module that is still to come. Speed, links, activations,
# gradients and optimizer states are ignored: a split in common use, to compare with.
# O(ops + reads).

_BLOCK_HEADROOM = 1.25
"""Multiple of the largest block added to each device's equal part; Accelerate uses the same."""
_WEIGHTS = (Role.PARAMETER, Role.BUFFER)


@dataclass(frozen=True)
class _WholeModule:
    """A module that is never split across devices, and the bytes of its parameters and buffers."""

    path: str
    size_bytes: int


def device_map_auto(problem: Problem, plan: Plan) -> Plan:
    """Place blocks of modules by parameter bytes, and every op with its block."""
    graph, devices = problem.graph, workers(problem)
    device_of_block = _fill(
        _blocks(graph), problem.memory_bytes[devices].tolist(), _leaf_bytes(graph)
    )
    turn = _turn_of_ops(graph, device_of_block)
    bundle = tied_ops(graph)
    special = elsewhere(problem, bundle)
    planned = devices[turn[anchor_of(graph, bundle)]]
    device_of_bundle = np.where(special >= 0, special, planned).astype(np.int32)
    can_run = runnable(problem, bundle)
    for stuck in np.flatnonzero(~can_run[device_of_bundle, np.arange(len(planned))]):
        device_of_bundle[stuck] = devices[can_run[devices, stuck]][0]
    return plan.having(Placement(device_of_bundle[bundle]))


def _fill(blocks: list[_WholeModule], memory_bytes: list[int], leaf_bytes: float) -> dict[str, int]:
    """Map each block's path to the position of its device, filling one device after another."""
    last = len(memory_bytes) - 1
    total = sum(block.size_bytes for block in blocks)
    numbered = (b.size_bytes for b in blocks if b.path.rpartition(".")[2].isdigit())
    largest = max(numbered, default=0)
    share = total // (last + 1) + int(_BLOCK_HEADROOM * max(largest, leaf_bytes))
    # The last device gets all of its memory: rounding must not leave a block without device.
    limits = [min(share, has) for has in memory_bytes[:last]] + [memory_bytes[last]]
    sizes = np.array([block.size_bytes for block in blocks] + [0], dtype=np.int64)
    to_come = np.maximum.accumulate(sizes[::-1])[::-1][1:].tolist()
    device_of, turn, used = dict[str, int](), 0, 0
    for block, left in zip(blocks, to_come, strict=True):
        # As in Accelerate, only the first device reserves space for the largest later module.
        while turn < last and used + block.size_bytes > limits[turn] - (left if turn == 0 else 0):
            turn, used = turn + 1, 0
        device_of[block.path] = turn
        used += block.size_bytes
    return device_of


def _blocks(graph: Graph) -> list[_WholeModule]:
    """Return the blocks in the order in which the model defines their parameters."""
    sizes: dict[str, int] = {}
    for tensor in _weights(graph).tolist():
        path = block_path(_module_of_weight(graph.tensor_names[tensor]))
        sizes[path] = sizes.get(path, 0) + int(graph.held_bytes[tensor])
    return [_WholeModule(path, size) for path, size in sizes.items()]


def _leaf_bytes(graph: Graph) -> float:
    """Mean parameter and buffer bytes of the modules that own some directly."""
    sizes: dict[str, int] = {}
    for tensor in _weights(graph).tolist():
        leaf = _module_of_weight(graph.tensor_names[tensor])
        sizes[leaf] = sizes.get(leaf, 0) + int(graph.held_bytes[tensor])
    return sum(sizes.values()) / max(len(sizes), 1)


def _weights(graph: Graph) -> IntArray:
    is_weight = np.isin(graph.tensor_role, _WEIGHTS) & (graph.tensor_producer < 0)
    return np.flatnonzero(is_weight).astype(np.int32)


def _module_of_weight(name: str) -> str:
    return name.rpartition(".")[0] or name


def _turn_of_ops(graph: Graph, device_of_block: dict[str, int]) -> IntArray:
    """Per op: position of its device, taken from a weight it reads, else from its block.

    Forward ops with neither take the position of the forward op before them. A tied weight is
    placed where the model first defines it, together with the ops that read it.
    """
    turn_of_weight = np.full(graph.num_tensors, -1, dtype=np.int32)
    for tensor in _weights(graph).tolist():
        path = block_path(_module_of_weight(graph.tensor_names[tensor]))
        turn_of_weight[tensor] = device_of_block[path]
    of_module = [device_of_block.get(block_path(module), -1) for module in graph.modules]
    turns = np.array([*of_module, -1], dtype=np.int32)[graph.op_module]
    read = turn_of_weight[graph.reads]
    # `np.unique` returns the first position of each reader: its first weight decides.
    reader = graph.reader[read >= 0]
    reader, first = np.unique(reader, return_index=True)
    turns[reader] = read[read >= 0][first]
    forward = np.flatnonzero(graph.op_phase == Phase.FORWARD)
    known = np.where(turns[forward] >= 0, np.arange(len(forward)), -1)
    last_known = np.maximum.accumulate(known)
    turns[forward] = np.where(last_known >= 0, turns[forward[last_known]], 0)
    # Backward and optimizer ops may have neither block nor weight; they follow a forward op.
    return np.maximum(turns, 0)


# Expert files: a placement written by the user, by module or by op.
#
# ``--planner expert:FILE`` reads a JSON file that lists, per device, module paths or names of ops;
# the longest path that contains an op decides, and backward and optimizer ops follow
# their forward op. O(ops + paths).

EXPERT_SCHEMA = "hocket.expert/1"
_MAX_BYTES = 64 * 2**20


def expert(path: str | Path) -> Callable[[Problem, Plan], Plan]:
    """A planner that places ops according to the file."""
    data, where = read_json(Path(path), max_bytes=_MAX_BYTES), str(path)

    def place(problem: Problem, plan: Plan) -> Plan:
        if isinstance(data, dict) and data.get("schema") == EXPERT_SCHEMA:
            listed = _by_path(data, problem.graph, problem.cluster, where)
        else:
            raise InputFileError(
                f"this is not a {EXPERT_SCHEMA} file",
                hint='write {"schema": "hocket.expert/1", "devices": {"gpu0": ["module.path"]}}',
                where=where,
            )
        return plan.having(Placement(_completed(listed, problem.graph, where)))

    return place


def _by_path(data: object, graph: Graph, cluster: Cluster, where: str) -> IntArray:
    """Per op: the device of the most specific listed path that contains it; -1 if none does."""
    file = fields.record(data, "the file", required=("schema", "devices"))
    devices = fields.mapping(file["devices"], "devices")
    number = {name: index for index, name in enumerate(cluster.device_names)}
    device_of_path: dict[str, int] = {}
    for name, paths in devices.items():
        if name not in number:
            raise _unknown("device", name, number, where)
        for index, item in enumerate(fields.items(paths, f"devices.{name}")):
            path = fields.text(item, f"devices.{name}[{index}]")
            if device_of_path.setdefault(path, number[name]) != number[name]:
                raise InputFileError(f"{path!r} is listed on two devices", where=where)
    met: set[str] = set()
    listed = np.full(graph.num_ops, -1, dtype=np.int32)
    for op in range(graph.num_ops):
        containing = [path for path in _paths_of(graph, op) if path in device_of_path]
        met.update(containing)
        if containing:
            # `_paths_of` lists the innermost path first, so the first match is the most specific.
            listed[op] = device_of_path[containing[0]]
    for path in device_of_path:
        if path not in met:
            raise _unknown("module or op", path, (*graph.modules, *graph.op_names), where)
    return listed


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> InputFileError:
    return InputFileError(f"unknown {what} {name!r}", hint=did_you_mean(name, known), where=where)


def _paths_of(graph: Graph, op: int) -> list[str]:
    """Names by which a file may refer to an op: its own, then its modules, innermost first."""
    parts = graph.module_of(op).split(".")
    return [graph.op_names[op], *(".".join(parts[:n]) for n in range(len(parts), 0, -1))]


def _completed(listed: IntArray, graph: Graph, where: str) -> IntArray:
    """Place each op that the file does not list on the device of the forward op it is tied to."""
    bundle = tied_ops(graph)
    anchor = anchor_of(graph, bundle)
    planned = np.where(listed >= 0, listed, listed[anchor[bundle]])
    missing = np.flatnonzero(planned < 0)
    if len(missing):
        op = int(missing[0])
        raise InputFileError(
            f"the file says nothing of op {graph.op_names[op]!r} ({len(missing)} ops in all)",
            hint=f"list {graph.module_of(op)!r} or a module around it"
            if graph.module_of(op)
            else "list the op",
            where=where,
        )
    return planned.astype(np.int32)


_UP_TO_FIRST_NUMBER = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")


def layer_blocks(problem: Problem, plan: Plan) -> Plan:
    """Place equal contiguous blocks of layers on the devices in order."""
    graph, devices = problem.graph, workers(problem)
    layer = layer_of(graph)
    if layer.max(initial=-1) + 1 < len(devices):
        layer = _forward_position(graph)
    num_layers = int(layer.max(initial=0)) + 1
    block_of_layer = devices[np.arange(num_layers) * len(devices) // num_layers]
    unit = tied_ops(graph)
    special = elsewhere(problem, unit)
    planned = block_of_layer[layer[anchor_of(graph, unit)]]
    device_of_unit = np.where(special >= 0, special, planned).astype(np.int32)
    can_run = runnable(problem, unit)
    for stuck in np.flatnonzero(~can_run[device_of_unit, np.arange(len(planned))]):
        able = devices[can_run[devices, stuck]]
        device_of_unit[stuck] = able[np.argmin(np.abs(able - planned[stuck]))]
    return plan.having(Placement(device_of_unit[unit]))


def block_path(module: str) -> str:
    """The part of a module path that is never split: up to its first number, or all of it."""
    match = _UP_TO_FIRST_NUMBER.match(module)
    return match[0] if match else module


def layer_of(graph: Graph) -> IntArray:
    """Per op: its layer in forward order; 0 before the first layer and outside the forward pass."""
    number: dict[str, int] = {}
    layer_of_module: dict[int, int] = {}
    layers = np.zeros(graph.num_ops, dtype=np.int32)
    current = 0
    for op in np.flatnonzero(graph.op_phase == Phase.FORWARD):
        module = int(graph.op_module[op])
        if module not in layer_of_module:
            match = _UP_TO_FIRST_NUMBER.match(graph.module_of(int(op)))
            layer_of_module[module] = number.setdefault(match[0], len(number)) if match else -1
        known = layer_of_module[module]
        current = known if known >= 0 else current
        layers[op] = current
    return layers


def _forward_position(graph: Graph) -> IntArray:
    """Position of each op among the forward ops that do work."""
    counted = (graph.op_phase == Phase.FORWARD) & graph.works
    if not counted.any():
        counted = graph.op_phase == Phase.FORWARD
    position: IntArray = np.maximum(np.cumsum(counted) - 1, 0).astype(np.int32)
    return position
