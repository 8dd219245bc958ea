"""``hocket run``: train some steps of a plan on this machine and compare with the prediction.

Prints losses and step times, writes a trace, and checks gradients of parallel plans at small size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from hocket.cli.declare import declare, option
from hocket.cli.options import GraphFile, PlanFile
from hocket.cli.output import answer, console, emit, say, working
from hocket.cli.sources import announce_compilation, load_plan, say_loss
from hocket.cli.written import require_folder
from hocket.runtime.run_options import BACKENDS

if TYPE_CHECKING:
    from hocket.plan.files import SavedPlan
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.runtime.run_options import RunResult
    from hocket.runtime.step_record import StepRecord

# Longer predicted CPU steps are announced, so that nobody believes the program hangs.
_LONG_STEP_S = 20.0


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Options of a run."""

    steps: Annotated[int, option("Training steps to run.", type=click.IntRange(1, 10**6))] = 10
    backend: Annotated[
        Any,
        option(
            "One process, or a process per device on CPUs (gloo) or GPUs (nccl). auto: one "
            "process where there is a GPU for each device, else gloo.",
            type=click.Choice(BACKENDS),
        ),
    ] = "auto"
    model: Annotated[
        str | None,
        option(
            "Model to use if the name in the plan cannot be resolved.", metavar="NAME_OR_FACTORY"
        ),
    ] = None
    seed: Annotated[
        int, option("Seed of weights, batch and dropout.", type=click.IntRange(0, 2**31 - 1))
    ] = 0
    threads: Annotated[
        int | None,
        option(
            "Threads of each process on CPUs. [default: the cores, shared]",
            type=click.IntRange(1, 1024),
        ),
    ] = None


@declare("run")
def command(
    *,
    plan_file: PlanFile,
    graph_file: GraphFile = None,
    settings: _Settings,
    trace_file: Annotated[
        Path | None,
        option(
            "Trace to write, measured beside predicted. [default: run.trace.json beside the plan, "
            "nothing with --json]",
            "--trace",
        ),
    ] = None,
    check_only: Annotated[
        bool, "For a parallel plan: only compare gradients of a small copy with one device."
    ] = False,
    as_json: bool,
) -> None:
    """Run PLAN: train for some steps, print losses and times, compare with the prediction.

    The model is built and captured again with random weights, and refused if it differs from the
    planned one. A parallel plan is first compared with one device at toy size.
    """
    from hocket.base.extras import require

    require("torch", "running a plan")
    saved = load_plan(plan_file, graph_file)
    is_divided = _is_divided(saved.plan, check_only=check_only, only_placement={
        "--model": settings.model, "--trace": trace_file,
        "--backend single": settings.backend == "single",
    })  # fmt: skip
    if check_only:
        _check(saved, as_json)
        return
    from hocket.runtime.run import run_plan
    from hocket.runtime.run_options import RunCallbacks, RunOptions
    from hocket.simulate.rewriting.step import rewritten_step
    from hocket.view.measured import run_data, run_table
    from hocket.view.plan_view import pictured

    options = RunOptions(**vars(settings))
    if trace_file is None and not as_json and not is_divided:
        trace_file = _beside(plan_file)
    if trace_file is not None:
        require_folder(trace_file)
    announce_compilation()
    if not is_divided:
        _say_how_long(saved.problem)
    with working(f"building {saved.problem.work_name}") as progress:

        def show(number: int, record: StepRecord) -> None:
            _show(number, record, as_json)

        watch = RunCallbacks(on_step=show, on_progress=progress)
        result = run_plan(saved.problem, saved.plan, options, watch=watch)
    if not is_divided:
        say_loss(saved.problem.graph)
    _say_what_stood_in(saved.problem, result)
    if not result.is_finite:
        say("warning: the loss is not finite: the training has diverged")
    problem, plan = saved.problem, saved.plan
    if not as_json:
        # Printed before the trace is written: a full disk must not lose the measured times.
        console().print(run_table(problem, plan, result))
    if trace_file is not None:
        from hocket.view.trace import write_traces

        timelines = {"predicted": result.predicted}
        if result.measured is not None:
            timelines["measured"] = result.measured
        write_traces(trace_file, *pictured(*rewritten_step(problem, plan)), timelines)
        say(f"wrote {trace_file} — open it in https://ui.perfetto.dev")
    if as_json:
        from hocket.cost.measured_steps import RECORD, run_record

        written: dict[str, Any] = {"trace": trace_file}
        if (costs := saved.problem.op_costs) is not None:
            written[RECORD] = run_record(
                saved.problem.work_name, saved.problem.cluster, costs.settings,
                result.predicted_step_s, result.median_step_s,
            )  # fmt: skip
        emit({**run_data(problem, plan, result), **written})


def _check(saved: SavedPlan, as_json: bool) -> None:
    from hocket.plan.transformer_plan import TransformerPlan
    from hocket.runtime.numerics_check import check_parallel
    from hocket.view.measured import agreement_data

    with working("comparing with one device at toy size"):
        agreement = check_parallel(TransformerPlan(saved.problem, saved.plan))
    answer(
        as_json,
        {"check": agreement_data(agreement)},
        "at toy size loss and gradients are those of one device "
        f"(largest difference {max(agreement.loss_error, agreement.gradient_error):.1e})",
    )


def _is_divided(plan: Plan, *, check_only: bool, only_placement: dict[str, Any]) -> bool:
    """True for a plan of a transformer's shape; refuse options that do not apply to the plan."""
    from hocket.base.errors import UsageError
    from hocket.plan.transformer_plan import is_transformer_plan

    is_divided = is_transformer_plan(plan)
    if is_divided:
        given = [name for name, value in only_placement.items() if value]
        if given:
            raise UsageError(f"{given[0]} has no meaning for a parallel plan", hint="leave it out")
    elif check_only:
        raise UsageError("--check-only is for parallel plans", hint="leave it out")
    return is_divided


def _beside(plan_file: Path) -> Path:
    stem = plan_file.name.removesuffix(".gz").removesuffix(".json")
    return plan_file.with_name("run.trace.json" if stem == "plan" else f"{stem}.run.trace.json")


def _show(number: int, record: StepRecord, as_json: bool) -> None:
    from hocket.base.units import format_seconds

    loss = "" if record.loss is None else f"  loss {record.loss:.6g}"
    click.echo(f"step {number:>4}{loss}  {format_seconds(record.step_s)}", err=as_json)


def _say_how_long(problem: Problem) -> None:
    """Print the estimated step time on the CPU if it is long."""
    from hocket.base.units import words_for_seconds
    from hocket.runtime.run_limits import cpu_step_s

    step_s = cpu_step_s(problem)
    if step_s is not None and step_s > _LONG_STEP_S:
        say(
            f"note: no GPU here: about {words_for_seconds(step_s)} per step on the CPU; a plan of "
            "a smaller batch takes less"
        )


def _say_what_stood_in(problem: Problem, result: RunResult) -> None:
    """Note that times on a CPU, or of another dtype, are not those of the planned devices."""
    is_cpu = {device.name: device.kind.is_cpu for device in problem.cluster.devices}
    names = [name for name, place in result.runs_on.items() if place == "cpu" and not is_cpu[name]]
    if names:
        say(
            f"note: {', '.join(names)} run on the CPU here, so times are not those of the "
            "planned devices"
        )
    elif result.dtype is not None and result.dtype != problem.training.software.dtype:
        planned = problem.training.software.dtype
        say(f"note: computed with {result.dtype}, planned with {planned}: times differ")
