"""``hocket explain``: what a plan's time is spent on and what limits it."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import console, emit, json_option
from hocket.cli.sources import announce_compilation, load_plan, plan_arguments, refuse_graph


@click.command("explain")
@plan_arguments
@json_option
def command(plan_file: Path, graph_file: Path | None, as_json: bool) -> None:
    """Explain PLAN: its critical path, why devices wait, and what limits the step."""
    from hocket.plan.parallel_files import holds_parallel_plan

    if holds_parallel_plan(plan_file):
        from hocket.cli.parallel_plans import explain_parallel

        refuse_graph(graph_file)
        explain_parallel(plan_file, as_json)
        return
    from hocket.simulate.analysis import bottleneck, critical_path
    from hocket.simulate.engine import simulate

    saved = load_plan(plan_file, graph_file)
    problem, plan = saved.problem, saved.plan
    announce_compilation()
    timeline = simulate(problem, plan)
    if not as_json:
        from hocket.view.text import explanation

        console().print(explanation(problem, plan, timeline))
        return
    tensors, graph = timeline.transfer_tensor, problem.graph
    emit(
        {
            "step_s": timeline.makespan_s,
            "bottleneck": bottleneck(timeline, problem),
            "critical_path": [
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
            ],
        }
    )
