"""Format a run, measured and predicted, as tables for the terminal and as ``--json``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Waves
from hocket.plan.transformer_plan import TransformerPlan, is_transformer_plan
from hocket.simulate.pipeline import action_busy_s
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable, name, number
from hocket.view.wording import picked

if TYPE_CHECKING:
    from hocket.runtime.numerics_check import Agreement
    from hocket.runtime.run_options import RunResult

_MANY = 2
"""Ratio to the prediction from which a factor is printed instead of a percentage."""


def run_table(problem: Problem, plan: Plan, result: RunResult) -> RenderableType:
    """Step time, and a line per device, replica or pipeline rank: predicted beside measured."""
    if is_transformer_plan(plan):
        columns, rows = _rank_lines(_ranks(problem, plan, result))
    elif plan.get(Parallel) is not None:
        columns, rows = _replica_lines(problem, plan, result)
    else:
        columns = (name("device"), name("runs on", 1), number("busy: predicted"),
                   number("measured"), number("peak: predicted"), number("measured"))  # fmt: skip
        rows = [
            [row["name"], row["runs_on"], *_both(row["busy_s"], format_seconds),
             *_both(row["peak_bytes"], format_bytes)]
            for row in _devices(problem, result)
        ]  # fmt: skip
    table = FittedTable(columns=columns, rows=[[inert(cell) for cell in row] for row in rows])
    return Group(_title(result), table, *map(Text, _not_reserved(plan, result)))


def _rank_lines(ranks: list[dict[str, Any]]) -> tuple[tuple[Column, ...], list[list[str]]]:
    columns = (number("pipeline rank"), name("devices"), number("busy: predicted"),
               number("measured"))  # fmt: skip
    rows = []
    for rank, row in enumerate(ranks):
        names = row["devices"]
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        rows.append([str(rank), shown, *_both(row["busy_s"], format_seconds)])
    return columns, rows


def _replica_lines(
    problem: Problem, plan: Plan, result: RunResult
) -> tuple[tuple[Column, ...], list[list[str]]]:
    columns = [name("replica"), name("runs on"), number("samples"), number("microbatches")]
    if result.peak_bytes:
        columns += [number("peak: predicted"), number("measured")]
    peaks = {row["name"]: row["peak_bytes"] for row in _devices(problem, result)}
    rows = []
    for replica in plan[Parallel].replicas:
        first = replica.devices[0]
        row = [" > ".join(replica.devices), result.runs_on[first], str(replica.num_samples),
               str(len(replica.microbatches))]  # fmt: skip
        rows.append(row + (_both(peaks[first], format_bytes) if result.peak_bytes else []))
    return tuple(columns), rows


def _both(value: dict[str, Any], write: Callable[[Any], str]) -> list[str]:
    """Predicted and measured value as text; a dash for a value that was not measured."""
    return ["–" if value[by] is None else write(value[by]) for by in ("predicted", "measured")]


def _not_reserved(plan: Plan, result: RunResult) -> Iterator[str]:
    """Yield a note about memory that two CUDA streams reserve and a run on the CPU does not
    show."""
    waves = plan.get(Waves)
    if waves is None or not waves.separate_bytes or set(result.runs_on.values()) != {"cpu"}:
        return
    planned = int(result.predicted.peak_bytes.max()) + waves.separate_bytes
    yield (
        f"peaks are of one allocator: on a GPU {format_bytes(planned)} are planned, since two "
        f"streams hold {format_bytes(waves.separate_bytes)} beyond their joint peak"
    )


def run_data(problem: Problem, plan: Plan, result: RunResult) -> dict[str, Any]:
    """JSON of ``hocket run --json``."""
    if is_transformer_plan(plan):
        agreement = result.agreement
        return {
            **_common(result),
            "dtype": result.dtype,
            "pipeline_ranks": _ranks(problem, plan, result),
            "peak_bytes": dict(result.peak_bytes),
            "check": None if agreement is None else agreement_data(agreement),
        }
    split = plan.get(Parallel)
    return {
        "planner": plan.planner,
        "loss": problem.graph.meta.get("loss"),
        **_common(result),
        "devices": _devices(problem, result),
        **({} if split is None else {"parallel": split.to_data()}),
    }


def _devices(problem: Problem, result: RunResult) -> list[dict[str, Any]]:
    predicted, measured = result.predicted, result.measured
    return [
        {
            "name": device,
            "runs_on": result.runs_on[device],
            "busy_s": {
                "predicted": float(predicted.busy_s[d]),
                # A memory plan runs inside the model's own forward and backward, where single ops
                # are not timed.
                "measured": None if measured is None else float(measured.busy_s[d]),
            },
            "peak_bytes": {
                "predicted": int(predicted.peak_bytes[d]),
                "measured": result.peak_bytes.get(device)
                if measured is None
                else int(measured.peak_bytes[d]),
            },
        }
        for d, device in enumerate(problem.cluster.device_names)
        if device in result.runs_on
    ]


def agreement_data(agreement: Agreement) -> dict[str, Any]:
    """Differences between a parallel configuration and one device."""
    return picked(agreement, "is_right", "loss_error", "gradient_error")


def _ranks(problem: Problem, plan: Plan, result: RunResult) -> list[dict[str, Any]]:
    predicted_s = action_busy_s(result.predicted)
    measured_s = None if result.measured is None else action_busy_s(result.measured)
    return [
        {
            "devices": list(names),
            "busy_s": {
                "predicted": float(predicted_s[rank]),
                "measured": None if measured_s is None else float(measured_s[rank]),
            },
        }
        for rank, names in enumerate(TransformerPlan(problem, plan).devices)
    ]


def _common(result: RunResult) -> dict[str, Any]:
    # JSON has no NaN or infinity.
    losses = [loss if loss is not None and math.isfinite(loss) else None for loss in result.losses]
    return {
        "backend": result.backend,
        "steps": [
            {"step": index + 1, "loss": loss, "seconds": seconds}
            for index, (loss, seconds) in enumerate(zip(losses, result.step_s, strict=True))
        ],
        "losses": losses,
        "is_finite": result.is_finite,
        "step_s": {"predicted": result.predicted_step_s, "measured": result.median_step_s},
    }


def _title(result: RunResult) -> Text:
    predicted_s, measured_s = result.predicted_step_s, result.median_step_s
    return Text.assemble(
        ("step ", "bold"),
        f"predicted {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}",
        f" ({_ratio(measured_s, predicted_s)})",
    )


def _ratio(measured_s: float, predicted_s: float) -> str:
    if predicted_s <= 0:
        return "nothing was predicted to take time"
    ratio = measured_s / predicted_s
    if ratio >= _MANY:
        return f"{ratio:,.0f} times the prediction"
    sign = "longer" if ratio >= 1 else "shorter"
    return f"{format_percent(abs(ratio - 1))} {sign} than predicted"
