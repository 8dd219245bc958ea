"""Show a simulated plan as text, JSON and files: output of ``show``, ``explain`` and ``simulate``.

Plans that split a batch are shown as the graph to which they expand. Plans for the shape of a
transformer have no single ops and are shown by pipeline rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hocket.base.errors import UsageError
from hocket.base.units import format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import (
    Communication,
    Memory,
    Order,
    Parallel,
    Placement,
    Priority,
    Waves,
)
from hocket.plan.transformer_plan import TransformerPlan, is_transformer_plan
from hocket.plan.words import in_words
from hocket.simulate.analysis import bottleneck, channel_busy_s, critical_path
from hocket.simulate.parallel import expand
from hocket.simulate.timeline import Timeline
from hocket.view.budgeted import WithinBudget, kept_data

if TYPE_CHECKING:
    from rich.console import RenderableType


def unfolded(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The expanded graph of a plan that splits the batch, with the placement of its ops."""
    found = expand(problem, plan[Parallel], plan.get(Communication), plan.get(Waves))
    sections = (Placement(found.device_of), Order(priority=found.priority))
    inner = replace(plan, work_hash=found.problem.work_hash, sections=sections)
    return found.problem, inner


def device_peaks(problem: Problem, timeline: Timeline) -> dict[str, int]:
    """Peak memory by device name."""
    return dict(zip(problem.cluster.device_names, timeline.peak_bytes.tolist(), strict=True))


def device_names(problem: Problem, plan: Plan) -> dict[str, str]:
    """Device name of each op."""
    names, device_of = problem.cluster.device_names, plan[Placement].device_of.tolist()
    ops = problem.graph.op_names
    return {op: names[device] for op, device in zip(ops, device_of, strict=True)}


def pictured(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """The problem and placement to which the plan's timeline belongs; expanded if the batch is
    split.
    """
    is_split = plan.get(Parallel) is not None and not is_transformer_plan(plan)
    return unfolded(problem, plan) if is_split else (problem, plan)


@dataclass(frozen=True, eq=False)
class PlanView:
    """A plan with its simulated timeline; ``within`` is the memory plan of its step, if there is
    one.
    """

    problem: Problem
    plan: Plan
    timeline: Timeline
    within: WithinBudget | None = None

    def __post_init__(self) -> None:
        sections = self.plan.named()
        if "placement" not in sections and "parallel" not in sections:
            raise UsageError(
                f"a plan of {', '.join(sections) or 'nothing'} takes no time that could be shown",
                hint="hocket verify checks it",
            )

    @cached_property
    def inner(self) -> tuple[Problem, Plan, Timeline]:
        """The expanded graph, its placement, and the timeline."""
        return (*pictured(self.problem, self.plan), self.timeline)

    @cached_property
    def of_shape(self) -> TransformerPlan | None:
        """The plan of a transformer's shape; None for plans of captured ops."""
        is_shape = is_transformer_plan(self.plan)
        return TransformerPlan(self.problem, self.plan) if is_shape else None

    # ── text ──

    def summary(self) -> RenderableType:
        """Output of ``hocket show``: devices, memory, links and the longest ops."""
        if self.of_shape is not None:
            from hocket.view.parallel_text import parallel_summary

            return parallel_summary(self.of_shape, self.timeline)
        from hocket.view.text import plan_summary

        return self._headed(plan_summary(*self.inner, self.within))

    def explanation(self) -> RenderableType:
        """Output of ``hocket explain``: the alternatives and the limit of the step."""
        if self.of_shape is not None:
            from hocket.view.parallel_text import parallel_explanation

            return parallel_explanation(self.of_shape, self.timeline)
        from hocket.view.text import explanation

        return self._headed(explanation(*self.inner, self.within))

    def _headed(self, shown: RenderableType) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        if self.plan.get(Parallel) is None:
            return shown
        return Group(Text(strategy_text(self.plan), style="bold"), shown)

    # ── JSON ──

    def shown(self) -> dict[str, Any]:
        """JSON of ``hocket show``."""
        if self.of_shape is not None:
            from hocket.view.parallel import plan_data

            return plan_data(self.of_shape, self.timeline)
        data: dict[str, Any] = {
            "planner": self.plan.planner,
            "step_s": self.timeline.makespan_s,
            "peak_bytes": device_peaks(self.problem, self.timeline),
        }
        split = self.plan.get(Parallel)
        if split is None:
            data["placement"] = device_names(self.problem, self.plan)
        else:
            from hocket.view.facts import facts_of

            data["how"] = strategy_text(self.plan)
            data["samples_per_s"] = split.num_samples / self.timeline.makespan_s
            data["moved_bytes"] = facts_of(*self.inner).moved_bytes
            data["parallel"] = split.to_data()
        return data | self._kept()

    def explained(self) -> dict[str, Any]:
        """JSON of ``hocket explain``."""
        noted = {name: self.plan.notes.get(name, "") for name in ("why", "alternatives")}
        if self.of_shape is not None:
            from hocket.view.parallel import plan_numbers

            return {
                **self.shown(),
                "predicted": plan_numbers(self.of_shape, self.timeline),
                **noted,
            }
        problem, _, timeline = self.inner
        graph, tensors = problem.graph, timeline.transfer_tensor
        path = [
            {
                "kind": step.kind,
                "name": graph.op_names[step.index]
                if step.kind == "op"
                else graph.tensor_names[tensors[step.index]],
                "start_s": step.start_s,
                "end_s": step.end_s,
                "reason": step.reason,
                "wait_s": step.wait_s,
            }
            for step in critical_path(timeline, problem)
        ]
        own = self.shown() if self.plan.get(Placement) is None else self._kept()
        data = {"step_s": timeline.makespan_s, "bottleneck": bottleneck(timeline, problem)}
        return {**own, **data, **noted, "critical_path": path}

    def simulated(self) -> dict[str, Any]:
        """JSON of ``hocket simulate``."""
        from hocket.simulate.verify import violations

        is_legal = not violations(self.plan, self.problem, self.timeline)
        if self.of_shape is not None:
            return {**self.shown(), "feasible": is_legal}
        problem, plan, timeline = self.inner
        span_s = timeline.makespan_s or 1.0
        names, links = problem.cluster.device_names, problem.costs.routes.channel_names
        link_s = channel_busy_s(timeline, problem)
        return {
            "planner": plan.planner,
            "transfers": problem.transfers,
            "step_s": timeline.makespan_s,
            "predicted_step_s": plan.claims.step_s,
            "peak_bytes": device_peaks(problem, timeline),
            "feasible": is_legal,
            "device_busy": dict(zip(names, (timeline.busy_s / span_s).tolist(), strict=True)),
            "link_busy": dict(zip(links, (link_s / span_s).tolist(), strict=True)),
            "transfers_sent": len(timeline.transfer_tensor),
            "bottleneck": bottleneck(timeline, problem),
            **self._kept(),
        }

    def _kept(self) -> dict[str, Any]:
        return {} if self.within is None else {"memory": kept_data(self.within)}

    # ── files ──

    def report_html(self) -> str:
        """The report as one HTML file."""
        if self.of_shape is not None:
            from hocket.view.parallel_report import parallel_report_html

            return parallel_report_html(self.of_shape)
        from hocket.view.report import report_html

        return report_html(*self.inner)

    def trace(self) -> dict[str, Any]:
        """Trace for Perfetto: ops and transfers, or the actions of a pipeline."""
        if self.of_shape is not None:
            from hocket.view.parallel import plan_trace

            return plan_trace(self.of_shape, self.timeline)
        from hocket.view.trace import trace_events

        return trace_events(*self.inner)


def within_budget(problem: Problem, plan: Plan, executed: Problem) -> WithinBudget | None:
    """The memory plan with the step ``executed`` under it; None if the plan has no memory
    section."""
    memory = plan.get(Memory)
    return None if memory is None else WithinBudget(problem.graph, memory, executed.graph)


def strategy_text(plan: Plan) -> str:
    """Strategy of a plan that splits a batch, with its waves and gradient order."""
    waves = plan.get(Waves)
    notes = "" if waves is None else f", two waves, the second {waves.lead} ops behind"
    if plan.get(Priority) is not None:
        notes += ", gradients by priority"
        if plan.claims.step_s is not None:
            notes += f": {format_seconds(plan.claims.step_s)} for a step among many"
    elif waves is not None and plan.claims.step_s is not None:
        notes += f": {format_seconds(plan.claims.step_s)} with stream waits"
    return in_words(plan[Parallel]) + notes
