"""The report of a parallel plan: one self-contained HTML file without scripts.

Shows the candidates, the picture of the pipeline schedule, the parts of the step time, and memory
per rank. The picture is static SVG: devices over time with microbatch numbers, gaps are the bubble.
Marks are merged to the visible resolution, so its size does not grow with the number of actions.
O(actions log actions).
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from hocket import __version__
from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.forecast import label
from hocket.simulate.pipeline import after_s, simulate_pipeline
from hocket.simulate.timeline import Timeline
from hocket.view.drawing import (
    AXIS_PX,
    LEGEND_PX,
    MARGIN_PX,
    Scale,
    bound_line,
    picture_svg,
    svg_legend,
    svg_rect,
    svg_text,
    time_axis,
)
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.page import fitted, page_html, section, stats_html
from hocket.view.parallel import counts_text, rank_facts, shown, winning
from hocket.view.parallel_text import configs_table, parts_table, rank_table
from hocket.view.picture import marks
from hocket.view.sections import PLAN_FILE, head_stats, next_steps
from hocket.view.spans import SpanRow, part, span_row, thinned
from hocket.view.wording import of_capacity, sentence

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.planners.parallel.forecast import ConfigForecast


LABEL_PX = 150
BAR_PX, GAP_PX = 20, 4
DIGIT_PX, SPACE_PX = 6, 5
"""Width of a digit, and of the space around a microbatch number."""
MAX_NUMBERS = 5000
COLOURS = {
    StageWork.FORWARD: ("forward", "forward"),
    StageWork.BACKWARD: ("backward", "backward"),
    StageWork.INPUT_GRADIENT: ("backward", "gradient of inputs"),
    StageWork.WEIGHT_GRADIENT: ("optimizer", "gradient of weights"),
}
"""CSS class and legend of each kind of work."""
OPACITY = (1.0, 0.62, 0.42, 0.28)
"""Opacity of the marks per chunk; beyond the fourth chunk a difference would not be visible."""


def pipeline_svg(
    schedule: Schedule,
    timeline: Timeline,
    *,
    width: int = 960,
    styled: bool = True,
    bound_s: float | None = None,
) -> str:
    """Picture of a schedule; ``styled`` embeds `picture_css`, which a page otherwise provides."""
    scale = Scale(width, timeline.makespan_s, LABEL_PX)
    row_px = BAR_PX + GAP_PX
    bottom = MARGIN_PX + AXIS_PX + schedule.num_devices * row_px
    label = (
        f"Schedule {schedule.name} of {schedule.num_microbatches} microbatches on "
        f"{schedule.num_devices} devices: {format_seconds(timeline.makespan_s)}"
    )
    body = [*time_axis(scale, bottom)]
    for device in range(schedule.num_devices):
        body += _device(schedule, timeline, device, scale, MARGIN_PX + AXIS_PX + device * row_px)
    if bound_s is not None:
        body += bound_line(scale, bound_s, bottom)
    used = set(schedule.work.tolist())
    entries = [COLOURS[kind] for kind in StageWork if kind in used]
    if after_s(timeline).any():
        entries.append(("memory", "after the last backward"))
    bubble = f"devices wait {format_percent(timeline.idle_share)} of the time"
    body += svg_legend(MARGIN_PX + LABEL_PX, bottom + LEGEND_PX - 10, entries, bubble)
    return picture_svg(width, bottom + LEGEND_PX, label, body, styled=styled)


def _device(
    schedule: Schedule, timeline: Timeline, device: int, scale: Scale, top: float
) -> Iterator[str]:
    left, right = scale.x(0), scale.width - MARGIN_PX
    yield svg_rect("track", left, top, right - left, BAR_PX)
    yield svg_text(MARGIN_PX, top + 14, f"device {device}", "")
    peak = format_bytes(int(timeline.peak_bytes[device]))
    yield svg_text(left - 10, top + 14, peak, "muted", "end")
    row = _row(schedule, timeline, device)
    if not row.num_marks or not scale.px_per_s:
        return
    shown = thinned(row, 1 / scale.px_per_s)
    work, chunk = _kinds(schedule, shown)
    for kind in StageWork:
        for own in np.unique(chunk[work == kind]).tolist():
            coloured = part(shown, np.flatnonzero((work == kind) & (chunk == own)))
            yield marks(COLOURS[kind][0], coloured, scale, top, BAR_PX, OPACITY[min(own, 3)])
    yield from _numbers(schedule, shown, chunk, scale, top)
    yield from _after(schedule, timeline, device, scale, top)


def _row(schedule: Schedule, timeline: Timeline, device: int) -> SpanRow:
    """Row of a device's actions that take time."""
    start, stop = schedule.start[device : device + 2].tolist()
    own = np.arange(start, stop)
    own = own[timeline.op_end_s[own] > timeline.op_start_s[own]]
    track = np.zeros(len(own), dtype=np.int32)
    return span_row(device, own, timeline.op_start_s, timeline.op_end_s, track, is_link=False)


def _kinds(schedule: Schedule, row: SpanRow) -> tuple[np.ndarray, np.ndarray]:
    """Kind of work and chunk of each mark."""
    own = np.flatnonzero(schedule.device_of_stage == row.index)
    return schedule.work[row.span], np.searchsorted(own, schedule.stage[row.span])


def _numbers(
    schedule: Schedule,
    row: SpanRow,
    chunk: np.ndarray,
    scale: Scale,
    top: float,
) -> Iterator[str]:
    if len(schedule.work) > MAX_NUMBERS:
        return
    digits = SPACE_PX + DIGIT_PX * len(str(schedule.num_microbatches - 1))
    wide = (row.end_s - row.start_s) * scale.px_per_s
    microbatch = schedule.microbatch[row.span]
    for mark in np.flatnonzero((wide >= digits) & (row.count == 1)).tolist():
        x = scale.x(float(row.start_s[mark] + row.end_s[mark]) / 2)
        # Numbers on full colours are in the paper's colour, on pale ones in the ink's colour, for
        # contrast.
        style = ' style="fill:var(--paper)"' if chunk[mark] == 0 else ""
        yield (
            f'<text class="small" x="{x:.1f}" y="{top + 14:.1f}" text-anchor="middle"{style}>'
            f"{microbatch[mark]}</text>"
        )


def _after(
    schedule: Schedule, timeline: Timeline, device: int, scale: Scale, top: float
) -> Iterator[str]:
    """Mark for the work after the last action of a device, such as the optimizer."""
    length_s = float(after_s(timeline)[device])
    stop = int(schedule.start[device + 1])
    if length_s > 0:
        end_s = float(timeline.op_end_s[stop - 1])
        yield svg_rect("memory", scale.x(end_s), top, length_s * scale.px_per_s, BAR_PX)


NUM_CANDIDATES = 12
MAX_RANKS = 64


def parallel_report_html(
    plan: TransformerPlan, comparison: Comparison | None = None, *, plan_file: str = PLAN_FILE
) -> str:
    """Render the report of a transformer plan as one HTML page; its commands name ``plan_file``."""
    timeline = simulate_pipeline(plan.schedule, plan.costs)
    why = plan.plan.notes.get("why", "")
    forecast = None if comparison is None else winning(comparison)
    return page_html(
        title=f"{inert(plan.model.name)} on {inert(plan.cluster.name)}",
        lead=sentence(inert(why, LONGEST_SENTENCE) if why else _label(plan)),
        stats=_stats(plan, timeline, forecast),
        body=(
            _candidates(comparison),
            _pipeline(plan, timeline),
            next_steps(*_NEXT, plan_file=plan_file),
            _parts(plan),
            _ranks(plan, timeline),
            _plan(plan),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
    )


_NEXT = (
    ("hocket export plan.json --to megatron", "the same settings for Megatron, torchtitan, …"),
    ("hocket run plan.json --check-only", "gradients of a small copy against one device"),
    ("hocket launch plan.json train.py", "your training script, once per device of the plan"),
)


# ── sections ─────────────────────────────────────────────────────────────────────────────────────


def _stats(plan: TransformerPlan, timeline: Timeline, forecast: ConfigForecast | None) -> str:
    config, step_s = plan.config, timeline.makespan_s
    facts = rank_facts(plan, timeline)
    full = max(facts, key=lambda fact: fact.peak_bytes / max(fact.capacity_bytes, 1))
    note = ""
    if forecast is not None:
        low_s, high_s = (format_seconds(edge) for edge in forecast.range_s)
        note = f"expect {low_s} to {high_s}"
    prices = [fact.num_devices * fact.price_per_hour for fact in facts]
    step = {
        "batch": config.global_batch, "sequence": plan.model.sequence, "amp": None,
        "dtype": plan.dtype, "optimizer": "Adam",
    }  # fmt: skip
    entries = head_stats(step, step_s, note, sum(prices) if all(prices) else None)
    if plan.mfu is not None:
        entries.append(("MFU", format_percent(plan.mfu), "of the peak arithmetic"))
        bound = format_seconds(bound_s(plan, step_s) or 0.0)
        entries.append(("Lower bound", bound, "arithmetic alone, at the peak rate"))
    entries += [
        ("Bubble", format_percent(timeline.idle_share), "of the devices' time"),
        (
            "Fullest rank",
            of_capacity(full.peak_bytes, full.capacity_bytes),
            f"pipeline rank {full.rank}",
        ),
        ("Devices", f"{config.num_devices:,}", _label(plan)),
    ]
    return stats_html(entries)


def bound_s(plan: TransformerPlan, step_s: float) -> float | None:
    """Time of the model's arithmetic at peak rate, a lower bound of all plans; None without MFU."""
    if plan.mfu is None:
        return None
    # MFU counts all pairs of tokens, but attention may skip those that a causal mask excludes, so
    # only the causal part is a bound.
    return plan.problem.training.causal_share * plan.mfu * step_s


def _candidates(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    candidates = shown(comparison, NUM_CANDIDATES)
    reasons = "".join(
        f"<li>{escape(inert(candidate.reason, LONGEST_SENTENCE))}</li>" for candidate in candidates
    )
    return section(
        "candidates",
        "Candidates",
        fitted(configs_table(comparison, candidates, labelled=True)),
        f'<p class="note">{escape(counts_text(comparison))}.</p>',
        f"<details><summary>Why each won or lost</summary><ol>{reasons}</ol></details>",
    )


def _pipeline(plan: TransformerPlan, timeline: Timeline) -> str:
    if plan.schedule.num_devices == 1:
        return ""
    bound = bound_s(plan, timeline.makespan_s)
    picture = pipeline_svg(plan.schedule, timeline, width=1080, styled=False, bound_s=bound)
    note = (
        '<p class="note">Pipeline ranks over one step, with the number of each microbatch; what is '
        "empty is the bubble.</p>"
    )
    region = 'class="scroll" tabindex="0" role="region" aria-label="Pipeline, picture"'
    return section("pipeline", "Pipeline", f"<div {region}>{picture}</div>", note)


def _parts(plan: TransformerPlan) -> str:
    shown = parts_table(plan)
    return section("parts", "Where the step's time goes", fitted(shown)) if shown.rows else ""


def _ranks(plan: TransformerPlan, timeline: Timeline) -> str:
    hidden = len(plan.devices) - MAX_RANKS
    note = f'<p class="note">and {hidden} ranks more</p>' if hidden > 0 else ""
    return section("ranks", "Pipeline ranks", fitted(rank_table(plan, timeline, MAX_RANKS)), note)


def _label(plan: TransformerPlan) -> str:
    return inert(label(plan.config))


def _plan(plan: TransformerPlan) -> str:
    config = plan.config
    layers = config.layers
    entries = [
        ("Parallel config", _label(plan)),
        ("Microbatches", f"{config.num_microbatches:,} of {config.microbatch}"),
        ("Batch", f"{config.global_batch:,} sequences of {plan.model.sequence:,} tokens"),
        ("Layers per stage", " ".join(map(str, layers)) if layers else "even"),
        ("Software", inert(plan.problem.training.software.name or "–")),
        ("Cluster", f"{inert(plan.cluster.name)}, {plan.cluster.content_hash[:12]}"),
    ]
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries)
    return section("plan", "Plan", f'<dl class="facts">{listed}</dl>')
