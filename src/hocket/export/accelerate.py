"""Export a placement as a ``device_map`` of Hugging Face Accelerate, which maps modules to devices.

Accelerate moves whole modules, and their gradients follow. A module goes to the device of its
parameters, or, without parameters, to the device that runs most of its time. Time that the plan
spends on other devices is measured and reported, because a device map cannot express it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.graph.graph import Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate import owner_devices


@dataclass(frozen=True)
class DeviceMap:
    """Device map for Accelerate, and the fraction of the plan that it cannot express."""

    device_of: dict[str, int | str]
    """Module path to the number of an accelerator or ``"cpu"``; an empty path means the whole
    model.
    """
    elsewhere_share: float
    """Fraction of the computing time that the plan spends on another device than the module's."""

    @property
    def files(self) -> dict[str, str]:
        """The map as the content of a file, by file name."""
        return {"device_map.json": json.dumps(self.device_of, indent=1) + "\n"}


def device_map(problem: Problem, plan: Plan) -> DeviceMap:
    """Device map of a placement; raises `UsageError` if the graph names no modules."""
    graph, costs = problem.graph, problem.costs
    if plan.device_of is None or not len(graph.modules):
        raise UsageError(
            "a device_map names modules, and the plan's graph has none",
            hint="plan a model (hocket plan gpt2 …) or a graph that hocket capture wrote",
        )
    op_s = costs.op_s[costs.device_row[plan.device_of], np.arange(graph.num_ops)]
    spent = np.zeros((len(graph.modules) + 1, problem.cluster.num_devices))
    np.add.at(spent, (graph.op_module, plan.device_of), op_s)
    held = _held_bytes(problem, plan)
    device_of: dict[str, int] = {}
    for module, path in enumerate(graph.modules):
        if path and spent[module].any():
            device_of[path] = int(np.argmax(held.get(path, spent[module])))
    # Parameters decide even if the module has no ops: Accelerate needs an entry for each.
    device_of |= {path: int(np.argmax(sizes)) for path, sizes in held.items()}
    inside = [device_of.get(path, -1) for path in graph.modules]
    own = np.array([spent[module, device] for module, device in enumerate(inside) if device >= 0])
    named = np.array([spent[module].sum() for module, device in enumerate(inside) if device >= 0])
    elsewhere = 1 - own.sum() / named.sum() if named.sum() > 0 else 0.0
    names = _names(problem)
    found = {path: names[device] for path, device in _collapsed(device_of)}
    return DeviceMap(found, float(elsewhere))


def _held_bytes(problem: Problem, plan: Plan) -> dict[str, FloatArray]:
    """Bytes on each device of every module that directly owns parameters or buffers."""
    graph = problem.graph
    assert plan.device_of is not None
    devices = owner_devices(graph, plan.device_of)
    is_weight = np.isin(graph.tensor_role, (Role.PARAMETER, Role.BUFFER))
    held: dict[str, FloatArray] = {}
    for tensor in np.flatnonzero(is_weight & (graph.tensor_producer < 0)).tolist():
        path = graph.tensor_names[tensor].rpartition(".")[0]
        sizes = held.setdefault(path, np.zeros(problem.cluster.num_devices))
        sizes[devices[tensor]] += float(graph.held_bytes[tensor])
    return held


def _collapsed(device_of: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the fewest entries of an equal device map: a module stands for all modules inside
    it."""
    inside: dict[str, set[int]] = {}
    for path, device in device_of.items():
        for end in _prefixes(path):
            inside.setdefault(end, set()).add(device)
    listed: set[str] = set()
    for path, device in device_of.items():
        top = next((end for end in _prefixes(path) if len(inside[end]) == 1), path)
        if top not in listed:
            listed.add(top)
            yield top, device


def _prefixes(path: str) -> Iterator[str]:
    """The path of a module and of all modules around it, outermost first."""
    parts = path.split(".") if path else []
    for count in range(len(parts) + 1):
        yield ".".join(parts[:count])


def _names(problem: Problem) -> list[int | str]:
    """Name of each device for Accelerate: numbers of accelerators in PyTorch's order, or
    ``cpu``."""
    names: list[int | str] = []
    for device in problem.cluster.devices:
        count = sum(isinstance(name, int) for name in names)
        names.append("cpu" if device.kind.is_cpu else count)
    return names
