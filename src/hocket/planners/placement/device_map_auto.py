"""device-map-auto: fill devices with modules by the size of their parameters alone.

The rule behind ``device_map="auto"`` of Hugging Face Accelerate. Modules are walked in the order in
which the model defines them; each device takes modules until its equal share of the parameters,
plus room for one and a quarter of the largest repeated block, is full, and the first device also
keeps room for the largest module that is still to come. Speed, links, activations, gradients and
optimizer states do not count: it is the split that people get, to compare with. O(ops + reads).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.coarsen import anchor_of, tied_ops
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.placement.devices import elsewhere, runnable, workers
from hocket.planners.placement.layer_blocks import block_path

_ROOM_FOR_BLOCK = 1.25
"""How much of the largest block is added to the share of each device."""
_WEIGHTS = (Role.PARAMETER, Role.BUFFER)


@dataclass(frozen=True)
class _WholeModule:
    """A module that is never split, with the bytes of its parameters and buffers."""

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
    """The position of the device that each block goes to."""
    last = len(memory_bytes) - 1
    total = sum(block.size_bytes for block in blocks)
    numbered = (b.size_bytes for b in blocks if b.path.rpartition(".")[2].isdigit())
    largest = max(numbered, default=0)
    share = total // (last + 1) + int(_ROOM_FOR_BLOCK * max(largest, leaf_bytes))
    limits = [min(share, has) for has in memory_bytes[:last]] + [memory_bytes[last]]
    sizes = np.array([block.size_bytes for block in blocks] + [0], dtype=np.int64)
    to_come = np.maximum.accumulate(sizes[::-1])[::-1][1:].tolist()
    device_of, turn, used = dict[str, int](), 0, 0
    for block, left in zip(blocks, to_come, strict=True):
        while turn < last and used + block.size_bytes > limits[turn] - (left if turn == 0 else 0):
            turn, used = turn + 1, 0
        device_of[block.path] = turn
        used += block.size_bytes
    return device_of


def _blocks(graph: Graph) -> list[_WholeModule]:
    """Blocks in the order in which the model defines their parameters."""
    sizes: dict[str, int] = {}
    for tensor in _weights(graph).tolist():
        path = block_path(_module_of_weight(graph.tensor_names[tensor]))
        sizes[path] = sizes.get(path, 0) + int(graph.held_bytes[tensor])
    return [_WholeModule(path, size) for path, size in sizes.items()]


def _leaf_bytes(graph: Graph) -> float:
    """Mean bytes of the modules that own parameters directly."""
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
    """Per op, the position of its device: that of a weight it reads, of its block, or as before.

    A tied weight stands where the model first defines it, and takes the ops that read it along.
    """
    turn_of_weight = np.full(graph.num_tensors, -1, dtype=np.int32)
    for tensor in _weights(graph).tolist():
        path = block_path(_module_of_weight(graph.tensor_names[tensor]))
        turn_of_weight[tensor] = device_of_block[path]
    of_module = [device_of_block.get(block_path(module), -1) for module in graph.modules]
    turns = np.array([*of_module, -1], dtype=np.int32)[graph.op_module]
    read = turn_of_weight[graph.reads]
    reader = graph.reader[read >= 0]
    reader, first = np.unique(reader, return_index=True)
    turns[reader] = read[read >= 0][first]
    forward = np.flatnonzero(graph.op_phase == Phase.FORWARD)
    known = np.where(turns[forward] >= 0, np.arange(len(forward)), -1)
    last_known = np.maximum.accumulate(known)
    turns[forward] = np.where(last_known >= 0, turns[forward[last_known]], 0)
    return np.maximum(turns, 0)
