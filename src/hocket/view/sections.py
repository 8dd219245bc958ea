"""The sections of a plan's report as HTML; every text of unknown origin passes `escape`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from hocket.base.units import (
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)
from hocket.cost.ranges import step_range
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.analysis import COMPUTE, COPIES, EXCHANGES, HOST, TRANSFERS
from hocket.simulate.timeline import Timeline
from hocket.view.comparison import candidates_table
from hocket.view.drawing import memory_card
from hocket.view.facts import (
    KINDS,
    OTHER,
    SHARING,
    DeviceFacts,
    Facts,
    memory_by_role,
)
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.page import (
    Cell,
    ColumnHead,
    Html,
    fitted,
    legend,
    section,
    stack,
    stats_html,
    table,
)
from hocket.view.payload import MAX_PATH_STEPS
from hocket.view.picture import memory_paths
from hocket.view.spans import memory_envelope
from hocket.view.step_inputs import step_data
from hocket.view.story import advice, headroom_sentence, longest_steps, sent_counts
from hocket.view.text import (
    exchange_table,
    link_table,
    module_table,
    top_table,
)
from hocket.view.wording import (
    STEPS_PRICED,
    count_of,
    dollars,
    held_of,
    price_of_steps,
    sentence,
)

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison

PLAN_FILE = "plan.json"
"""Default name of a plan file in the commands of reports."""
MAX_LINKS, MAX_STEPS, MAX_MODULES = 40, 16, 400
_CAUSE_CLASSES = {
    COMPUTE: "compute",
    EXCHANGES: "transfer",
    COPIES: "transfer",
    HOST: "link-wait",
    TRANSFERS: "transfer",
    SHARING: "link-wait",
    OTHER: "waiting",
}


# ── head ─────────────────────────────────────────────────────────────────────────────────────


Stat = tuple[str, Cell, str]


def stats(
    facts: Facts, problem: Problem, comparison: Comparison | None = None, *, measured: bool = False
) -> str:
    """The most important numbers: training, step with its range, throughput, money, memory."""
    full, busy = facts.fullest, facts.busiest
    memory = held_of(full.peak_bytes, full.capacity_bytes)
    error = "" if measured else range_note(problem, facts.step_s)
    entries = head_stats(step_data(problem.graph), facts.step_s, error, facts.price_per_hour)
    if comparison is not None and comparison.bound is not None:
        bound = format_seconds(comparison.bound.seconds)
        entries.append(("Lower bound", bound, "no strategy is faster"))
    entries += [
        ("Busiest device", format_percent(busy.busy_share), busy.name),
        (
            "Fullest device",
            memory if full.fits else Html(f'<span class="over">{escape(memory)} ✗</span>'),
            full.name,
        ),
        ("Moved", format_bytes(facts.moved_bytes + facts.copies.num_bytes), sent_counts(facts)),
    ]
    return stats_html(entries)


def head_stats(
    step: Mapping[str, Any], step_s: float, note: str = "", hourly: float | None = None
) -> list[Stat]:
    """Head of every report: batch, precision, step, samples and tokens per second, and money.

    ``note`` is the error range of the step, ``hourly`` the price of the devices that compute.
    """
    entries: list[Stat] = []
    if step["batch"] is not None:
        size = f"{step['batch']}" + (f" x {step['sequence']}" if step["sequence"] else "")
        precision = f"{step['amp']} autocast, " if step["amp"] else ""
        precision += f"{step['dtype']} parameters, {step['optimizer'] or 'inference'}"
        entries.append(("Batch x sequence" if step["sequence"] else "Batch", size, precision))
    rate = f"{1 / step_s:,.3g} steps per second" if 0 < step_s < 1 else ""
    entries.append(("Step", format_seconds(step_s), note or rate))
    if isinstance(step["batch"], int) and step_s > 0:
        per_s = step["batch"] / step_s
        tokens = f"{format_count(per_s * step['sequence'])} tokens/s" if step["sequence"] else ""
        entries.append(("Samples/s", format_count(per_s), tokens))
    if hourly is not None:
        per_steps = f"{price_of_steps(hourly, step_s)} for {STEPS_PRICED:,} steps"
        entries.append(("Per hour", dollars(hourly), per_steps))
    return entries


def range_note(problem: Problem, step_s: float) -> str:
    """The 80 % range of a predicted step; empty if the graph states its costs."""
    if problem.graph.stated is not None or step_s <= 0:
        return ""
    found = step_range(problem.costs)
    low, high = (format_seconds(part * step_s) for part in (found.low, found.high))
    return f"80 % range {low} to {high}"


def next_steps(*commands: tuple[str, str], plan_file: str = PLAN_FILE) -> str:
    """Section of commands to run next, each with its purpose; ``plan_file`` replaces plan.json."""
    rows = "".join(
        f"<dt><code>{escape(command.replace(PLAN_FILE, plan_file))}</code></dt>"
        f"<dd>{escape(reason)}</dd>"
        for command, reason in commands
    )
    return section("next", "Do this next", f'<dl class="next">{rows}</dl>')


# ── sections ─────────────────────────────────────────────────────────────────────────────────


def candidates(comparison: Comparison | None) -> str:
    """Table of the candidates with their cost; the chosen one is marked."""
    if comparison is None:
        return ""
    reasons = "".join(
        f"<li>{escape(inert(c.planner))}: {escape(inert(c.reason, LONGEST_SENTENCE))}</li>"
        for c in comparison.candidates
        if c.reason
    )
    why = f'<p class="note">{escape(sentence(inert(comparison.why, LONGEST_SENTENCE)))}</p>'
    details = f"<details><summary>Why each won or lost</summary><ul>{reasons}</ul></details>"
    return section(
        "candidates",
        "Candidates",
        fitted(candidates_table(comparison)),
        why,
        details if reasons else "",
    )


def memory(problem: Problem, timeline: Timeline, facts: Facts) -> str:
    """Memory curve of each device with its capacity, and the kinds of memory at the peak."""
    held = memory_by_role(problem, timeline)
    cards = "".join(
        _memory_card(
            timeline, index, device, {label: sizes[index] for label, sizes in held.items()}
        )
        for index, device in enumerate(facts.devices)
    )
    note = (
        '<p class="note">Bytes held over the step; the dashed line is the capacity. The bar '
        "divides the highest point by kind of memory."
        f"{escape(_headroom(facts))}</p>"
    )
    return section("memory", "Memory", f'<div class="devices">{cards}</div>', note)


def _headroom(facts: Facts) -> str:
    text = headroom_sentence(facts)
    return f" {sentence(text)}" if text else ""


def modules(facts: Facts) -> str:
    """Table of the modules on each device."""
    if not facts.modules:
        return ""
    hidden = len(facts.modules) - MAX_MODULES
    note = f'<p class="note">and {hidden} more</p>' if hidden > 0 else ""
    return section("modules", "Modules", fitted(module_table(facts, MAX_MODULES)), note)


def _memory_card(
    timeline: Timeline, index: int, device: DeviceFacts, held: Mapping[str, int]
) -> str:
    time_s, size = memory_envelope(timeline, index, 400)
    curve = memory_paths(
        0, 400, 8, 92, time_s, size, timeline.makespan_s, device.capacity_bytes, device.peak_bytes
    )
    text = held_of(device.peak_bytes, device.capacity_bytes)
    limit = max(device.capacity_bytes, device.peak_bytes, 1)
    classes = [f"share-{KINDS.index(label)}" for label in held]
    shares = stack([size / limit for size in held.values()], classes)
    entries = [
        (name, f"{label} {format_bytes(held[label])}")
        for name, label in zip(classes, held, strict=True)
        if held[label]
    ]
    under = f"{shares}{legend(entries)}"
    return memory_card(device.name, text, curve, fits=device.fits, under=under)


def links(facts: Facts) -> str:
    """Load and traffic of each used link, and collectives of each device."""
    if not facts.links and not facts.exchanges:
        return section("links", "Links", "<p>Nothing is sent between devices.</p>")
    hidden = len(facts.links) - MAX_LINKS
    return section(
        "links",
        "Links",
        fitted(link_table(facts, MAX_LINKS)) if facts.links else "",
        f'<p class="note">and {hidden} less used links</p>' if hidden > 0 else "",
        fitted(exchange_table(facts)) if facts.exchanges else "",
    )


def critical_path(problem: Problem, timeline: Timeline, facts: Facts) -> str:
    """Parts of the step time, and the longest steps of the critical path."""
    shares = facts.path.shares
    classes = [_CAUSE_CLASSES[cause] for cause in shares]
    entries = [
        (name, f"{cause} {format_percent(share)}")
        for name, (cause, share) in zip(classes, shares.items(), strict=True)
    ]
    number_of = {number: index for index, number in enumerate(facts.path.longest(MAX_PATH_STEPS))}
    heads = (
        ColumnHead("Step of the path", "name code"),
        ColumnHead("On", "wide"),
        ColumnHead("Starts", "number wide"),
        ColumnHead("Takes", "number"),
        ColumnHead("Of step", "number"),
        ColumnHead("Started after", "wide"),
    )
    steps = longest_steps(problem, timeline, facts, MAX_STEPS)
    rows: list[list[Cell]] = [
        [
            Html(
                f'<button type="button" class="go" data-step="{number_of[step.number]}">'
                f"{escape(step.name)}</button>"
            ),
            step.place,
            format_seconds(step.step.start_s),
            format_seconds(step.duration_s),
            format_percent(step.step_share),
            step.reason,
        ]
        for step in steps
    ]
    count = len(facts.path.steps)
    which = f"its {len(steps)} longest" if count > len(steps) else "all"
    sentences = [
        f"The chain that sets the length of the step: {count_of(count, 'step')}, {which} listed."
    ]
    if facts.bottleneck:
        sentences.append(sentence(facts.bottleneck))
    sentences += [f"Would help: {measure}." for measure in advice(facts)]
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in sentences)
    body = stack(list(shares.values()), classes) + legend(entries) if shares else ""
    return section("path", "Critical path", paragraphs, body, table(heads, rows) if rows else "")


def top_ops(facts: Facts) -> str:
    """Table of the ops that take the most time."""
    if not facts.top_ops:
        return ""
    return section("ops", "Longest ops", fitted(top_table(facts, len(facts.top_ops))))


def plan_section(problem: Problem, plan: Plan) -> str:
    """Sources of the numbers: graph, cluster, costs and notes of the plan."""
    sources = ", ".join(f"{n:,} by {source}" for source, n in problem.costs.sources().items())
    entries = [
        ("Strategy", inert(plan.notes.get("how") or plan.planner) or "–"),
        ("Graph", f"{inert(problem.graph.name)}, {problem.graph.content_hash[:12]}"),
        ("Cluster", f"{inert(problem.cluster.name)}, {problem.cluster.content_hash[:12]}"),
        ("Op times", sources or "–"),
        ("Transfers", problem.transfers),
        *(
            (f"Note: {inert(key)}", inert(str(value)))
            for key, value in {**plan.claims.summary(), **plan.notes}.items()
        ),
    ]
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries)
    return section("plan", "Plan", f'<dl class="facts">{listed}</dl>')
