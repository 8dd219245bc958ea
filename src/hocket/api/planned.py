"""``hocket.auto`` and ``hocket.plan_graph``: the best plan for a model or a captured graph.

planned = hocket.auto(model, batch, on="4xv100-16g")
planned.explain()
planned.save("plan.json", report="report.html")
planned.run(steps=20, model="package.module:function")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from hocket.base.errors import UsageError, unknown_name
from hocket.base.units import format_seconds
from hocket.cost.calibrate import Calibration, calibrate
from hocket.cost.profile import Profile
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan
from hocket.plan.make import ON_THIS_MACHINE, make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Objective, Problem, TransferMode
from hocket.plan.sections import Parallel
from hocket.plan.transformer_plan import is_transformer_plan

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.runtime.planned_model import ModelSource
    from hocket.runtime.run_options import RunOptions, RunResult
    from hocket.simulate.timeline import Timeline


class ProblemOptions(TypedDict, total=False):
    """Options of a problem that most users leave at their defaults."""

    transfers: TransferMode
    """Contention: simultaneous transfers are ``"shared"``, ``"queued"`` or ``"parallel"``."""
    contiguous: bool
    """True if no path of forward ops may leave a device and return to it."""
    headroom_bytes: int | None
    """Memory that every device keeps free; None for the headroom of its type."""
    profile: Profile | None
    """Measured op times."""
    calibration: Calibration | None
    """Fitted efficiencies."""


class PlanOptions(ProblemOptions, total=False):
    """Options of `plan_graph`, which `auto` takes, too."""

    planners: str | Sequence[str]
    """Place ops of the full batch by these planners only; by default all strategies are compared.
    ``"auto"`` tries a portfolio of placements, which one process can run."""
    objective: str
    """``"step"``, ``"cost"``, ``"memory"`` or ``"throughput"``, as ``hocket plan --objective``."""
    must: str | Sequence[str]
    """Constraints, such as ``("fit 8GiB", "devices 2")``."""


@dataclass(frozen=True, eq=False)
class Planned:
    """The best plan that was found, with all candidates that it was compared with."""

    comparison: Comparison
    plan: Plan
    timeline: Timeline
    source: ModelSource | None = None
    """The model itself, if it was passed to `auto`."""

    @property
    def problem(self) -> Problem:
        """The model and its cluster."""
        return self.comparison.problem

    @property
    def step_s(self) -> float:
        """Predicted time of one step; with priority gradient sync, in a sequence of steps."""
        winner = self.comparison.winner
        known_s = None if winner is None else winner.step_s
        return self.timeline.makespan_s if known_s is None else known_s

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Predicted peak memory per device."""
        names = self.problem.cluster.device_names
        return dict(zip(names, self.timeline.peak_bytes.tolist(), strict=True))

    @property
    def _used(self) -> int:
        return sum(peak > 0 for peak in self.peak_bytes.values())

    def explain(self) -> str:
        """Describe the chosen plan, the reason for it and the bottleneck of its step."""
        from hocket.view.comparison import how_of
        from hocket.view.wording import count_of

        winner = self.comparison.winner
        assert winner is not None, "what was planned has a winner"
        on = f"{count_of(self._used, 'device')} of {self.problem.cluster.name}"
        chosen = f"{how_of(winner)}: {format_seconds(self.step_s)} per step on {on}"
        return "; ".join(part for part in (chosen, self.comparison.why) if part)

    def run(self, options: RunOptions | None = None, **changes: Any) -> RunResult:
        """Run the plan for some steps, by default one: ``run(steps=3, backend="single")``.

        A model that was passed to `hocket.auto` is copied with its weights, and does not change.
        Otherwise the model is built by name: ``model`` (a model of the zoo or
        ``package.module:function``), or the name that was passed to `hocket.capture`.
        """
        from hocket.base.extras import require

        require("torch", "running a plan")
        from hocket.runtime.run import run_plan
        from hocket.runtime.run_options import RunOptions

        known = [field.name for field in fields(RunOptions)]
        for name in changes:
            if name not in known:
                raise unknown_name("option of a run", name, known)
        options = replace(options or RunOptions(), **changes)
        return run_plan(self.problem, self.plan, options, source=self.source)

    def __repr__(self) -> str:
        return (
            f"Planned({self.problem.graph.name!r} on {self.problem.cluster.name!r} by "
            f"{self.plan.planner!r}: step {format_seconds(self.step_s)} on {self._used} devices)"
        )

    def save(
        self,
        path: str | Path,
        *,
        report: str | Path | None = None,
        trace: str | Path | None = None,
        graph_file: str | Path | None = None,
    ) -> None:
        """Write the plan, and optionally HTML report and Perfetto trace: all files or none.

        The plan contains the graph unless ``graph_file`` names the graph's own file.
        """
        from hocket.base.atomic import write_together
        from hocket.plan.files import plan_bytes

        files = {path: plan_bytes(path, self.problem, self.plan, graph_file=graph_file)}
        if report is not None:
            files[report] = self.report_html(Path(path).name).encode()
        if trace is not None:
            from hocket.view.trace import trace_bytes, trace_events

            events = trace_events(*self._expanded(), self.timeline, label="predicted")
            files[trace] = trace_bytes(trace, events)
        write_together(files)

    def report_html(self, plan_file: str = "plan.json") -> str:
        """Return the report as one HTML page, whose example commands name ``plan_file``."""
        from hocket.view.report import report_html

        return report_html(*self._expanded(), self.timeline, self.comparison, plan_file=plan_file)

    def summary_html(self) -> str:
        """Return the sections of the report that ``hocket ui`` shows."""
        from hocket.view.report import summary_html

        return summary_html(*self._expanded(), self.timeline, self.comparison)

    def _repr_html_(self) -> str:
        from hocket.view.report import plan_html

        return plan_html(*self._expanded(), self.timeline)

    def _expanded(self) -> tuple[Problem, Plan]:
        """Return the rewritten problem and plan, whose ops are those of the timeline."""
        from hocket.simulate.rewriting.step import rewritten_step
        from hocket.view.plan_view import pictured

        return pictured(*rewritten_step(self.problem, self.plan))


def auto(
    model: Any,
    batch: Any,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    *,
    loss: Callable[[Any], Any] | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = "adamw",
    check: bool = True,
    **options: Unpack[PlanOptions],
) -> Planned:
    """Capture a model's training step and find the best plan for it on a cluster.

    ``loss``, ``forward`` and ``optimizer`` are those of `hocket.capture`; ``batch`` is the global
    batch of a step. The best plan may need a process per device (`hocket launch`); see
    `PlanOptions` for the other options. With ``check``, a small copy of the model is trained to
    check that a split batch gives the gradients of the full batch. If they differ, no plan splits
    the batch.
    """
    from hocket.capture.given import first_batch, supervised, unwrapped
    from hocket.capture.sizes import capture_sizes, trying_samples
    from hocket.runtime.planned_model import ModelSource

    model, batch = unwrapped(model), first_batch(batch)
    loss, forward = supervised(model, batch, loss, forward)
    graph = capture_sizes(model, batch, loss=loss, forward=forward, optimizer=optimizer)
    # Named planners place ops of the full batch, so no batch is split.
    if check and not options.get("planners"):
        graph = trying_samples(graph, model, batch, loss=loss, forward=forward)
    planned = plan_graph(graph, on, **options)
    # `Planned.run` cannot apply a model by a function; only `hocket.prepare` can.
    return planned if forward else replace(planned, source=ModelSource(model, batch, loss))


def plan_graph(
    graph: Graph,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    *,
    planners: str | Sequence[str] = (),
    objective: str = "step",
    must: str | Sequence[str] = (),
    **options: Unpack[ProblemOptions],
) -> Planned:
    """Compare planners, or by default all strategies for the batch, and return the best plan.

    A graph without the sizes that grow with its batch is placed op by op. See `PlanOptions`.
    """
    from hocket.api.planners import compare_candidates
    from hocket.planners.goal import GOALS
    from hocket.planners.parallel.constraints import parse_constraints

    if objective not in GOALS:
        raise unknown_name("objective", str(objective), GOALS)
    names = (planners,) if isinstance(planners, str) else planners
    problem = make_problem(graph, on, objective=problem_objective(objective), **options)
    found = compare_candidates(problem, names, GOALS[objective], parse_constraints(must))
    return best_of(found, is_limited=bool(must))


def problem_objective(objective: str) -> Objective:
    """Return the planners' objective: the load of the busiest device, or the step time."""
    return "throughput" if objective == "throughput" else "latency"


def best_of(comparison: Comparison, *, is_limited: bool = False) -> Planned:
    """Return the winner of a comparison; raises `NoFeasiblePlanError` if nothing fits.

    With ``is_limited`` the error suggests to relax the constraints.
    """
    from hocket.view.comparison import alternatives_text

    winner = comparison.required_winner(is_limited=is_limited)
    assert winner.plan is not None
    assert winner.timeline is not None
    # A plan file does not contain the other candidates; `hocket explain` shows these notes.
    notes = {"why": comparison.why, "alternatives": alternatives_text(comparison)}
    known = {**winner.plan.notes, **{key: text for key, text in notes.items() if text}}
    return Planned(comparison, replace(winner.plan, notes=known), winner.timeline)


def planned_again(saved: Planned | SavedPlan, profile: Profile) -> Planned:
    """Return the best plan for a plan's problem with the op times of ``profile``.

    If the plan splits the batch, the profile has the op times of a microbatch, so efficiencies are
    fitted that hold for all sizes. Raises `UsageError` for a plan of a transformer shape.
    """
    require_single_ops(saved)
    problem = saved.problem
    fitted = None
    if saved.plan.get(Parallel) is not None:
        kind = next((k for k in problem.cluster.kinds if k.name == profile.device_kind), None)
        if kind is None:
            raise UsageError(
                f"the profile is for {profile.device_kind!r}, and {problem.cluster.name} has none",
                hint="measure on the devices of the plan",
            )
        fitted = calibrate(profile, kind)
    return plan_graph(
        problem.graph, problem.cluster, transfers=problem.transfers,
        objective="throughput" if problem.objective == "throughput" else "step",
        profile=profile if fitted is None else None, calibration=fitted,
    )  # fmt: skip


def require_single_ops(saved: Planned | SavedPlan) -> None:
    """Refuse a plan of a transformer shape, which has no times of single ops."""
    if is_transformer_plan(saved.plan):
        raise UsageError(
            "the plan is for a transformer's shape, which has no times of single ops",
            hint="refine plans of hocket plan",
        )
