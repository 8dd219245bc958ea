"""The report of a parallel plan: one HTML file that needs nothing else and runs no script.

Candidates, the picture of the pipeline, what the step's time goes into, and memory per rank.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from hocket import __version__
from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.plan.divided import DividedTraining
from hocket.planners.parallelism.outlook import label
from hocket.planners.parallelism.why import PARTS_IN_WORDS
from hocket.simulate.pipeline import simulate_pipeline
from hocket.simulate.timeline import Timeline
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
from hocket.view.pipeline import pipeline_svg
from hocket.view.wording import of_capacity, sentence

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.planners.parallelism.outlook import DivisionOutlook

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


def parallel_report_html(plan: DividedTraining, comparison: Comparison | None = None) -> str:
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


def _stats(plan: DividedTraining, timeline: Timeline, facts: list[RankFacts]) -> str:
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
        ColumnHead("Division"),
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


def _candidate(candidate: DivisionOutlook, cells: list[str], chosen: bool) -> list[Cell]:
    rank = candidate.fullest_rank
    size = of_capacity(candidate.peak_bytes[rank], candidate.capacity_bytes[rank])
    memory: Cell = size if candidate.feasible else Html(f'<span class="over">{size} ✗</span>')
    tick = Html('✔<span class="visually-hidden"> chosen</span>' if chosen else "")
    reason = inert(candidate.reason, LONGEST_SENTENCE)
    program = candidate.problem.training.software.name
    division = label(candidate.division, candidate.schedule_name, program)
    return [tick, division, *cells, memory, reason]


def _pipeline(plan: DividedTraining, timeline: Timeline) -> str:
    if plan.schedule.num_devices == 1:
        return ""
    picture = pipeline_svg(plan.schedule, timeline, width=1080, styled=False)
    note = '<p class="note">Pipeline ranks over one step; what is empty is the bubble.</p>'
    region = 'class="scroll" tabindex="0" role="region" aria-label="Pipeline, picture"'
    return section("pipeline", "Pipeline", f"<div {region}>{picture}</div>", note)


def _parts(plan: DividedTraining) -> str:
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


def _label(plan: DividedTraining) -> str:
    return inert(label(plan.division, plan.schedule.name, plan.problem.training.software.name))


def _plan(plan: DividedTraining) -> str:
    division = plan.division
    layers = division.layers
    entries = [
        ("Division", _label(plan)),
        ("Microbatches", f"{division.num_microbatches:,} of {division.microbatch}"),
        ("Batch", f"{division.global_batch:,} sequences of {plan.model.sequence:,} tokens"),
        ("Layers per stage", " ".join(map(str, layers)) if layers else "even"),
        ("Software", inert(plan.problem.training.software.name or "–")),
        ("Cluster", f"{inert(plan.cluster.name)}, {plan.cluster.content_hash[:12]}"),
    ]
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries)
    return section("plan", "Plan", f'<dl class="facts">{listed}</dl>')
