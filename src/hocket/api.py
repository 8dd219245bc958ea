"""The public face in Python: from a model or a graph to a plan that can be looked at and run.

planned = hocket.auto(model, batch, on="4xv100-16g")
planned.explain()
planned.save("plan.json")
planned.run(RunOptions(steps=20, model="package.module:function"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.base.errors import NoFeasiblePlanError, unknown_name
from hocket.base.units import format_seconds
from hocket.cost.calibrate import Calibration
from hocket.cost.memory import as_profiled
from hocket.cost.profile import Profile
from hocket.cost.roofline import estimate_costs
from hocket.graph.formats.dnn_partitioning import on_file_terms
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.plan import Plan
from hocket.plan.problem import OBJECTIVES, TRANSFER_MODES, Objective, Problem, TransferMode

if TYPE_CHECKING:
    from hocket.cost.parallel.coefficients import Coefficients
    from hocket.plan.divided import DividedTraining
    from hocket.planners.candidates import Comparison
    from hocket.planners.communication.collective import CollectivePlan
    from hocket.planners.goal import Goal
    from hocket.runtime.options import OnProgress, OnStart, OnStep, RunOptions
    from hocket.runtime.rebuild import ModelSource
    from hocket.runtime.result import RunResult
    from hocket.simulate.timeline import Timeline
    from hocket.transformer import Transformer

ON_FILE = "file"
"""``on="file"``: the devices that the graph's own file states."""
ON_THIS_MACHINE = "auto"
"""``on="auto"``: the devices of this machine."""


@dataclass(frozen=True, eq=False)
class Planned:
    """The best plan that was found, with all that it was compared with."""

    comparison: Comparison
    plan: Plan
    timeline: Timeline
    source: ModelSource | None = None
    """The model that was planned, where it was given itself."""

    @property
    def problem(self) -> Problem:
        """What was planned."""
        return self.comparison.problem

    @property
    def step_s(self) -> float:
        """Predicted time of one step."""
        return self.timeline.makespan_s

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Predicted peak memory per device."""
        names = self.problem.cluster.device_names
        return dict(zip(names, self.timeline.peak_bytes.tolist(), strict=True))

    def explain(self) -> str:
        """Why this plan, and what limits it."""
        return self.comparison.why

    def run(self, options: RunOptions | None = None, **changes: Any) -> RunResult:
        """Carry out the plan for some steps, one by default: ``run(steps=3, backend="single")``.

        A model that was given to `hocket.auto` starts from its own weights and is not changed.
        Else the model is built anew: ``model`` must name it (a model of the zoo or
        ``package.module:function``) unless the name given to `hocket.capture` does.
        """
        from hocket.runtime.options import RunOptions

        known = [field.name for field in fields(RunOptions)]
        for name in changes:
            if name not in known:
                raise unknown_name("option of a run", name, known)
        options = replace(options or RunOptions(), **changes)
        return run_plan(self.problem, self.plan, options, source=self.source)

    def __repr__(self) -> str:
        names = [name for name, peak in self.peak_bytes.items() if peak]
        return (
            f"Planned({self.problem.graph.name!r} on {self.problem.cluster.name!r} by "
            f"{self.plan.planner!r}: step {format_seconds(self.step_s)} on {len(names)} devices)"
        )

    def save(self, path: str | Path, *, graph_file: str | Path | None = None) -> None:
        """Write the plan; the graph is put inside unless its file is named."""
        from hocket.plan.files import write_plan

        write_plan(path, self.problem, self.plan, graph_file=graph_file)

    def save_all(
        self,
        path: str | Path,
        *,
        report: str | Path,
        trace: str | Path,
        graph_file: str | Path | None = None,
    ) -> None:
        """Write plan, report and trace, all or none of them."""
        from hocket.base.atomic import write_together
        from hocket.plan.files import plan_bytes
        from hocket.view.report import report_html
        from hocket.view.trace import trace_bytes, trace_events

        plan = plan_bytes(path, self.problem, self.plan, graph_file=graph_file)
        page = report_html(self.problem, self.plan, self.timeline, self.comparison).encode()
        events = trace_events(self.problem, self.plan, self.timeline, label="predicted")
        write_together({path: plan, report: page, trace: trace_bytes(trace, events)})

    def save_report(self, path: str | Path) -> None:
        """Write the one-file HTML report."""
        from hocket.view.report import write_report

        write_report(path, self.problem, self.plan, self.timeline, self.comparison)

    def save_trace(self, path: str | Path) -> None:
        """Write the trace for Perfetto."""
        from hocket.view.trace import write_trace

        write_trace(path, self.problem, self.plan, self.timeline)

    def _repr_html_(self) -> str:
        from hocket.view.notebook import plan_html

        return plan_html(self.problem, self.plan, self.timeline)


def run_plan(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    *,
    source: ModelSource | None = None,
    on_start: OnStart = lambda process_ids: None,
    on_step: OnStep = lambda number, record: None,
    on_progress: OnProgress = lambda what: None,
) -> RunResult:
    """Carry out a plan, placement or division, on this machine; see `hocket.runtime.session`."""
    from hocket.base.extras import require

    require("torch", "running a plan")
    from hocket.runtime.session import run_plan

    return run_plan(
        problem, plan, options,
        source=source, on_start=on_start, on_step=on_step, on_progress=on_progress,
    )  # fmt: skip


def auto(
    model: Any,
    batch: Any,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    *,
    loss: Callable[[Any], Any] | str | None = None,
    optimizer: Any = "adamw",
    headroom_bytes: int | None = None,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
) -> Planned:
    """Capture a model's training step and plan it on a cluster.

    ``loss`` and ``optimizer`` are as `hocket.capture` takes them.
    """
    from hocket.capture import capture
    from hocket.runtime.rebuild import ModelSource

    graph = capture(model, batch, loss=loss, optimizer=optimizer)
    planned = plan_graph(
        graph, on, headroom_bytes=headroom_bytes, profile=profile, calibration=calibration
    )
    return replace(planned, source=ModelSource(model, batch, loss))


def plan_graph(
    graph: Graph,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    *,
    planners: str | Sequence[str] = (),
    transfers: TransferMode = "shared",
    objective: Objective = "latency",
    contiguous: bool = False,
    goal: Goal = "time",
    headroom_bytes: int | None = None,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
) -> Planned:
    """Compare planners (the portfolio of ``auto`` by default) and return the best plan.

    ``goal`` says what is best: the shortest step, or the step that costs least.
    """
    from hocket.planners.compare import compare
    from hocket.planners.goal import GOALS

    names = (planners,) if isinstance(planners, str) else planners
    problem = make_problem(
        graph, on, transfers=transfers, objective=objective, contiguous=contiguous,
        headroom_bytes=headroom_bytes, profile=profile, calibration=calibration,
    )  # fmt: skip
    if goal not in GOALS:
        raise unknown_name("goal", str(goal), GOALS)
    return best_of(compare(problem, names, goal))


def best_of(comparison: Comparison) -> Planned:
    """The winner of a comparison; raises `NoFeasiblePlanError` where nothing fits."""
    winner = comparison.winner
    if winner is None or winner.plan is None or winner.timeline is None:
        has_headroom = any(kind.headroom_bytes for kind in comparison.problem.cluster.kinds)
        raise NoFeasiblePlanError(
            f"no candidate fits {comparison.problem.cluster.name}: {comparison.why}",
            hint="use more or larger devices, a smaller batch, or 16-bit parameters"
            + (", or keep less free with --headroom" if has_headroom else ""),
        )
    return Planned(comparison, winner.plan, winner.timeline)


def make_problem(
    graph: Graph,
    on: str | Path | Cluster,
    *,
    transfers: TransferMode = "shared",
    objective: Objective = "latency",
    contiguous: bool = False,
    headroom_bytes: int | None = None,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
    seed: int = 0,
) -> Problem:
    """A problem from a graph and a cluster, or the text or path that names one.

    ``headroom_bytes`` of each device stay empty; by default what its kind states.
    """
    if transfers not in TRANSFER_MODES:
        raise unknown_name("transfer mode", str(transfers), TRANSFER_MODES)
    if objective not in OBJECTIVES:
        raise unknown_name("objective", str(objective), OBJECTIVES)
    if on == ON_FILE:
        from hocket.hardware.stated import stated_cluster

        cluster = stated_cluster(graph.meta)
        graph = on_file_terms(graph)
    else:
        cluster = find_cluster(on)
    if headroom_bytes is not None:
        cluster = cluster.with_headroom(headroom_bytes)
    graph = as_profiled(graph, cluster, profile)
    costs = estimate_costs(graph, cluster, profile=profile, calibration=calibration)
    return Problem(
        work=graph, cluster=cluster, op_costs=costs, transfers=transfers, objective=objective,
        contiguous=contiguous, seed=seed,
    )  # fmt: skip


def plan_parallel(
    model: str | Path | Transformer,
    on: str | Path | Cluster,
    batch: int,
    *,
    software: str | None = None,
    coefficients: Coefficients | None = None,
) -> DividedTraining:
    """Divide the training of a transformer over a cluster: data x tensor x pipeline.

    ``model`` is a preset, a file (see `hocket.transformer.files.find_model`) or a shape; ``batch``
    counts sequences per step. Raises `NoFeasiblePlanError` where nothing fits.
    """
    from hocket.plan.divided import DividedTraining
    from hocket.planners.parallelism.search import plan_of, search

    problem = make_training(model, on, batch, software=software, coefficients=coefficients)
    return DividedTraining(problem, plan_of(search(problem)))


def make_training(
    model: str | Path | Transformer,
    on: str | Path | Cluster,
    batch: int,
    *,
    software: str | None = None,
    options: Sequence[str] = (),
    dtype: str | None = None,
    coefficients: Coefficients | None = None,
    spare: float | None = None,
) -> Problem:
    """What is trained on what; without ``dtype``, in the first type that all devices have.

    ``options`` set the program (``async-tp``, ``hsdp=8``); ``spare`` is the share of memory that
    stays free, a few percent unless it is given.
    """
    from hocket.cost.parallel.coefficients import Coefficients
    from hocket.cost.parallel.options import with_options
    from hocket.cost.parallel.softwares import DEFAULT_SOFTWARE, find_software, usual_dtype
    from hocket.plan.training import TransformerTraining
    from hocket.planners.parallelism.outlook import SPARE
    from hocket.transformer import Transformer
    from hocket.transformer.files import find_model

    cluster = find_cluster(on)
    program = with_options(find_software(software or DEFAULT_SOFTWARE), options)
    return Problem(
        work=TransformerTraining(
            model=model if isinstance(model, Transformer) else find_model(str(model)),
            global_batch=batch,
            software=replace(program, dtype=dtype or usual_dtype(program, cluster)),
            coefficients=coefficients or Coefficients(),
        ),
        cluster=cluster,
        spare=SPARE if spare is None else spare,
    )


def find_cluster(on: str | Path | Cluster) -> Cluster:
    """A cluster, or the one that a text or path names."""
    if isinstance(on, Cluster):
        return on
    if on == ON_THIS_MACHINE:
        from hocket.hardware.detect import detect

        return detect()
    from hocket.hardware.shorthand import cluster_from_text

    return cluster_from_text(str(on))


# ── collectives ──────────────────────────────────────────────────────────────────────────────────


def plan_collective(
    on: str | Path | Cluster,
    collective: str,
    *,
    gpus: str | None = None,
    root: str | None = None,
    size_bytes: int | None = None,
    relay: bool = False,
    links: str = "auto",
    max_trees: int | None = None,
) -> CollectivePlan:
    """The best schedule of a collective on these links, its bound and the plain ways beside it.

    Every schedule is verified and the certificate checked before it is returned.
    """
    from hocket.planners.communication.certificate import COLLECTIVES
    from hocket.planners.communication.check import check_certificate
    from hocket.planners.communication.collective import plan_collective as planned
    from hocket.planners.communication.fabric import LINK_CHOICES, chosen_ranks

    kind = next((name for name in COLLECTIVES if name == collective), None)
    if kind is None or kind == "alltoall":
        raise unknown_name("collective", collective, set(COLLECTIVES) - {"alltoall"})
    choice = next((name for name in LINK_CHOICES if name == links), None)
    if choice is None:
        raise unknown_name("choice of links", links, LINK_CHOICES)
    cluster = find_cluster(on)
    ranks = chosen_ranks(cluster, gpus)
    found = planned(
        cluster, kind, ranks, root=_root(cluster, ranks, root), size_bytes=size_bytes,
        relay=relay, links=choice, max_trees=max_trees,
    )  # fmt: skip
    found.chosen.section.require_legal(cluster)
    check_certificate(found.fabric, kind, found.root, found.certificate)
    return found


def _root(cluster: Cluster, ranks: Sequence[str], root: str | None) -> str | None:
    from hocket.planners.communication.fabric import chosen_device

    if root is None:
        return None
    name = chosen_device(cluster, root)
    if name not in ranks:
        raise unknown_name("root", name, ranks)
    return name


def collective_classes(
    on: str | Path | Cluster, collective: str, *, size_bytes: int | None = None
) -> list[dict[str, Any]]:
    """One entry per class of connected sets of three devices or more of a machine."""
    from hocket.planners.communication.classes import connected_classes
    from hocket.view.collective import as_dict

    cluster = find_cluster(on)
    found = connected_classes(cluster, range(3, cluster.num_devices + 1))
    entries = []
    for fabric, count in found:
        ranks = ",".join(fabric.places[: fabric.num_ranks])
        plan = plan_collective(cluster, collective, gpus=ranks, size_bytes=size_bytes, links="peer")
        shown = as_dict(plan)
        kept = ("ranks", "algorithm", "rate_bps", "bound_bps", "gap", "num_trees", "offers")
        entries.append({**{key: shown[key] for key in kept}, "num_sets": count})
    return entries


def collective_bound(
    on: str | Path | Cluster,
    collective: str,
    *,
    gpus: str | None = None,
    root: str | None = None,
    relay: bool = False,
    links: str = "auto",
) -> dict[str, Any]:
    """What a collective can reach at most, with the certificate, checked."""
    import time

    from hocket.planners.communication.certificate import COLLECTIVES
    from hocket.planners.communication.check import check_certificate
    from hocket.planners.communication.fabric import LINK_CHOICES, chosen_ranks, fabric_of
    from hocket.planners.communication.schedule import bound_of

    kind = next((name for name in COLLECTIVES if name == collective), None)
    choice = next((name for name in LINK_CHOICES if name == links), None)
    if kind is None:
        raise unknown_name("collective", collective, COLLECTIVES)
    if choice is None:
        raise unknown_name("choice of links", links, LINK_CHOICES)
    cluster = find_cluster(on)
    ranks = chosen_ranks(cluster, gpus)
    at = ranks.index(_root(cluster, ranks, root) or ranks[0])
    start_s = time.process_time()
    fabric = fabric_of(cluster, ranks, relay=relay, links=choice)
    certificate = bound_of(fabric, kind, at)
    plan_s = time.process_time() - start_s
    check_certificate(fabric, kind, at, certificate)
    return {
        "collective": kind,
        "ranks": list(ranks),
        "bound_bps": float(certificate.bound * fabric.unit_bps),
        "bound": str(certificate.bound * fabric.unit_bps),
        "certificate": {"unit_bps": fabric.unit_bps, **certificate.to_data()},
        "plan_seconds": plan_s,
    }
