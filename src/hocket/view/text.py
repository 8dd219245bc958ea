"""Format plans for the terminal: output of ``hocket show`` and ``hocket explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_rate, format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline
from hocket.view.budgeted import AMONG_MANY, WithinBudget, budget_advice, kept_sentences
from hocket.view.facts import Facts, facts_of, memory_by_role
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
    count_of,
    dollars,
    held_of,
)

if TYPE_CHECKING:
    pass

_MOST_MODULES = 24
_MOST_ROWS = 10
"""Number of printed links and of printed ops."""


# ── hocket show ──────────────────────────────────────────────────────────────────────────────


def plan_summary(
    problem: Problem, plan: Plan, timeline: Timeline, within: WithinBudget | None = None
) -> RenderableType:
    """Output of ``hocket show``: devices, used links and the longest ops.

    With ``within`` it also describes how the plan stays within its memory budget.
    """
    facts = facts_of(problem, plan, timeline)
    parts: list[RenderableType] = [_headline(facts), *_budget_lines(plan, within), Text()]
    parts += [device_table(facts), *_headroom_line(facts)]
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


def device_table(facts: Facts) -> FittedTable:
    """Table of load and peak memory per device."""
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
    """Table of the modules on each device."""
    if not facts.modules:
        return []
    hidden = len(facts.modules) - _MOST_MODULES
    more = [Text(f"  and {hidden} more, all in the report", style="dim")] if hidden > 0 else []
    return [Text(), module_table(facts, _MOST_MODULES), *more]


def module_table(facts: Facts, most: int) -> FittedTable:
    """Table of modules and their devices."""
    rows = [[module.name, module.on, f"{module.num_ops:,}"] for module in facts.modules[:most]]
    return FittedTable(columns=(name("modules"), name("on"), number("ops", 1)), rows=rows)


def _memory_table(facts: Facts, held: dict[str, tuple[int, ...]]) -> FittedTable:
    """Table of memory at each device's peak, with a column per kind."""
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
    """Table of load and traffic of the busiest links."""
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
    """Table of collectives per device; a collective crosses all links of a ring, so none is
    named."""
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
    """Table of the ops that take the most time; microbatches of an op are summed."""
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
    """Output of ``hocket explain``: critical path, bottleneck and advice."""
    facts = facts_of(problem, plan, timeline)
    parts: list[RenderableType] = [_headline(facts), *_budget_lines(plan, within)]
    for note, words in (("why", ""), ("alternatives", "alternatives: ")):
        if noted := str(plan.notes.get(note, "")):
            parts.append(Text(f"{words}{inert(noted, LONGEST_SENTENCE)}"))
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
