"""``hocket show``, ``explain``, ``simulate`` and ``verify``: print and check a saved plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from hocket.cli.declare import declare
from hocket.cli.options import GraphFile, PlanFile, Transfers
from hocket.cli.output import console, emit, fail, say, working
from hocket.cli.sources import announce_compilation, load_plan

if TYPE_CHECKING:
    from hocket.view.plan_view import PlanView


@declare("show")
def show(
    *,
    plan_file: PlanFile,
    graph_file: GraphFile = None,
    report: Annotated[Path | None, "Also write the HTML report here."] = None,
    trace: Annotated[Path | None, "Also write the Perfetto trace here."] = None,
    as_json: bool,
) -> None:
    """Show PLAN: devices, memory, links and the ops that take the most time."""
    from hocket.base.atomic import write_atomically
    from hocket.view.trace import trace_bytes

    view = _simulated(plan_file, graph_file)
    if report is not None:
        write_atomically(report, view.report_html().encode())
        say(f"wrote {report}")
    if trace is not None:
        write_atomically(trace, trace_bytes(trace, view.trace()))
        say(f"wrote {trace}")
    if as_json:
        emit(view.shown())
    else:
        console().print(view.summary())


@declare("explain")
def explain(
    *,
    plan_file: PlanFile,
    graph_file: GraphFile = None,
    as_json: bool,
) -> None:
    """Explain PLAN: the alternatives, its critical path, why devices wait, what limits it."""
    view = _simulated(plan_file, graph_file)
    if as_json:
        emit(view.explained())
    else:
        console().print(view.explanation())


@declare("simulate")
def simulate(
    *,
    plan_file: PlanFile,
    graph_file: GraphFile = None,
    transfers: Annotated[
        Transfers | None, "Contention between transfers, instead of that of the plan."
    ] = None,
    as_json: bool,
) -> None:
    """Simulate PLAN and print its step time, memory and use of devices and links."""
    view = _simulated(plan_file, graph_file, transfers)
    if as_json:
        emit(view.simulated())
    else:
        console().print(view.summary())


@declare("verify")
def verify(
    *,
    plan_file: PlanFile,
    graph_file: GraphFile = None,
    as_json: bool,
) -> None:
    """Check PLAN: every section by its rules, precedence, memory. Exit 6 on a violation."""
    from hocket.base.errors import CheckError
    from hocket.simulate.verify import violations

    saved = load_plan(plan_file, graph_file)
    announce_compilation()
    found = violations(saved.plan, saved.problem)
    listed = {"violations": found}
    if found:
        message = "; ".join(violation.message for violation in found[:5])
        error = CheckError(message, where=str(plan_file))
        raise SystemExit(fail(error, as_json=as_json, extra=listed))
    if as_json:
        emit({"ok": True, **listed})
    else:
        click.echo(f"{plan_file}: legal")


def _simulated(plan_file: Path, graph_file: Path | None, transfers: Any = None) -> PlanView:
    """Simulate the step of a plan, rewritten as the plan demands, and return its view."""
    from hocket.simulate.engine import simulate as simulate_plan
    from hocket.simulate.rewriting.step import rewritten_step
    from hocket.view.plan_view import PlanView, within_budget

    saved = load_plan(plan_file, graph_file)
    problem, plan = rewritten_step(saved.problem, saved.plan)
    within = within_budget(saved.problem, saved.plan, problem)
    problem = replace(problem, transfers=transfers) if transfers else problem
    announce_compilation()
    with working("simulating"):
        return PlanView(problem, plan, simulate_plan(problem, plan), within)
