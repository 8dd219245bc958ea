"""Layer blocks: equal contiguous blocks of layers, as people split a model by hand.

Layers are module paths up to their first number ("transformer.h.3"), in the order of the forward
pass; what stands between them goes with the layer before. Every device gets the same number of
layers, or of forward ops where modules are unknown; what a device cannot run goes to the nearest
that can. Speeds and sizes are ignored on purpose: it is the split to compare with. O(ops + reads).
"""

from __future__ import annotations

import re

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.coarsen import anchor_of, tied_ops
from hocket.graph.graph import Graph, Phase
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.placement.devices import elsewhere, runnable, workers

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
    """The layer of each op, counted in the order of the forward pass; all 0 where unknown."""
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
