"""What ``hocket run`` does with a parallel plan."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.output import console, emit, say, working

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hocket.plan.divided import DividedTraining
    from hocket.runtime.options import RunOptions
    from hocket.runtime.parallel.check import Agreement
    from hocket.runtime.parallel.session import ParallelRunResult
    from hocket.runtime.record import StepRecord


def run(plan: DividedTraining, options: RunOptions, *, check_only: bool, as_json: bool) -> None:
    """Check a division at toy size, then train and print what happened."""
    if check_only:
        _check(plan, as_json)
        return
    from hocket.runtime.parallel.session import run_parallel

    with ExitStack() as until_first_step:
        until_first_step.enter_context(working(f"checking and building {plan.model.name}"))

        def show(number: int, record: StepRecord) -> None:
            until_first_step.close()
            _show(number, record, as_json)

        result = run_parallel(plan, options, on_step=show)
    _say_what_stood_in(plan, result)
    if not result.is_finite:
        say("warning: the loss is not finite: the training has diverged")
    if as_json:
        emit(_as_dict(plan, result))
    else:
        console().print(_table(plan, result))


def _check(plan: DividedTraining, as_json: bool) -> None:
    from hocket.runtime.parallel.check import check_division

    with working("comparing with one device at toy size"):
        agreement = check_division(plan)
    if as_json:
        emit({"check": _agreement(agreement)})
    else:
        click.echo(
            "at toy size loss and gradients are those of one device "
            f"(largest difference {max(agreement.loss_error, agreement.gradient_error):.1e})"
        )


def _show(number: int, record: StepRecord, as_json: bool) -> None:
    from hocket.base.units import format_seconds

    click.echo(
        f"step {number:>4}  loss {record.loss:.6g}  {format_seconds(record.step_s)}", err=as_json
    )


def _say_what_stood_in(plan: DividedTraining, result: ParallelRunResult) -> None:
    is_cpu = {device.name: device.kind.is_cpu for device in plan.cluster.devices}
    if any(place == "cpu" and not is_cpu[name] for name, place in result.runs_on.items()):
        say("note: devices run on the processor here, so times are not those of the planned ones")
    elif result.dtype != plan.dtype:
        say(f"note: computed with {result.dtype}, planned with {plan.dtype}: times differ")


def _table(plan: DividedTraining, result: ParallelRunResult) -> RenderableType:
    from rich.table import Table

    from hocket.base.units import format_seconds

    table = Table(
        box=None,
        title=f"step predicted {format_seconds(result.predicted_step_s)}, "
        f"measured {format_seconds(result.median_step_s)}",
        title_justify="left",
        title_style="",
    )
    for name in ("pipeline rank", "devices", "busy predicted", "busy measured"):
        table.add_column(name, justify="right")
    for rank, predicted_s in enumerate(result.predicted_busy_s):
        measured = format_seconds(result.measured_busy_s[rank]) if result.measured_busy_s else "-"
        names = plan.devices[rank]
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        table.add_row(str(rank), shown, format_seconds(predicted_s), measured)
    return table


def _as_dict(plan: DividedTraining, result: ParallelRunResult) -> dict[str, Any]:
    losses = [loss if math.isfinite(loss) else None for loss in result.losses]
    return {
        "backend": result.backend,
        "dtype": result.dtype,
        "steps": [
            {"step": index + 1, "loss": loss, "seconds": seconds}
            for index, (loss, seconds) in enumerate(zip(losses, result.step_s, strict=True))
        ],
        "losses": losses,
        "is_finite": result.is_finite,
        "step_s": {"predicted": result.predicted_step_s, "measured": result.median_step_s},
        "pipeline_ranks": [
            {
                "devices": list(plan.devices[rank]),
                "busy_s": {
                    "predicted": predicted_s,
                    "measured": result.measured_busy_s[rank] if result.measured_busy_s else None,
                },
            }
            for rank, predicted_s in enumerate(result.predicted_busy_s)
        ],
        "peak_bytes": dict(result.peak_bytes),
        "check": None if result.agreement is None else _agreement(result.agreement),
    }


def _agreement(agreement: Agreement) -> dict[str, Any]:
    return {
        "is_right": agreement.is_right,
        "loss_error": agreement.loss_error,
        "gradient_error": agreement.gradient_error,
    }
