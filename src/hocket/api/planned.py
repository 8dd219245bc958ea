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

from hocket.base.errors import unknown_name
from hocket.base.units import format_seconds
from hocket.cost.calibrate import Calibration
from hocket.cost.profile import Profile
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.make import ON_FILE, ON_THIS_MACHINE, find_cluster, make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Objective, Problem, TransferMode

__all__ = [
    "ON_FILE", "ON_THIS_MACHINE", "Planned", "auto", "best_of", "find_cluster", "make_problem",
    "plan_graph", "run_plan",
]  # fmt: skip

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.runtime.planned_model import ModelSource
    from hocket.runtime.run_options import OnProgress, OnStart, OnStep, RunOptions, RunResult
    from hocket.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Planned:
    """The best plan that was found, with all that it was compared with."""

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
        """Predicted time of one step; of one among many where gradients travel by priority."""
        winner = self.comparison.winner
        known_s = None if winner is None else winner.step_s
        return self.timeline.makespan_s if known_s is None else known_s

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Predicted peak memory per device."""
        names = self.problem.cluster.device_names
        return dict(zip(names, self.timeline.peak_bytes.tolist(), strict=True))

    def explain(self) -> str:
        """The chosen plan, the reason and the limit of its step."""
        from hocket.view.comparison import how_of
        from hocket.view.wording import count_of

        winner = self.comparison.winner
        assert winner is not None, "what was planned has a winner"
        used = len([name for name, peak in self.peak_bytes.items() if peak])
        on = f"{count_of(used, 'device')} of {self.problem.cluster.name}"
        chosen = f"{how_of(winner)}: {format_seconds(self.step_s)} per step on {on}"
        return "; ".join(part for part in (chosen, self.comparison.why) if part)

    def run(self, options: RunOptions | None = None, **changes: Any) -> RunResult:
        """Run the plan for some steps, one by default: ``run(steps=3, backend="single")``.

        A model that was given to `hocket.auto` starts from its own weights and is not changed.
        Else the model is built anew: ``model`` must name it (a model of the zoo or
        ``package.module:function``) unless the name given to `hocket.capture` does.
        """
        from hocket.runtime.run_options import RunOptions

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
        problem, placed = self.pictured()
        page = report_html(problem, placed, self.timeline, self.comparison).encode()
        events = trace_events(problem, placed, self.timeline, label="predicted")
        write_together({path: plan, report: page, trace: trace_bytes(trace, events)})

    def save_report(self, path: str | Path) -> None:
        """Write the one-file HTML report."""
        from hocket.view.report import write_report

        write_report(path, *self.pictured(), self.timeline, self.comparison)

    def save_trace(self, path: str | Path) -> None:
        """Write the trace for Perfetto."""
        from hocket.view.trace import write_trace

        write_trace(path, *self.pictured(), self.timeline)

    def pictured(self) -> tuple[Problem, Plan]:
        """The ops that the timeline is about, and where they run."""
        from hocket.simulate.rewriting.step import rewritten_step
        from hocket.view.plan_view import pictured

        return pictured(*rewritten_step(self.problem, self.plan))

    def _repr_html_(self) -> str:
        from hocket.view.report import plan_html

        return plan_html(*self.pictured(), self.timeline)


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
    """Run a plan on this machine; see `hocket.runtime.run`."""
    from hocket.base.extras import require

    require("torch", "running a plan")
    from hocket.runtime.run import run_plan
    from hocket.runtime.run_options import RunCallbacks

    watch = RunCallbacks(on_start=on_start, on_step=on_step, on_progress=on_progress)
    return run_plan(problem, plan, options, source=source, watch=watch)


def auto(
    model: Any,
    batch: Any,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    *,
    loss: Callable[[Any], Any] | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = "adamw",
    planners: str | Sequence[str] = (),
    headroom_bytes: int | None = None,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
    goal: str = "step",
    must: str | Sequence[str] = (),
    check: bool = True,
) -> Planned:
    """Capture a model's training step and plan it on a cluster: who takes which samples, and how.

    ``loss``, ``forward`` and ``optimizer`` are as `hocket.capture` takes them; ``batch`` is the
    whole batch of a step. The best plan may need a process per device (`hocket launch`);
    ``planners="auto"`` places single ops instead, which one process runs. ``goal`` and
    ``must`` are as `plan_graph` takes them. With ``check`` it is tried at toy size whether parts of
    a batch train as the whole does; where they do not, the batch is not split.
    """
    from hocket.capture.given import first_batch, supervised, unwrapped
    from hocket.capture.sizes import capture_sizes, trying_samples
    from hocket.runtime.planned_model import ModelSource

    model, batch = unwrapped(model), first_batch(batch)
    loss, forward = supervised(model, batch, loss, forward)
    graph = capture_sizes(model, batch, loss=loss, forward=forward, optimizer=optimizer)
    if check and not planners:
        graph = trying_samples(graph, model, batch, loss=loss, forward=forward)
    planned = plan_graph(
        graph, on, planners=planners, headroom_bytes=headroom_bytes, profile=profile,
        calibration=calibration, goal=goal, must=must,
    )  # fmt: skip
    # Only `hocket.prepare` knows how a model is applied by a function.
    return planned if forward else replace(planned, source=ModelSource(model, batch, loss))


def plan_graph(
    graph: Graph,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    *,
    planners: str | Sequence[str] = (),
    transfers: TransferMode = "shared",
    objective: Objective = "latency",
    contiguous: bool = False,
    goal: str = "step",
    must: str | Sequence[str] = (),
    headroom_bytes: int | None = None,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
) -> Planned:
    """Compare planners, or by default all strategies for the batch, and return the best plan.

    Graphs that do not know what grows with their batch are placed op by op, as they are; so are all
    with ``planners="auto"``. ``goal`` says what is best, as with ``hocket plan --objective``:
    step (or throughput), cost, or memory. ``must`` are limits that it keeps, such as
    ``("fit 8GiB", "devices 2")``.
    """
    from hocket.api.planners import compare_candidates, parse_constraints
    from hocket.planners.goal import GOALS

    names = (planners,) if isinstance(planners, str) else planners
    problem = make_problem(
        graph, on, transfers=transfers, objective=objective, contiguous=contiguous,
        headroom_bytes=headroom_bytes, profile=profile, calibration=calibration,
    )  # fmt: skip
    if goal not in GOALS:
        raise unknown_name("goal", str(goal), GOALS)
    limits = parse_constraints(must)
    return best_of(compare_candidates(problem, names, GOALS[goal], limits), is_limited=bool(must))


def best_of(comparison: Comparison, *, is_limited: bool = False) -> Planned:
    """Return the winner of a comparison; raises `NoFeasiblePlanError` if nothing fits.

    With ``is_limited`` the error suggests to relax the limits.
    """
    from hocket.view.comparison import alternatives_text

    winner = comparison.required_winner(is_limited=is_limited)
    assert winner.plan is not None
    assert winner.timeline is not None
    # `hocket explain` shows them; a plan file does not hold the other candidates.
    told = {"why": comparison.why, "alternatives": alternatives_text(comparison)}
    notes = {**winner.plan.notes, **{key: text for key, text in told.items() if text}}
    return Planned(comparison, replace(winner.plan, notes=notes), winner.timeline)
