"""What a run measured beside what was predicted, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable

_MANY = 2
"""From this many times the prediction on, a percentage says little."""


def run_table(
    problem: Problem,
    predicted: Timeline,
    measured: Timeline,
    *,
    step_s: float,
    runs_on: Mapping[str, str],
) -> RenderableType:
    """The step, then per used device how long it computes and how much it holds."""
    title = Text.assemble(
        ("step ", "bold"),
        f"predicted {format_seconds(predicted.makespan_s)}, measured {format_seconds(step_s)}",
        f" ({_ratio(step_s, predicted.makespan_s)})",
    )
    columns = (
        Column(title="device", is_name=True),
        Column(title="runs on", rank=1),
        Column(title="busy: predicted", align="right"),
        Column(title="measured", align="right"),
        Column(title="peak: predicted", align="right"),
        Column(title="measured", align="right"),
    )
    busy_s = predicted.busy_s, measured.busy_s
    rows = [
        [
            Text(inert(name)),
            Text(inert(runs_on[name])),
            *(Text(format_seconds(float(seconds[device]))) for seconds in busy_s),
            *(Text(format_bytes(int(t.peak_bytes[device]))) for t in (predicted, measured)),
        ]
        for device, name in enumerate(problem.cluster.device_names)
        if name in runs_on
    ]
    return Group(title, FittedTable(columns=columns, rows=rows))


def _ratio(measured_s: float, predicted_s: float) -> str:
    if predicted_s <= 0:
        return "nothing was predicted to take time"
    ratio = measured_s / predicted_s
    if ratio >= _MANY:
        return f"{ratio:,.0f} times the prediction"
    sign = "longer" if ratio >= 1 else "shorter"
    return f"{format_percent(abs(ratio - 1))} {sign} than predicted"
