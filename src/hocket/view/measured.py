"""A run, measured and predicted: tables for the terminal, and ``--json``."""

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
from hocket.plan.transformer_plan import TransformerPlan
from hocket.simulate.pipeline import action_busy_s
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable

if TYPE_CHECKING:
    from hocket.runtime.numerics_check import Agreement
    from hocket.runtime.run_result import RunResult

_MANY = 2
"""From this many times the prediction on, a percentage says little."""


# ── placements, by device ────────────────────────────────────────────────────────────────────────


def placement_run_table(problem: Problem, _: Plan, result: RunResult) -> RenderableType:
    """The step, then per used device how long it computes and how much it holds."""
    columns = (
        Column(title="device", is_name=True),
        Column(title="runs on", rank=1),
        Column(title="busy: predicted", align="right"),
        Column(title="measured", align="right"),
        Column(title="peak: predicted", align="right"),
        Column(title="measured", align="right"),
    )
    rows = [
        [
            Text(inert(row["name"])),
            Text(inert(row["runs_on"])),
            *(_or_dash(row["busy_s"][by], format_seconds) for by in ("predicted", "measured")),
            *(_or_dash(row["peak_bytes"][by], format_bytes) for by in ("predicted", "measured")),
        ]
        for row in _devices(problem, result)
    ]
    return Group(_title(result), FittedTable(columns=columns, rows=rows))


def placement_run_data(problem: Problem, plan: Plan, result: RunResult) -> dict[str, Any]:
    """JSON of ``hocket run --json`` for a placement."""
    return {
        "planner": plan.planner,
        "loss": problem.graph.meta.get("loss"),
        **_common(result),
        "devices": _devices(problem, result),
    }


def _devices(problem: Problem, result: RunResult) -> list[dict[str, Any]]:
    predicted, measured = result.predicted, result.measured
    return [
        {
            "name": name,
            "runs_on": result.runs_on[name],
            "busy_s": {
                "predicted": float(predicted.busy_s[d]),
                # Memory plans are executed by the model itself, whose ops are not timed.
                "measured": None if measured is None else float(measured.busy_s[d]),
            },
            "peak_bytes": {
                "predicted": int(predicted.peak_bytes[d]),
                "measured": result.peak_bytes.get(name)
                if measured is None
                else int(measured.peak_bytes[d]),
            },
        }
        for d, name in enumerate(problem.cluster.device_names)
        if name in result.runs_on
    ]


def _or_dash(value: Any, write: Callable[[Any], str]) -> Text:
    return Text("–" if value is None else write(value))


# ── shares of a batch, by replica ────────────────────────────────────────────────────────────────


def shares_run_table(problem: Problem, plan: Plan, result: RunResult) -> RenderableType:
    """The step, then who took which samples, and where; what was held, where that was counted."""
    columns = [
        Column(title="replica", is_name=True),
        Column(title="runs on"),
        Column(title="samples", align="right"),
        Column(title="microbatches", align="right"),
    ]
    rows = [
        [
            Text(inert(" > ".join(replica.devices))),
            Text(inert(result.runs_on[replica.devices[0]])),
            Text(str(replica.num_samples)),
            Text(str(len(replica.microbatches))),
        ]
        for replica in plan[Parallel].replicas
    ]
    if result.peak_bytes:
        columns += [Column(title=t, align="right") for t in ("peak: predicted", "measured")]
        peaks = {row["name"]: row["peak_bytes"] for row in _devices(problem, result)}
        for cells, replica in zip(rows, plan[Parallel].replicas, strict=True):
            held = peaks[replica.devices[0]]
            cells += [_or_dash(held[by], format_bytes) for by in ("predicted", "measured")]
    table = FittedTable(columns=tuple(columns), rows=rows)
    return Group(_title(result), table, *map(Text, _not_reserved(plan, result)))


def _not_reserved(plan: Plan, result: RunResult) -> Iterator[str]:
    """Memory that two CUDA streams hold and a CPU run does not."""
    waves = plan.get(Waves)
    if waves is None or not waves.separate_bytes or set(result.runs_on.values()) != {"cpu"}:
        return
    planned = int(result.predicted.peak_bytes.max()) + waves.separate_bytes
    yield (
        f"peaks are of one allocator: on a GPU {format_bytes(planned)} are planned, since two "
        f"streams hold {format_bytes(waves.separate_bytes)} beyond their joint peak"
    )


def shares_run_data(problem: Problem, plan: Plan, result: RunResult) -> dict[str, Any]:
    """JSON of ``hocket run --json`` for shares."""
    return {
        "planner": plan.planner,
        "loss": problem.graph.meta.get("loss"),
        **_common(result),
        "devices": _devices(problem, result),
        "parallel": plan[Parallel].to_data(),
    }


# ── configs, by pipeline rank ──────────────────────────────────────────────────────────────────


def parallel_run_table(problem: Problem, plan: Plan, result: RunResult) -> RenderableType:
    """The step, then per pipeline rank how long one of its devices computes."""
    columns = (
        Column(title="pipeline rank", align="right"),
        Column(title="devices", is_name=True),
        Column(title="busy: predicted", align="right"),
        Column(title="measured", align="right"),
    )
    rows = []
    for rank, row in enumerate(_ranks(problem, plan, result)):
        names, busy_s = row["devices"], row["busy_s"]
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        measured_s = busy_s["measured"]
        rows.append(
            [
                Text(str(rank)),
                Text(inert(shown)),
                Text(format_seconds(busy_s["predicted"])),
                Text("–" if measured_s is None else format_seconds(measured_s)),
            ]
        )
    return Group(_title(result), FittedTable(columns=columns, rows=rows))


def parallel_run_data(problem: Problem, plan: Plan, result: RunResult) -> dict[str, Any]:
    """JSON of ``hocket run --json`` for a config."""
    return {
        **_common(result),
        "dtype": result.dtype,
        "pipeline_ranks": _ranks(problem, plan, result),
        "peak_bytes": dict(result.peak_bytes),
        "check": None if result.agreement is None else agreement_data(result.agreement),
    }


def agreement_data(agreement: Agreement) -> dict[str, Any]:
    """Difference between a config and one device."""
    return {
        "is_right": agreement.is_right,
        "loss_error": agreement.loss_error,
        "gradient_error": agreement.gradient_error,
    }


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


# ── both ─────────────────────────────────────────────────────────────────────────────────────────


def _common(result: RunResult) -> dict[str, Any]:
    # JSON has no word for what is not a number.
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
