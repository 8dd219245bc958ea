"""Expert files: a placement that a person wrote, by module or by op.

``--planner expert:FILE`` reads a JSON file that lists, per device, module paths or names of ops; an
op goes where the longest path that contains it says, and backward and optimizer ops follow their
forward op. The splits of msr-fiddle/dnn-partitioning, which list node numbers per accelerator and
processor, are read as they are. O(ops + paths).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from hocket.base import fields
from hocket.base.arrays import IntArray
from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.jsonfile import read_json
from hocket.graph.coarsen import anchor_of, tied_ops
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement

EXPERT_SCHEMA = "hocket.expert/1"
_MAX_BYTES = 64 * 2**20


def expert(path: str | Path) -> Callable[[Problem, Plan], Plan]:
    """A planner that places ops as the file says."""
    data, where = read_json(Path(path), max_bytes=_MAX_BYTES), str(path)

    def place(problem: Problem, plan: Plan) -> Plan:
        if isinstance(data, dict) and data.get("schema") == EXPERT_SCHEMA:
            listed = _by_path(data, problem.graph, problem.cluster, where)
        elif isinstance(data, dict) and "fpgas" in data:
            listed = _by_number(data, problem.graph, problem.cluster, where)
        else:
            raise InputFileError(
                f"this is not a {EXPERT_SCHEMA} file",
                hint='write {"schema": "hocket.expert/1", "devices": {"gpu0": ["module.path"]}}',
                where=where,
            )
        return plan.having(Placement(_completed(listed, problem.graph, where)))

    return place


def _by_path(data: object, graph: Graph, cluster: Cluster, where: str) -> IntArray:
    """The device of each op that some path contains; -1 for the others."""
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
            listed[op] = device_of_path[containing[0]]
    for path in device_of_path:
        if path not in met:
            raise _unknown("module or op", path, (*graph.modules, *graph.op_names), where)
    return listed


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> InputFileError:
    return InputFileError(f"unknown {what} {name!r}", hint=did_you_mean(name, known), where=where)


def _paths_of(graph: Graph, op: int) -> list[str]:
    """Names that may stand for an op in a file, the most special one first."""
    parts = graph.module_of(op).split(".")
    return [graph.op_names[op], *(".".join(parts[:n]) for n in range(len(parts), 0, -1))]


def _by_number(data: object, graph: Graph, cluster: Cluster, where: str) -> IntArray:
    """A split by node numbers, which ops of that format carry at the end of their names."""
    file = fields.record(data, "the file", required=("fpgas",), optional=("cpus",))
    op_of = {name.rpartition("#")[2]: op for op, name in enumerate(graph.op_names)}
    is_cpu = np.array([device.kind.is_cpu for device in cluster.devices])
    listed = np.full(graph.num_ops, -1, dtype=np.int32)
    for key, devices in (("fpgas", np.flatnonzero(~is_cpu)), ("cpus", np.flatnonzero(is_cpu))):
        parts = fields.items(file.get(key, []), key)
        if len(parts) > len(devices):
            raise InputFileError(
                f"{key} has {len(parts)} parts, the cluster has {len(devices)} such devices",
                where=where,
            )
        for index, part in enumerate(parts):
            place = f"{key}[{index}]"
            nodes = fields.record(part, place, required=("nodes",))["nodes"]
            for node in fields.items(nodes, f"{place}.nodes"):
                name = str(fields.integer(node, f"{place}.nodes", 0, 2**31 - 1))
                if name not in op_of:
                    raise InputFileError(
                        f"{place} lists node {name}, which is not there", where=where
                    )
                listed[op_of[name]] = devices[index]
    return listed


def _completed(listed: IntArray, graph: Graph, where: str) -> IntArray:
    """Ops that the file does not list follow the forward op that they belong to."""
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
