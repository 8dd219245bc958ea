"""The report of a parallel plan: one HTML file that needs nothing else and runs no script.

Candidates, the picture of the pipeline, what the step's time goes into, and memory per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from hocket import __version__
from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.forecast import label
from hocket.planners.parallel.transformer_why import PARTS_IN_WORDS
from hocket.simulate.pipeline import after_s, simulate_pipeline
from hocket.simulate.timeline import Timeline
from hocket.view.drawing import (
    AXIS_PX,
    LEGEND_PX,
    MARGIN_PX,
    Scale,
    picture_css,
    svg_rect,
    svg_text,
    time_axis,
)
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.page import (
    Cell,
    ColumnHead,
    Html,
    bar,
    legend,
    page_html,
    section,
    stack,
    stats_html,
    table,
)
from hocket.view.parallel import (
    RankFacts,
    counts_text,
    fields_of,
    rank_facts,
    shown,
    step_parts,
)
from hocket.view.spans import SpanRow, part, thinned
from hocket.view.wording import of_capacity, sentence

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.planners.parallel.forecast import ConfigForecast


# A pipeline's schedule as the well-known picture: devices over time, and gaps are the bubble.
#
# As static SVG, with the number of the microbatch on each mark that is wide enough and later chunks
# paler, and as a few lines of text. Marks are thinned to the pixels that there are, so the picture
# of 100,000 actions is as large as that of 5,000. O(actions log actions).

LABEL_PX = 150
BAR_PX, GAP_PX = 20, 4
DIGIT_PX, SPACE_PX = 6, 5
"""Width of a digit of a number, and of the space around the number."""
MAX_NUMBERS = 5000
COLOURS = {
    StageWork.FORWARD: ("forward", "forward"),
    StageWork.BACKWARD: ("backward", "backward"),
    StageWork.INPUT_GRADIENT: ("backward", "gradient of inputs"),
    StageWork.WEIGHT_GRADIENT: ("optimizer", "gradient of weights"),
}
"""Class and legend of each kind of work."""
LETTERS = {
    StageWork.FORWARD: ("F", "blue"),
    StageWork.BACKWARD: ("B", "yellow"),
    StageWork.INPUT_GRADIENT: ("I", "yellow"),
    StageWork.WEIGHT_GRADIENT: ("W", "green"),
}


def pipeline_svg(
    schedule: Schedule, timeline: Timeline, *, width: int = 960, styled: bool = True
) -> str:
    """The picture, ``width`` pixels wide; without ``styled`` the page brings `picture_css`."""
    scale = Scale(width, timeline.makespan_s, LABEL_PX)
    bottom = MARGIN_PX + AXIS_PX + schedule.num_devices * (BAR_PX + GAP_PX)
    height = bottom + LEGEND_PX
    label = escape(
        f"Schedule {schedule.name} of {schedule.num_microbatches} microbatches on "
        f"{schedule.num_devices} devices: {format_seconds(timeline.makespan_s)}"
    )
    body = [*time_axis(scale, bottom)]
    for device in range(schedule.num_devices):
        body += _device(
            schedule, timeline, device, scale, MARGIN_PX + AXIS_PX + device * (BAR_PX + GAP_PX)
        )
    body += _legend(schedule, timeline, height - 10)
    style = f"<style>{picture_css()}</style>" if styled else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hocket hocket-svg" role="img" '
        f'aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{label}</title>{style}'
        f'<rect class="paper" width="{width}" height="{height}"/>' + "".join(body) + "</svg>\n"
    )


def _device(
    schedule: Schedule, timeline: Timeline, device: int, scale: Scale, top: float
) -> Iterator[str]:
    left, right = scale.x(0), scale.width - MARGIN_PX
    yield svg_rect("lane", left, top, right - left, BAR_PX)
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
            marks = part(shown, np.flatnonzero((work == kind) & (chunk == own)))
            yield _marks(COLOURS[kind][0], _opacity(own), marks, scale, top)
    yield from _numbers(schedule, shown, chunk, scale, top)
    yield from _after(schedule, timeline, device, scale, top)


def _row(schedule: Schedule, timeline: Timeline, device: int) -> SpanRow:
    """A device's actions that take time."""
    start, stop = schedule.start[device : device + 2].tolist()
    own = np.arange(start, stop)
    own = own[timeline.end_s[own] > timeline.start_s[own]]
    return SpanRow(
        is_link=False,
        index=device,
        num_lanes=1,
        start_s=timeline.start_s[own],
        end_s=timeline.end_s[own],
        lane=np.zeros(len(own), dtype=np.int32),
        span=own.astype(np.int32),
        count=np.ones(len(own), dtype=np.int32),
        busy_s=timeline.end_s[own] - timeline.start_s[own],
    )


def _kinds(schedule: Schedule, row: SpanRow) -> tuple[np.ndarray, np.ndarray]:
    """Work and chunk of each mark."""
    own = np.flatnonzero(schedule.device_of_stage == row.index)
    return schedule.work[row.span], np.searchsorted(own, schedule.stage[row.span])


def _opacity(chunk: int) -> float:
    """Later chunks are paler; beyond the fourth the difference would not be seen."""
    return (1.0, 0.62, 0.42, 0.28)[min(chunk, 3)]


def _marks(name: str, opacity: float, row: SpanRow, scale: Scale, top: float) -> str:
    """All marks of one colour as one path; a merged mark is as high as its actions fill it."""
    x = scale.left_px + row.start_s * scale.px_per_s
    length_s = row.end_s - row.start_s
    wide = np.maximum(length_s * scale.px_per_s, 0.4)
    # A hairline between neighbours keeps long marks apart without hiding short ones.
    wide = np.where(wide > 4, wide - 0.8, wide)
    fill = np.clip(row.busy_s / np.maximum(length_s, 1e-30), 0.1, 1.0)
    high = np.where(row.count > 1, fill, 1.0) * BAR_PX
    bottom = top + BAR_PX
    path = "".join(
        f"M{a:.1f} {bottom:.1f}h{w:.1f}v-{h:.1f}h-{w:.1f}z"
        for a, w, h in zip(x.tolist(), wide.tolist(), high.tolist(), strict=True)
    )
    pale = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    return f'<path class="{name}"{pale} d="{path}"/>'


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
        # On full colours the number has that of the paper, on pale ones that of ink.
        style = ' style="fill:var(--paper)"' if chunk[mark] == 0 else ""
        yield (
            f'<text class="small" x="{x:.1f}" y="{top + 14:.1f}" text-anchor="middle"{style}>'
            f"{microbatch[mark]}</text>"
        )


def _after(
    schedule: Schedule, timeline: Timeline, device: int, scale: Scale, top: float
) -> Iterator[str]:
    """What follows a device's last action."""
    length_s = float(after_s(timeline)[device])
    stop = int(schedule.start[device + 1])
    if length_s > 0:
        end_s = float(timeline.end_s[stop - 1])
        yield svg_rect("memory", scale.x(end_s), top, length_s * scale.px_per_s, BAR_PX)


def _legend(schedule: Schedule, timeline: Timeline, y: float) -> Iterator[str]:
    used = set(schedule.work.tolist())
    entries = [COLOURS[kind] for kind in StageWork if kind in used]
    if after_s(timeline).any():
        entries.append(("memory", "after the last backward"))
    x = float(MARGIN_PX + LABEL_PX)
    for name, word in entries:
        yield svg_rect(name, x, y - 9, 10, 10)
        yield svg_text(x + 15, y, word, "muted")
        x += 15 + 6.2 * len(word) + 18
    bubble = f"devices wait {format_percent(timeline.idle_share)} of the time"
    yield svg_text(x, y, bubble, "muted")


# ── for the terminal ─────────────────────────────────────────────────────────────────────────────


def pipeline_text(
    schedule: Schedule, timeline: Timeline, *, width: int = 72, max_devices: int = 16
) -> Text:
    """A line per device, a letter per moment: F, B, I or W, and a dot where the device waits.

    What follows the last backward is a line.
    """
    digits = len(str(schedule.num_devices - 1))
    text = Text(no_wrap=True)
    for device in range(min(schedule.num_devices, max_devices)):
        text.append(f"{device:>{digits}} ", style="dim")
        for letter, style in _letters(schedule, timeline, device, width - digits - 1):
            text.append(letter, style=style)
        text.append("\n")
    if schedule.num_devices > max_devices:
        text.append(f"and {schedule.num_devices - max_devices} more devices\n", style="dim")
    share = format_percent(timeline.idle_share)
    text.append(f"{format_seconds(timeline.makespan_s)}, devices wait {share} of it", style="dim")
    return text


def _letters(
    schedule: Schedule, timeline: Timeline, device: int, width: int
) -> list[tuple[str, str]]:
    """What the device does in the middle of each moment."""
    start, stop = schedule.start[device : device + 2].tolist()
    moments = (np.arange(width) + 0.5) * timeline.makespan_s / max(width, 1)
    at = np.searchsorted(timeline.start_s[start:stop], moments, side="right") - 1 + start
    letters = []
    for moment_s, action in zip(moments.tolist(), at.tolist(), strict=True):
        late_s = moment_s - float(timeline.end_s[action]) if action >= start else np.inf
        if late_s <= 0:
            letters.append(LETTERS[StageWork(int(schedule.work[action]))])
        elif action == stop - 1 and late_s <= after_s(timeline)[device]:
            letters.append(("─", "dim"))
        else:
            letters.append(("·", "dim"))
    return letters


NUM_CANDIDATES = 12
NUMBERS = {
    "step": "Step", "tokens/s": "Tokens/s", "MFU": "MFU", "bubble": "Bubble",
    "exposed": "Exposed", "per day": "Per day",
}  # fmt: skip
"""Columns of the table of candidates and their heads; the division stands in one."""
MAX_RANKS = 64
NARROW = frozenset({"step"})
"""Numbers of candidates that stay where the window is a telephone's."""


def _number_classes(title: str) -> str:
    return "number" if title in NARROW else "number wide"


def parallel_report_html(plan: TransformerPlan, comparison: Comparison | None = None) -> str:
    """The report as one HTML text."""
    timeline = simulate_pipeline(plan.schedule, plan.costs)
    title = f"{inert(plan.model.name)} on {inert(plan.cluster.name)}"
    facts = rank_facts(plan, timeline)
    why = plan.plan.notes.get("why", "")
    lead = inert(why, LONGEST_SENTENCE) if why else _label(plan)
    return page_html(
        title=title,
        lead=sentence(lead),
        stats=_stats(plan, timeline, facts),
        body=(
            _candidates(comparison),
            _pipeline(plan, timeline),
            _parts(plan),
            _ranks(facts),
            _plan(plan),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
    )


# ── sections ─────────────────────────────────────────────────────────────────────────────────────


def _stats(plan: TransformerPlan, timeline: Timeline, facts: list[RankFacts]) -> str:
    division = plan.division
    tokens = division.global_batch * plan.model.sequence / (timeline.makespan_s or 1.0)
    full = max(facts, key=lambda fact: fact.peak_bytes / max(fact.capacity_bytes, 1))
    entries = [
        ("Step", format_seconds(timeline.makespan_s), f"{tokens:,.0f} tokens per second"),
        ("Bubble", format_percent(timeline.idle_share), "of the devices' time"),
        (
            "Fullest rank",
            of_capacity(full.peak_bytes, full.capacity_bytes),
            f"pipeline rank {full.rank}",
        ),
        ("Devices", f"{division.num_devices:,}", _label(plan)),
    ]
    if plan.mfu is not None:
        entries.insert(1, ("MFU", format_percent(plan.mfu), "of the peak arithmetic"))
    return stats_html(entries)


def _candidates(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    candidates = shown(comparison, NUM_CANDIDATES)
    fields = [field for field in fields_of(candidates) if field.title in NUMBERS]
    chosen = None if comparison.winner is None else 0
    heads = [
        ColumnHead("", "tick"),
        ColumnHead("ParallelConfig"),
        *(ColumnHead(NUMBERS[f.title], _number_classes(f.title)) for f in fields),
        ColumnHead("Fullest rank", "number"),
        ColumnHead("Reason", "wide"),
    ]
    rows = [
        _candidate(candidate, [f.values[i] for f in fields], i == chosen)
        for i, candidate in enumerate(candidates)
    ]
    classes = [
        "chosen" if i == chosen else "" if c.feasible else "infeasible"
        for i, c in enumerate(candidates)
    ]
    note = f'<p class="note">{escape(counts_text(comparison))}.</p>'
    return section("candidates", "Candidates", table(heads, rows, classes), note)


def _candidate(candidate: ConfigForecast, cells: list[str], chosen: bool) -> list[Cell]:
    rank = candidate.fullest_rank
    size = of_capacity(candidate.peak_bytes[rank], candidate.capacity_bytes[rank])
    memory: Cell = size if candidate.feasible else Html(f'<span class="over">{size} ✗</span>')
    tick = Html('✔<span class="visually-hidden"> chosen</span>' if chosen else "")
    reason = inert(candidate.reason, LONGEST_SENTENCE)
    program = candidate.problem.training.software.name
    division = label(candidate.division, candidate.schedule_name, program)
    return [tick, division, *cells, memory, reason]


def _pipeline(plan: TransformerPlan, timeline: Timeline) -> str:
    if plan.schedule.num_devices == 1:
        return ""
    picture = pipeline_svg(plan.schedule, timeline, width=1080, styled=False)
    note = '<p class="note">Pipeline ranks over one step; what is empty is the bubble.</p>'
    region = 'class="scroll" tabindex="0" role="region" aria-label="Pipeline, picture"'
    return section("pipeline", "Pipeline", f"<div {region}>{picture}</div>", note)


def _parts(plan: TransformerPlan) -> str:
    parts = step_parts(plan)
    total_s = sum(parts.values())
    if not total_s:
        return ""
    classes = [f"share-{index % 6}" for index in range(len(parts))]
    shares = [value / total_s for value in parts.values()]
    names = [inert(PARTS_IN_WORDS.get(name, name)) for name in parts]
    entries = [
        (css, f"{name} {format_percent(share)}")
        for css, name, share in zip(classes, names, shares, strict=True)
    ]
    rows: list[list[Cell]] = [
        [name, format_seconds(value), format_percent(share)]
        for name, value, share in zip(names, parts.values(), shares, strict=True)
    ]
    heads = (
        ColumnHead("Part", "name"),
        ColumnHead("Time", "number"),
        ColumnHead("Of step", "number"),
    )
    body = stack(shares, classes) + legend(entries) + table(heads, rows)
    return section("parts", "Where the step's time goes", body)


def _ranks(facts: list[RankFacts]) -> str:
    heads = (
        ColumnHead("Rank", "number"),
        ColumnHead("From device", "name"),
        ColumnHead("Kind", "wide"),
        ColumnHead("Layers", "number"),
        ColumnHead("Busy", "nowrap"),
        ColumnHead("State", "number wide"),
        ColumnHead("Peak memory", "nowrap"),
    )
    rows: list[list[Cell]] = [
        [
            str(fact.rank),
            inert(fact.first_device),
            inert(fact.kind),
            str(fact.num_layers),
            Html(bar(fact.busy_share) + escape(format_percent(fact.busy_share))),
            format_bytes(fact.state_bytes),
            _memory(fact),
        ]
        for fact in facts[:MAX_RANKS]
    ]
    hidden = len(facts) - MAX_RANKS
    note = f'<p class="note">and {hidden} ranks more</p>' if hidden > 0 else ""
    return section("ranks", "Pipeline ranks", table(heads, rows), note)


def _memory(fact: RankFacts) -> Html:
    size = of_capacity(fact.peak_bytes, fact.capacity_bytes)
    text = size if fact.peak_bytes <= fact.capacity_bytes else f'<span class="over">{size} ✗</span>'
    return Html(bar(fact.peak_bytes / max(fact.capacity_bytes, 1), "transfer") + text)


def _label(plan: TransformerPlan) -> str:
    return inert(label(plan.division, plan.schedule.name, plan.problem.training.software.name))


def _plan(plan: TransformerPlan) -> str:
    division = plan.division
    layers = division.layers
    entries = [
        ("ParallelConfig", _label(plan)),
        ("Microbatches", f"{division.num_microbatches:,} of {division.microbatch}"),
        ("Batch", f"{division.global_batch:,} sequences of {plan.model.sequence:,} tokens"),
        ("Layers per stage", " ".join(map(str, layers)) if layers else "even"),
        ("Software", inert(plan.problem.training.software.name or "–")),
        ("Cluster", f"{inert(plan.cluster.name)}, {plan.cluster.content_hash[:12]}"),
    ]
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries)
    return section("plan", "Plan", f'<dl class="facts">{listed}</dl>')
