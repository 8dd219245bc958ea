"""Plan files: written atomically, read strictly, complete enough to simulate again exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base.atomic import write_atomically
from hocket.base.checked import checked
from hocket.base.errors import InputFileError
from hocket.base.fields import shown
from hocket.base.jsonfile import dump_json, read_json
from hocket.cost.memory import as_profiled
from hocket.cost.profile import Profile, profile_from_dict
from hocket.cost.roofline import costs_from_settings
from hocket.graph.files import graph_from_dict, graph_to_dict, read_graph
from hocket.graph.formats.dnn_partitioning import on_file_terms
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.hardware.files import cluster_from_dict, cluster_to_dict
from hocket.plan.plan import PLAN_SCHEMA, Plan
from hocket.plan.problem import Problem

if TYPE_CHECKING:
    from hocket.plan.schema import GraphReference, PlanFile

MAX_PLAN_BYTES = 2 * 2**30


@dataclass(frozen=True, eq=False)
class SavedPlan:
    """A plan as it was read: with its problem and what was predicted when it was written."""

    problem: Problem
    plan: Plan
    predicted_step_s: float | None


def write_plan(
    path: str | Path,
    problem: Problem,
    plan: Plan,
    *,
    graph_file: str | Path | None = None,
    step_s: float,
    peak_bytes: dict[str, int],
) -> None:
    """Write a plan. With ``graph_file`` the graph is named by its path, else it is put inside."""
    data = plan_bytes(
        path, problem, plan, graph_file=graph_file, step_s=step_s, peak_bytes=peak_bytes
    )
    write_atomically(path, data)


def plan_bytes(
    path: str | Path,
    problem: Problem,
    plan: Plan,
    *,
    graph_file: str | Path | None = None,
    step_s: float,
    peak_bytes: dict[str, int],
) -> bytes:
    """What `write_plan` writes to ``path``."""
    from hocket import __version__

    assert plan.device_of is not None, "only a plan with a placement is written"
    graph: dict[str, Any] = {"hash": problem.graph.content_hash}
    if graph_file is None:
        graph["inline"] = graph_to_dict(problem.graph)
    else:
        graph["file"] = os.path.relpath(Path(graph_file).resolve(), Path(path).resolve().parent)
    order: dict[str, Any] | None = None
    if plan.order is not None:
        order = {"by_device": [sequence.tolist() for sequence in plan.order]}
    elif plan.priority is not None:
        order = {"priority": plan.priority.tolist()}
    content = {
        "schema": PLAN_SCHEMA,
        "generator": f"hocket {__version__}",
        "planner": plan.planner,
        "graph": graph,
        "cluster": {
            "hash": problem.cluster.content_hash,
            "content": cluster_to_dict(problem.cluster),
        },
        "costs": dict(problem.costs.settings),
        "transfers": problem.transfers,
        "objective": problem.objective,
        "contiguous": problem.contiguous,
        "seed": problem.seed,
        "placement": {
            "devices": list(problem.cluster.device_names),
            "device_of": plan.device_of.tolist(),
        },
        "order": order,
        "notes": dict(plan.notes),
        "predicted": {"step_s": step_s, "peak_bytes": peak_bytes},
    }
    return dump_json(content)


def read_plan(path: str | Path, *, graph_file: str | Path | None = None) -> SavedPlan:
    """Read a plan with its problem; ``graph_file`` replaces the path written in the plan."""
    path = Path(path)
    data = read_json(path, max_bytes=MAX_PLAN_BYTES)
    content = _validated(data, str(path))
    cluster = cluster_from_dict(content.cluster.content, str(path))
    graph = as_profiled(
        _graph(content, cluster, path, graph_file), cluster, _profile(content, str(path))
    )
    for what, planned, actual in (
        ("graph", content.graph.hash, graph.content_hash),
        ("cluster", content.cluster.hash, cluster.content_hash),
    ):
        if planned != actual:
            raise InputFileError(
                f"the plan was made for another {what}: {planned[:12]}…, this is {actual[:12]}…",
                hint=f"plan again for this {what}",
                where=str(path),
            )
    problem = Problem(
        graph=graph,
        cluster=cluster,
        costs=costs_from_settings(graph, cluster, content.costs),
        transfers=content.transfers,
        objective=content.objective,
        contiguous=content.contiguous,
        seed=content.seed,
    )
    predicted = content.predicted.step_s if content.predicted else None
    return SavedPlan(problem, _plan(content, problem, path), predicted)


def _plan(content: PlanFile, problem: Problem, path: Path) -> Plan:
    placement, order = content.placement, content.order
    if tuple(placement.devices) != problem.cluster.device_names:
        raise InputFileError(
            "placement.devices are not the devices of the plan's cluster", where=str(path)
        )
    if len(placement.device_of) != problem.graph.num_ops:
        raise InputFileError(
            f"placement.device_of has {len(placement.device_of)} entries for "
            f"{problem.graph.num_ops} ops",
            where=str(path),
        )
    limit = max(placement.device_of, default=0)
    if limit >= len(placement.devices):
        raise InputFileError(f"placement.device_of names device {limit}", where=str(path))
    by_device = order.by_device if order else None
    if by_device is not None and order is not None and order.priority is not None:
        raise InputFileError("order has both by_device and priority", where=str(path))
    if by_device is not None and any(
        op >= problem.graph.num_ops for sequence in by_device for op in sequence
    ):
        raise InputFileError("order.by_device names an op that does not exist", where=str(path))
    priority = order.priority if order else None
    return Plan(
        planner=content.planner,
        graph_hash=content.graph.hash,
        cluster_hash=content.cluster.hash,
        device_of=np.array(placement.device_of, dtype=np.int32),
        order=None
        if by_device is None
        else tuple(np.array(sequence, dtype=np.int32) for sequence in by_device),
        priority=None if priority is None else np.array(priority, dtype=np.float64),
        notes=content.notes,
    )


def _graph(content: PlanFile, cluster: Cluster, path: Path, graph_file: str | Path | None) -> Graph:
    reference = content.graph
    if graph_file is None and reference.inline is not None:
        return graph_from_dict(reference.inline, f"{path}: graph.inline")
    if graph_file is None:
        if reference.file is None:
            raise InputFileError("the plan names no graph", where=str(path))
        graph = _found_again(reference, path)
    else:
        graph = read_graph(graph_file)
    return on_file_terms(graph) if cluster.uses_stated_times else graph


def _found_again(reference: GraphReference, path: Path) -> Graph:
    """The graph that a plan names: where it was, or beside the plan, or in the current folder."""
    assert reference.file is not None
    name = Path(reference.file).name
    first: InputFileError | None = None
    for place in (path.parent / reference.file, path.parent / name, Path(name)):
        try:
            graph = read_graph(place)
        except InputFileError as error:
            first = first or error
            continue
        if place == path.parent / reference.file or graph.content_hash == reference.hash:
            return graph
    assert first is not None
    raise InputFileError(
        f"the plan's graph {shown(reference.file)}: {first.message}",
        hint="give its place with --graph PATH",
        where=str(path),
    )


def _profile(content: PlanFile, where: str) -> Profile | None:
    data = content.costs.get("profile")
    return None if data is None else profile_from_dict(data, f"{where}: costs.profile")


def _validated(data: object, where: str) -> PlanFile:
    from hocket.plan.schema import PlanFile

    if not isinstance(data, dict) or data.get("schema") != PLAN_SCHEMA:
        raise InputFileError(
            f"this is not a {PLAN_SCHEMA} file", hint="make one with hocket plan", where=where
        )
    return checked(PlanFile, data, where, hint="hocket schema plan prints what a plan file holds")
