"""What ``show``, ``simulate`` and ``explain`` do with the plan of a parallel run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.cli.output import console, emit, say

if TYPE_CHECKING:
    from hocket.plan.parallel import ParallelPlan
    from hocket.simulate.timeline import Timeline


def show_parallel(path: Path, report: Path | None, trace: Path | None, as_json: bool) -> None:
    """``hocket show`` of a parallel plan."""
    from hocket.simulate.engine import simulate
    from hocket.simulate.pipeline_graph import pipeline_problem
    from hocket.view.parallel_report import write_parallel_report
    from hocket.view.parallel_text import parallel_summary
    from hocket.view.trace import write_trace

    plan, timeline = _loaded(path)
    if report is not None:
        write_parallel_report(report, plan)
        say(f"wrote {report}")
    if trace is not None:
        ranks = tuple(f"rank {rank} ({names[0]})" for rank, names in enumerate(plan.devices))
        problem, placed = pipeline_problem(plan.schedule, plan.costs, ranks)
        write_trace(trace, problem, placed, simulate(problem, placed))
        say(f"wrote {trace}")
    if as_json:
        emit(_as_dict(plan, timeline))
        return
    console().print(parallel_summary(plan, timeline))


def simulate_parallel(path: Path, as_json: bool) -> None:
    """``hocket simulate`` of a parallel plan."""
    from hocket.planners.parallelism.verify import parallel_violations
    from hocket.view.parallel_text import parallel_summary

    plan, timeline = _loaded(path)
    if as_json:
        feasible = not parallel_violations(plan)
        emit({**_as_dict(plan, timeline), "feasible": feasible})
        return
    console().print(parallel_summary(plan, timeline))


def explain_parallel(path: Path, as_json: bool) -> None:
    """``hocket explain`` of a parallel plan."""
    from hocket.view.parallel import plan_numbers
    from hocket.view.parallel_text import parallel_explanation

    plan, timeline = _loaded(path)
    if as_json:
        numbers, why = dict(plan_numbers(plan)), plan.notes.get("why", "")
        emit({**_as_dict(plan, timeline), "predicted": numbers, "why": why})
        return
    console().print(parallel_explanation(plan, timeline))


def _loaded(path: Path) -> tuple[ParallelPlan, Timeline]:
    from hocket.plan.parallel_files import read_parallel_plan
    from hocket.simulate.pipeline import simulate_pipeline

    plan = read_parallel_plan(path)
    return plan, simulate_pipeline(plan.schedule, plan.costs)


def _as_dict(plan: ParallelPlan, timeline: Timeline) -> dict[str, Any]:
    from hocket.view.parallel import rank_facts

    return {
        "model": plan.model.name,
        "cluster": {"name": plan.cluster.name, "hash": plan.cluster.content_hash},
        "division": asdict(plan.division),
        "step_s": timeline.makespan_s,
        "predicted_step_s": plan.step_s,
        "bubble": timeline.idle_share,
        "peak_bytes": max(timeline.peak_bytes.tolist()),
        "ranks": [asdict(fact) for fact in rank_facts(plan, timeline)],
    }
