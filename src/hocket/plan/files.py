"""Plan files: written atomically, read strictly, and sufficient to repeat the simulation exactly.

A file holds the problem (a graph or its path, or a transformer's training; the cluster; the
settings from which costs are computed), every section by name, the claims and the notes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hocket.base import fields
from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError, did_you_mean
from hocket.base.jsonfile import dump_json, read_json
from hocket.cost.memory import as_profiled
from hocket.cost.profile import profile_from_dict
from hocket.cost.roofline import costs_from_settings
from hocket.graph.files import graph_from_dict, graph_to_dict, read_graph
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.hardware.files import cluster_from_dict, cluster_to_dict
from hocket.plan.claims import Claims
from hocket.plan.plan import Plan
from hocket.plan.problem import OBJECTIVES, TRANSFER_MODES, Problem
from hocket.plan.sections import SECTIONS, Parallel, Schedule
from hocket.plan.training import TransformerTraining

PLAN_SCHEMA = "hocket.plan/3"
MAX_PLAN_BYTES = 2 * 2**30
_KEYS = ("schema", "generator", "planner", "problem", "sections", "claims", "notes")
# Fields of `Problem` that files store by name.
_HOW = ("transfers", "objective", "contiguous", "spare", "seed")


@dataclass(frozen=True, eq=False)
class SavedPlan:
    """A plan read from a file, with its problem."""

    problem: Problem
    plan: Plan

    @property
    def predicted_step_s(self) -> float | None:
        """Step time that was predicted when the plan was made; None if none was."""
        return self.plan.claims.step_s


def json_schema() -> dict[str, Any]:
    """Schema that ``hocket schema plan`` prints."""
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("plan_schema.json").read_text())
    return schema


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def write_plan(
    path: str | Path, problem: Problem, plan: Plan, *, graph_file: str | Path | None = None
) -> None:
    """Write a plan; ``graph_file`` stores the path of the graph instead of the graph itself."""
    write_atomically(path, plan_bytes(path, problem, plan, graph_file=graph_file))


def plan_bytes(
    path: str | Path, problem: Problem, plan: Plan, *, graph_file: str | Path | None = None
) -> bytes:
    """Return the bytes that `write_plan` writes to ``path``; equal plans give equal bytes."""
    named = None
    if graph_file is not None:
        # Relative to the plan's folder, so that both files can be moved together.
        named = os.path.relpath(Path(graph_file).resolve(), Path(path).resolve().parent)
    return dump_json(plan_to_data(problem, plan, graph_file=named))


def plan_to_data(problem: Problem, plan: Plan, *, graph_file: str | None = None) -> dict[str, Any]:
    """Return the content of a plan file as plain data."""
    from hocket import __version__

    cluster = problem.cluster
    costs = {} if problem.op_costs is None else dict(problem.op_costs.settings)
    return {
        "schema": PLAN_SCHEMA,
        "generator": f"hocket {__version__}",
        "planner": plan.planner,
        "problem": {
            "work": _work_data(problem, graph_file),
            "cluster": {"hash": cluster.content_hash, "content": cluster_to_dict(cluster)},
            "costs": costs,
            **{name: getattr(problem, name) for name in _HOW},
        },
        "sections": {name: section.to_data() for name, section in plan.named().items()},
        "claims": plan.claims.to_data(),
        "notes": dict(plan.notes),
    }


def _work_data(problem: Problem, graph_file: str | None) -> dict[str, Any]:
    work = problem.work
    if work is None:
        return {}
    if isinstance(work, TransformerTraining):
        return {"training": {"hash": work.content_hash, "content": work.to_data()}}
    where = {"inline": graph_to_dict(work)} if graph_file is None else {"file": graph_file}
    return {"graph": {"hash": work.content_hash, **where}}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def read_plan(path: str | Path, *, graph_file: str | Path | None = None) -> SavedPlan:
    """Read a plan with its problem; ``graph_file`` replaces the graph that the file names."""
    data = read_json(path, max_bytes=MAX_PLAN_BYTES)
    return plan_from_data(data, str(path), graph_file=graph_file)


def plan_from_data(data: object, where: str, *, graph_file: str | Path | None = None) -> SavedPlan:
    """Read a plan from the content of its file; ``where`` is the file's path, also for errors."""
    with fields.located(where):
        content = _content(data)
        problem = _problem(content["problem"], Path(where), graph_file)
        sections = fields.mapping(content["sections"], "sections")
        for name in sections:
            if name not in SECTIONS:
                raise InputFileError(
                    f"unknown section {fields.shown(name)}",
                    hint=f"{did_you_mean(name, SECTIONS)}; a newer hocket may know it",
                )
        plan = Plan(
            planner=fields.text(content["planner"], "planner"),
            work_hash=problem.work_hash,
            cluster_hash=problem.cluster.content_hash,
            # In the order of the registry, so that reading and writing keep it.
            sections=tuple(
                kind.from_data(sections[name], problem)
                for name, kind in SECTIONS.items()
                if name in sections
            ),
            claims=Claims.from_data(content["claims"]),
            notes={
                key: fields.text(text, fields.inside("notes", key))
                for key, text in fields.mapping(content["notes"], "notes").items()
            },
        )
        _require_sense(problem, plan)
    return SavedPlan(problem, plan)


def _content(data: object) -> Mapping[str, Any]:
    content = data
    schema = content.get("schema") if isinstance(content, Mapping) else None
    if schema != PLAN_SCHEMA:
        raise InputFileError(
            f"this is not a {PLAN_SCHEMA} file", hint="make one with hocket plan or hocket parallel"
        )
    return fields.record(content, "the file", required=_KEYS)


def _problem(data: object, path: Path, graph_file: str | Path | None) -> Problem:
    entry = fields.record(data, "problem", required=("work", "cluster", "costs", *_HOW))
    inner = fields.record(entry["cluster"], "problem.cluster", required=("hash", "content"))
    content = fields.mapping(inner["content"], "problem.cluster.content")
    cluster = cluster_from_dict(content, str(path))
    _require_same("cluster", inner["hash"], cluster.content_hash)
    settings = fields.mapping(entry["costs"], "problem.costs")
    work = _work(entry["work"], cluster, settings, path, graph_file)
    costs = costs_from_settings(work, cluster, settings) if isinstance(work, Graph) else None
    return Problem(
        work=work,
        cluster=cluster,
        op_costs=costs,
        transfers=fields.choice(entry["transfers"], "problem.transfers", TRANSFER_MODES),
        objective=fields.choice(entry["objective"], "problem.objective", OBJECTIVES),
        contiguous=fields.flag(entry["contiguous"], "problem.contiguous"),
        spare=fields.number(entry["spare"], "problem.spare", 0, 1),
        seed=fields.integer(entry["seed"], "problem.seed", -(2**63), 2**63 - 1),
    )


def _work(
    data: object,
    cluster: Cluster,
    settings: Mapping[str, Any],
    path: Path,
    graph_file: str | Path | None,
) -> Graph | TransformerTraining | None:
    entry = fields.record(data, "problem.work", optional=("graph", "training"))
    if "training" in entry:
        place = "problem.work.training"
        inner = fields.record(entry["training"], place, required=("hash", "content"))
        training = TransformerTraining.from_data(inner["content"], place)
        _require_same("training", inner["hash"], training.content_hash)
        return training
    if "graph" not in entry:
        return None
    reference = fields.record(
        entry["graph"], "problem.work.graph", required=("hash",), optional=("file", "inline")
    )
    # The plan was made for the graph as it was profiled, so its hash is of that graph.
    profile = settings.get("profile")
    if profile is not None:
        profile = profile_from_dict(profile, f"{path}: costs.profile")
    graph = as_profiled(_graph(reference, cluster, path, graph_file), cluster, profile)
    _require_same("graph", reference["hash"], graph.content_hash)
    return graph


def _graph(
    reference: Mapping[str, Any], cluster: Cluster, path: Path, graph_file: str | Path | None
) -> Graph:
    if graph_file is None and reference.get("inline") is not None:
        content = fields.mapping(reference["inline"], "problem.work.graph.inline")
        return graph_from_dict(content, f"{path}: graph.inline")
    if graph_file is None:
        if reference.get("file") is None:
            raise InputFileError("the plan names no graph", hint="give it with --graph PATH")
        file = fields.text(reference["file"], "problem.work.graph.file")
        graph = _found_again(file, reference["hash"], path)
    else:
        graph = read_graph(graph_file)
    if not cluster.uses_stated_times:
        return graph
    from hocket.graph.formats.dnn_partitioning import on_file_terms

    return on_file_terms(graph)


def _found_again(file: str, content_hash: str, path: Path) -> Graph:
    """Read the graph that a plan names.

    Looks at the named path, next to the plan and in the current folder.
    """
    name = Path(file).name
    first: InputFileError | None = None
    for place in (path.parent / file, path.parent / name, Path(name)):
        try:
            graph = read_graph(place)
        except InputFileError as error:
            first = first or error
            continue
        # The named path is never skipped: a wrong hash there is an error that the user must see.
        if place == path.parent / file or graph.content_hash == content_hash:
            return graph
    assert first is not None
    raise InputFileError(
        f"the plan's graph {fields.shown(file)}: {first.message}",
        hint="give its place with --graph PATH",
    )


# ── what makes no sense ──────────────────────────────────────────────────────────────────────────


def _require_same(what: str, planned: object, actual: str) -> None:
    if fields.text(planned, f"the hash of the {what}") != actual:
        raise InputFileError(
            f"the plan was made for another {what}: {str(planned)[:12]}…, this is {actual[:12]}…",
            hint=f"plan again for this {what}",
        )


def _require_sense(problem: Problem, plan: Plan) -> None:
    """Refuse illegal parallel sections and schedules, which cannot be simulated.

    All other rules are left to ``verify``.
    """
    for kind in (Parallel, Schedule):
        section = plan.get(kind)
        found = [] if section is None else list(section.verify(problem, plan))
        if found:
            message = "; ".join(violation.message for violation in found[:3])
            raise InputFileError(message, hint="make the plan again with hocket parallel")
