"""Results for the terminal, as rich renderables; `hocket.view.table.plain` makes text of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_rate, format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.analysis import price_per_hour, used_devices
from hocket.simulate.timeline import Timeline
from hocket.view.budgeted import AMONG_MANY, WithinBudget, budget_advice, kept_sentences
from hocket.view.facts import Facts, facts_of, fullest_device
from hocket.view.memory import memory_by_role
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.story import (
    advice,
    headroom_sentence,
    longest_steps,
    path_sentence,
    sent_counts,
)
from hocket.view.table import Column, FittedTable, name, number, share
from hocket.view.wording import (
    STEPS_PRICED,
    count_of,
    dollars,
    held_of,
    of_capacity,
    price_of_steps,
)

if TYPE_CHECKING:
    from hocket.planners.candidates import Candidate, Comparison

_MOST_MODULES = 24
_MOST_ROWS = 10
"""Of links and of ops."""


# ── hocket plan ──────────────────────────────────────────────────────────────────────────────


def candidate_table(comparison: Comparison, hidden: Collection[str] = ()) -> RenderableType:
    """A line per candidate (step, fullest device, price where known, ✔ chosen), then the reason.

    Of the planners named in ``hidden`` only the chosen one has a line; how many more is said.
    """
    kept = [
        candidate
        for index, candidate in enumerate(comparison.candidates)
        if index == comparison.chosen or candidate.planner not in hidden
    ]
    # A dash has a reason: ✗ in the line, or a sentence where memory is not what is missing.
    notes = [
        Text(f"{inert(c.planner)}: {inert(c.reason, LONGEST_SENTENCE)}", style="dim")
        for c in kept
        if c.step_s is None and c.reason and not lacks_memory(comparison.problem, c)
    ]
    if num_hidden := len(comparison.candidates) - len(kept):
        more = count_of(num_hidden, "further form")
        notes.append(Text(f"{more} of these planners: --all shows them", style="dim"))
    table = placements_table(comparison, kept)
    return Group(table, *notes, *verdict(comparison), *_bound_line(comparison))


def placements_table(comparison: Comparison, candidates: Sequence[Candidate]) -> FittedTable:
    """A line per candidate: step, fullest device, devices and price where they are known."""
    alone_s = min(
        (
            c.timeline.makespan_s
            for c in comparison.candidates
            if c.feasible and c.timeline is not None and len(used_devices(c.timeline)) == 1
        ),
        default=None,
    )
    columns = (
        Column(title=""), name("candidate"), number("busiest"), number("step"), name("fullest"),
        number("peak memory  "), number("devices", 3), number("speed-up", 4),
        number("per hour", 2), number(f"{STEPS_PRICED:,} steps", 1),
    )  # fmt: skip
    rows = [_candidate_cells(comparison, candidate, alone_s) for candidate in candidates]
    return FittedTable(
        columns=columns, rows=rows, styles=[candidate_style(comparison, c) for c in candidates]
    ).without_empty()


def candidate_style(comparison: Comparison, candidate: Candidate) -> str:
    """The style of a candidate's row."""
    return "bold" if candidate is comparison.winner else "" if candidate.feasible else "dim"


def fullest_cells(problem: Problem, timeline: Timeline) -> tuple[str, str]:
    """The fullest device and ``7.4 of 8.0 GiB``, with ✗ where that does not fit."""
    worst = fullest_device(problem, timeline)
    peak, capacity = int(timeline.peak_bytes[worst]), int(problem.memory_bytes[worst])
    name_of = inert(problem.cluster.device_names[worst])
    return name_of, of_capacity(peak, capacity) + (" ✗" if peak > capacity else "  ")


def lacks_memory(problem: Problem, candidate: Candidate) -> bool:
    """True if the row itself shows that a device lacks memory."""
    timeline = candidate.timeline
    return timeline is not None and bool((timeline.peak_bytes > problem.memory_bytes).any())


def _bound_line(comparison: Comparison) -> list[Text]:
    """The lower bound and the gap to it."""
    if comparison.gap is None or comparison.bound is None:
        return []
    what = "no plan is shorter" if comparison.problem.objective == "latency" else "no load is less"
    bound = format_seconds(comparison.bound.seconds)
    gap = format_percent(comparison.gap)
    line = f"{what} than {bound} ({inert(comparison.bound.why)}): gap {gap}"
    return [Text(line, style="dim")]


def _candidate_cells(
    comparison: Comparison, candidate: Candidate, alone_s: float | None
) -> list[str]:
    """Cells of one line; ``alone_s`` is the shortest step on one device, where it fits."""
    problem, least_s = comparison.problem, comparison.least_step_s
    tick = "✔" if candidate is comparison.winner else ""
    step = "–" if candidate.step_s is None else format_seconds(candidate.step_s, least_s)
    load = "" if candidate.max_load_s is None else format_seconds(candidate.max_load_s, least_s)
    device, memory, hourly, per_steps, count, speed_up = [""] * 6
    if candidate.timeline is not None:
        device, memory = fullest_cells(problem, candidate.timeline)
        if problem.cluster.num_devices > 1:
            used = len(used_devices(candidate.timeline))
            count = str(used)
            if alone_s is not None and candidate.step_s:
                # Of each device that computes: 1.0 would be twice as fast on twice as many.
                per_device = alone_s / candidate.step_s / max(used, 1)
                speed_up = f"{per_device:.2f} each"
        price = price_per_hour(problem, candidate.timeline)
        if price is not None and candidate.step_s is not None:
            hourly = dollars(price)
            per_steps = price_of_steps(price, candidate.step_s)
    planner = inert(candidate.planner)
    return [tick, planner, load, step, device, memory, count, speed_up, hourly, per_steps]


def verdict(comparison: Comparison) -> list[Text]:
    """Why the chosen candidate won and what limits it; where none fits, the error says why."""
    return [] if comparison.winner is None else [Text(inert(comparison.why, LONGEST_SENTENCE))]


# ── hocket show ──────────────────────────────────────────────────────────────────────────────


def plan_summary(
    problem: Problem, plan: Plan, timeline: Timeline, within: WithinBudget | None = None
) -> RenderableType:
    """Output of ``hocket show``: each device, each used link, the longest ops; of a plan
    ``within`` a budget, how it is kept."""
    facts = facts_of(problem, plan, timeline)
    parts: list[RenderableType] = [_headline(facts), *_budget_lines(plan, within), Text()]
    parts += [_device_table(facts), *_headroom_line(facts)]
    parts += _modules(facts)
    parts += [Text(), _memory_table(facts, memory_by_role(problem, timeline))]
    if facts.links:
        parts += [Text(), link_table(facts, _MOST_ROWS)]
        if (hidden := len(facts.links) - _MOST_ROWS) > 0:
            parts.append(Text(f"  and {hidden} less used", style="dim"))
    if facts.exchanges:
        parts += [Text(), exchange_table(facts)]
    if facts.top_ops:
        parts += [Text(), top_table(facts, _MOST_ROWS)]
    return Group(*parts)


def _budget_lines(plan: Plan, within: WithinBudget | None) -> list[RenderableType]:
    if within is None:
        return []
    return [Text(line) for line in kept_sentences(within, inert(plan.notes.get(AMONG_MANY, "")))]


def _headline(facts: Facts) -> RenderableType:
    title = Text(facts.title, style="bold")
    if facts.planner:
        title.append(f" · {facts.planner}", style="not bold")
    numbers = [f"step {format_seconds(facts.step_s)}", count_of(facts.num_ops, "op")]
    numbers.append(count_of(sum(1 for d in facts.devices if d.num_ops), "device"))
    moved_bytes = facts.moved_bytes + facts.copies.num_bytes
    numbers.append(f"{sent_counts(facts)}, {format_bytes(moved_bytes)}")
    if facts.price_per_hour is not None:
        numbers.append(f"{dollars(facts.price_per_hour)} per hour")
    return Group(title, Text(" · ".join(numbers)))


def _device_table(facts: Facts) -> FittedTable:
    columns = (
        name("device"), name("type", 1), number("ops"), number("busy"), number("peak memory  ")
    )  # fmt: skip
    rows = [
        [
            device.name,
            device.kind,
            f"{device.num_ops:,}",
            format_percent(device.busy_share),
            held_of(device.peak_bytes, device.capacity_bytes) + ("  " if device.fits else " ✗"),
        ]
        for device in facts.devices
    ]
    return FittedTable(columns=columns, rows=rows)


def _headroom_line(facts: Facts) -> list[RenderableType]:
    sentence = headroom_sentence(facts)
    return [Text(sentence, style="dim")] if sentence else []


def _modules(facts: Facts) -> list[RenderableType]:
    """The decision itself: which layers are on which device."""
    if not facts.modules:
        return []
    hidden = len(facts.modules) - _MOST_MODULES
    more = [Text(f"  and {hidden} more, all in the report", style="dim")] if hidden > 0 else []
    return [Text(), module_table(facts, _MOST_MODULES), *more]


def module_table(facts: Facts, most: int) -> FittedTable:
    """Modules and their devices."""
    rows = [[module.name, module.on, f"{module.num_ops:,}"] for module in facts.modules[:most]]
    return FittedTable(columns=(name("modules"), name("on"), number("ops", 1)), rows=rows)


def _memory_table(facts: Facts, held: dict[str, tuple[int, ...]]) -> FittedTable:
    """Memory of each device at its peak, a column per kind."""
    columns = (name("at the peak"), *(number(role, rank) for rank, role in enumerate(held)))
    rows = [
        [device.name, *(_or_dash(held[role][index]) for role in held)]
        for index, device in enumerate(facts.devices)
        if device.peak_bytes
    ]
    return FittedTable(columns=columns, rows=rows)


def _or_dash(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "–"


def link_table(facts: Facts, most: int) -> FittedTable:
    """Load and traffic of the busiest links."""
    columns = (
        name("link"), share("busy"), number("moved"), number("transfers", 1), number("bandwidth", 2)
    )  # fmt: skip
    rows = [
        [
            link.name,
            format_percent(link.busy_share),
            format_bytes(link.moved_bytes),
            f"{link.num_transfers:,}",
            format_rate(link.bandwidth_bps, "B/s"),
        ]
        for link in facts.links[:most]
    ]
    return FittedTable(columns=columns, rows=rows)


def exchange_table(facts: Facts) -> FittedTable:
    """Collectives of each device; they cross all links of a ring, so no link has them."""
    columns = (name("collectives of"), share("busy"), number("sent"), number("calls", 1))
    rows = [
        [
            each.device,
            format_percent(each.busy_share),
            format_bytes(each.sent_bytes),
            f"{each.num_exchanges:,}",
        ]
        for each in facts.exchanges
    ]
    return FittedTable(columns=columns, rows=rows)


def top_table(facts: Facts, most: int) -> FittedTable:
    """The ops that take the most time, microbatches of one op together."""
    columns = (
        name("longest ops"), name("op", 1), name("device", 2), number("time"), number("of step")
    )  # fmt: skip
    rows = [
        [
            op.name + (f" x {op.count}" if op.count > 1 else ""),
            op.kind,
            op.device,
            format_seconds(op.duration_s),
            format_percent(op.step_share),
        ]
        for op in facts.top_ops[:most]
    ]
    return FittedTable(columns=columns, rows=rows)


# ── hocket explain ───────────────────────────────────────────────────────────────────────────


def explanation(
    problem: Problem, plan: Plan, timeline: Timeline, within: WithinBudget | None = None
) -> RenderableType:
    """Output of ``hocket explain``: where the time goes, what limits it, what would help."""
    facts = facts_of(problem, plan, timeline)
    parts: list[RenderableType] = [_headline(facts), *_budget_lines(plan, within)]
    parts += _headroom_line(facts)
    parts += _modules(facts)
    parts += [Text(), Text(path_sentence(facts)), Text()]
    rows = [
        [
            step.name,
            step.place,
            format_seconds(step.duration_s),
            format_percent(step.step_share),
            step.reason,
        ]
        for step in longest_steps(problem, timeline, facts, 10)
    ]
    if rows:
        columns = (
            name("longest steps of the path"), name("on", 2), number("time"), number("of step"),
            Column(title="started after", rank=1),
        )  # fmt: skip
        parts += [FittedTable(columns=columns, rows=rows), Text()]
    if facts.bottleneck:
        parts.append(Text(facts.bottleneck))
    helpful = advice(facts) if within is None else budget_advice(facts, within)
    parts += [Text(f"would help: {sentence}") for sentence in helpful]
    return Group(*parts)
