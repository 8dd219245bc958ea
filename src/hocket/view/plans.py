"""Views of plans: one for each section that a plan can be about.

``hocket show``, ``explain``, ``simulate`` and ``run`` ask the view of a plan's first section that
has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hocket.base.errors import UsageError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.transformer_plan import TransformerPlan, is_transformer_plan
from hocket.simulate.timeline import Timeline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hocket.runtime.run_result import RunResult
    from hocket.view.budgeted import WithinBudget


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """A plan as text, as ``--json`` and as files."""

    summary: Callable[[Problem, Plan, Timeline], RenderableType]
    explanation: Callable[[Problem, Plan, Timeline], RenderableType]
    shown: Callable[[Problem, Plan, Timeline], dict[str, Any]]
    explained: Callable[[Problem, Plan, Timeline], dict[str, Any]]
    simulated: Callable[[Problem, Plan, Timeline], dict[str, Any]]
    report_html: Callable[[Problem, Plan, Timeline], str]
    trace: Callable[[Problem, Plan, Timeline], dict[str, Any]]
    pictured: Callable[[Problem, Plan], tuple[Problem, Plan]] = lambda problem, plan: (
        problem,
        plan,
    )
    """The ops that timelines are about, and where they run."""
    run_table: Callable[[Problem, Plan, RunResult], RenderableType]
    ran: Callable[[Problem, Plan, RunResult], dict[str, Any]]


def view_of(plan: Plan, within: WithinBudget | None = None) -> PlanView:
    """The view of a plan; raises `UsageError` where nothing of it can be shown in time.

    A plan ``within`` a budget shows how that is kept.
    """
    sections = plan.named()
    if "placement" in sections or "parallel" in sections:
        by_ops = _placement if "placement" in sections else _parallel
        view = _transformer() if is_transformer_plan(plan) else by_ops()
        return view if within is None else _within(view, within)
    raise UsageError(
        f"a plan of {', '.join(plan.named()) or 'nothing'} takes no time that could be shown",
        hint="hocket verify checks it",
    )


def _placement() -> PlanView:
    from hocket.view import placed
    from hocket.view.measured import placement_run_data, placement_run_table
    from hocket.view.report import report_html
    from hocket.view.text import explanation, plan_summary
    from hocket.view.trace import trace_events

    return PlanView(
        summary=plan_summary,
        explanation=explanation,
        shown=placed.shown,
        explained=placed.explained,
        simulated=placed.simulated,
        report_html=report_html,
        trace=trace_events,
        run_table=placement_run_table,
        ran=placement_run_data,
    )


def _within(view: PlanView, within: WithinBudget) -> PlanView:
    """The view of a step that a memory plan made, beside what that plan is."""
    from hocket.view.budgeted import kept_data
    from hocket.view.text import explanation, plan_summary

    kept = {"memory": kept_data(within)}
    return replace(
        view,
        summary=partial(plan_summary, within=within),
        explanation=partial(explanation, within=within),
        shown=lambda *of: {**view.shown(*of), **kept},
        explained=lambda *of: {**view.explained(*of), **kept},
        simulated=lambda *of: {**view.simulated(*of), **kept},
    )


def within_budget(problem: Problem, plan: Plan, executed: Problem) -> WithinBudget | None:
    """The memory plan of a plan and the step ``executed`` with it; None where it has none."""
    from hocket.plan.sections import Memory
    from hocket.view.budgeted import WithinBudget

    memory = plan.get(Memory)
    return None if memory is None else WithinBudget(problem.graph, memory, executed.graph)


def _parallel() -> PlanView:
    """A batch split over devices, as the larger graph that it expands to."""
    from hocket.view import shared
    from hocket.view.measured import shares_run_data, shares_run_table
    from hocket.view.report import report_html
    from hocket.view.text import explanation, plan_summary
    from hocket.view.trace import trace_events

    return PlanView(
        summary=shared.summary_by(plan_summary),
        explanation=shared.summary_by(explanation),
        shown=shared.shown,
        explained=shared.explained,
        simulated=shared.simulated,
        report_html=shared.unfolding(report_html),
        trace=shared.unfolding(trace_events),
        pictured=shared.unfolded,
        run_table=shares_run_table,
        ran=shares_run_data,
    )


def _transformer() -> PlanView:
    from hocket.simulate.verify import violations
    from hocket.view.measured import parallel_run_data, parallel_run_table
    from hocket.view.parallel import plan_data, plan_numbers
    from hocket.view.parallel_report import parallel_report_html
    from hocket.view.parallel_text import parallel_explanation, parallel_summary

    def shown(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
        return plan_data(TransformerPlan(problem, plan), timeline)

    def explained(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
        numbers = plan_numbers(TransformerPlan(problem, plan), timeline)
        why = plan.notes.get("why", "")
        return {**shown(problem, plan, timeline), "predicted": numbers, "why": why}

    def simulated(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, Any]:
        is_legal = not violations(plan, problem, timeline)
        return {**shown(problem, plan, timeline), "feasible": is_legal}

    return PlanView(
        summary=lambda problem, plan, timeline: parallel_summary(
            TransformerPlan(problem, plan), timeline
        ),
        explanation=lambda problem, plan, timeline: parallel_explanation(
            TransformerPlan(problem, plan), timeline
        ),
        shown=shown,
        explained=explained,
        simulated=simulated,
        report_html=lambda problem, plan, _: parallel_report_html(TransformerPlan(problem, plan)),
        trace=_pipeline_trace,
        run_table=parallel_run_table,
        ran=parallel_run_data,
    )


def _pipeline_trace(problem: Problem, plan: Plan, _: Timeline) -> dict[str, Any]:
    """The trace of a pipeline, as the event engine sees its actions and transfers."""
    from hocket.simulate.engine import simulate
    from hocket.simulate.pipeline_graph import pipeline_problem
    from hocket.view.trace import trace_events

    divided = TransformerPlan(problem, plan)
    ranks = tuple(f"rank {rank} ({names[0]})" for rank, names in enumerate(divided.devices))
    inner, placed = pipeline_problem(divided.schedule, divided.costs, ranks)
    return trace_events(inner, placed, simulate(inner, placed))
