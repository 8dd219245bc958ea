"""Results for the terminal, as rich renderables; `hocket.view.table.plain` makes text of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
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
from hocket.view.table import Column, FittedTable
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
    problem = comparison.problem
    kept_rows = [
        index
        for index, candidate in enumerate(comparison.candidates)
        if index == comparison.chosen or candidate.planner not in hidden
    ]
    num_hidden = len(comparison.candidates) - len(kept_rows)
    told_rows = [comparison.candidates[index] for index in kept_rows]
    alone_s = min(
        (
            c.timeline.makespan_s
            for c in comparison.candidates
            if c.feasible and c.timeline is not None and len(used_devices(c.timeline)) == 1
        ),
        default=None,
    )
    lines = [
        _candidate_cells(
            problem,
            comparison.candidates[index],
            index == comparison.chosen,
            alone_s,
            comparison.least_step_s,
        )
        for index in kept_rows
    ]
    columns = [
        Column(title=""),
        Column(title="candidate", is_name=True),
        Column(title="busiest", align="right"),
        Column(title="step", align="right"),
        Column(title="fullest", is_name=True),
        Column(title="peak memory  ", align="right"),
        Column(title="devices", align="right", rank=3),
        Column(title="speed-up", align="right", rank=4),
        Column(title="per hour", align="right", rank=2),
        Column(title=f"{STEPS_PRICED:,} steps", align="right", rank=1),
    ]
    # A column that says nothing (no price is known) is left out.
    kept = [i for i in range(len(columns)) if i == 0 or any(line[i].plain for line in lines)]
    table = FittedTable(
        columns=tuple(columns[i] for i in kept),
        rows=[[line[i] for i in kept] for line in lines],
    )
    # A dash has a reason: ✗ in the line, or a sentence where memory is not what is missing.
    told = [
        Text(f"{inert(c.planner)}: {inert(c.reason, LONGEST_SENTENCE)}", style="dim")
        for c in told_rows
        if c.step_s is None and c.reason and not lacks_memory(problem, c)
    ]
    if num_hidden:
        more = count_of(num_hidden, "further form")
        told.append(Text(f"{more} of these planners: --all shows them", style="dim"))
    return Group(table, *told, *verdict(comparison), *_bound_line(comparison))


def lacks_memory(problem: Problem, candidate: Candidate) -> bool:
    """True if the row itself shows that a device lacks memory."""
    timeline = candidate.timeline
    return timeline is not None and bool((timeline.peak_bytes > problem.memory_bytes).any())


def _bound_line(comparison: Comparison) -> list[Text]:
    """How far the winner is from what no plan can beat."""
    if comparison.gap is None or comparison.bound is None:
        return []
    what = "no plan is shorter" if comparison.problem.objective == "latency" else "no load is less"
    bound = format_seconds(comparison.bound.seconds)
    gap = format_percent(comparison.gap)
    line = f"{what} than {bound} ({inert(comparison.bound.why)}): gap {gap}"
    return [Text(line, style="dim")]


def _candidate_cells(
    problem: Problem,
    candidate: Candidate,
    chosen: bool,
    alone_s: float | None,
    least_s: float | None,
) -> list[Text]:
    """Cells of one line; ``alone_s`` is the shortest step on one device, where it fits."""
    style = "bold" if chosen else "" if candidate.feasible else "dim"
    step = "–" if candidate.step_s is None else format_seconds(candidate.step_s, least_s)
    load = "" if candidate.max_load_s is None else format_seconds(candidate.max_load_s, least_s)
    device, hourly, per_steps, count, speed_up = "", "", "", "", ""
    memory = Text()
    if candidate.timeline is not None:
        worst = fullest_device(problem, candidate.timeline)
        peak, capacity = int(candidate.timeline.peak_bytes[worst]), problem.memory_bytes[worst]
        device = inert(problem.cluster.device_names[worst])
        memory = _memory_cell(peak, int(capacity), style)
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
    return [
        Text("✔" if chosen else "", style="bold green"),
        Text(inert(candidate.planner), style=style),
        Text(load, style=style),
        Text(step, style=style),
        Text(device, style=style),
        memory,
        Text(count, style=style),
        Text(speed_up, style=style),
        Text(hourly, style=style),
        Text(per_steps, style=style),
    ]


def _memory_cell(
    peak_bytes: int,
    capacity_bytes: int,
    style: str = "",
    says: Callable[[int, int], str] = of_capacity,
) -> Text:
    """``7.4 of 8.0 GiB``, with ✗ where it does not fit and room for it where it does."""
    overflow = " ✗" if peak_bytes > capacity_bytes else "  "
    return Text.assemble((says(peak_bytes, capacity_bytes), style), (overflow, "bold red"))


def verdict(comparison: Comparison) -> list[Text]:
    """Why the chosen candidate won and what limits it; where none fits, the error says why."""
    return [] if comparison.winner is None else [Text(inert(comparison.why, LONGEST_SENTENCE))]


# ── hocket show ──────────────────────────────────────────────────────────────────────────────


def plan_summary(
    problem: Problem, plan: Plan, timeline: Timeline, within: WithinBudget | None = None
) -> RenderableType:
    """What ``hocket show`` prints: each device, each used link, the longest ops; of a plan
    ``within`` a budget, how it is kept."""
    facts = facts_of(problem, plan, timeline)
    parts: list[RenderableType] = [_headline(facts), *_budget_lines(plan, within), Text()]
    parts += [_device_table(facts), *_headroom_line(facts)]
    parts += _module_table(facts)
    parts += [Text(), _memory_table(facts, memory_by_role(problem, timeline))]
    if facts.links:
        parts += [Text(), _link_table(facts)]
    if facts.exchanges:
        parts += [Text(), _exchange_table(facts)]
    if facts.top_ops:
        parts += [Text(), _top_table(facts)]
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
    return FittedTable(
        columns=(
            Column(title="device", is_name=True),
            Column(title="kind", is_name=True, rank=1),
            Column(title="ops", align="right"),
            Column(title="busy", align="right"),
            Column(title="peak memory  ", align="right"),
        ),
        rows=[
            [
                Text(device.name),
                Text(device.kind, style="dim"),
                Text(f"{device.num_ops:,}"),
                Text(format_percent(device.busy_share)),
                _memory_cell(device.peak_bytes, device.capacity_bytes, says=held_of),
            ]
            for device in facts.devices
        ],
    )


def _headroom_line(facts: Facts) -> list[RenderableType]:
    sentence = headroom_sentence(facts)
    return [Text(sentence, style="dim")] if sentence else []


def _module_table(facts: Facts) -> list[RenderableType]:
    """The decision itself: which layers are on which device."""
    if not facts.modules:
        return []
    table = FittedTable(
        columns=(
            Column(title="modules", is_name=True),
            Column(title="on", is_name=True),
            Column(title="ops", align="right", rank=1),
        ),
        rows=[
            [Text(module.name), Text(module.on), Text(f"{module.num_ops:,}")]
            for module in facts.modules[:_MOST_MODULES]
        ],
    )
    hidden = len(facts.modules) - _MOST_MODULES
    more = [Text(f"  and {hidden} more, all in the report", style="dim")] if hidden > 0 else []
    return [Text(), table, *more]


def _memory_table(facts: Facts, held: dict[str, tuple[int, ...]]) -> FittedTable:
    """What fills each device when it is fullest, a column per kind of memory."""
    return FittedTable(
        columns=(
            Column(title="at the peak", is_name=True),
            *(Column(title=role, align="right", rank=rank) for rank, role in enumerate(held)),
        ),
        rows=[
            [Text(device.name), *(Text(_or_dash(held[role][index])) for role in held)]
            for index, device in enumerate(facts.devices)
            if device.peak_bytes
        ],
    )


def _or_dash(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "–"


def _link_table(facts: Facts) -> RenderableType:
    table = FittedTable(
        columns=(
            Column(title="link", is_name=True),
            Column(title="busy", align="right"),
            Column(title="moved", align="right"),
            Column(title="transfers", align="right", rank=1),
            Column(title="bandwidth", align="right", rank=2),
        ),
        rows=[
            [
                Text(link.name),
                Text(format_percent(link.busy_share)),
                Text(format_bytes(link.moved_bytes)),
                Text(f"{link.num_transfers:,}"),
                Text(format_rate(link.bandwidth_bps, "B/s")),
            ]
            for link in facts.links[:_MOST_ROWS]
        ],
    )
    hidden = len(facts.links) - _MOST_ROWS
    if hidden <= 0:
        return table
    return Group(table, Text(f"  and {hidden} less used", style="dim"))


def _exchange_table(facts: Facts) -> FittedTable:
    """What devices do together; it crosses all links of a ring or of trees, so no link has it."""
    return FittedTable(
        columns=(
            Column(title="exchanges", is_name=True),
            Column(title="busy", align="right"),
            Column(title="sent", align="right"),
            Column(title="exchanges", align="right", rank=1),
        ),
        rows=[
            [
                Text(each.device),
                Text(format_percent(each.busy_share)),
                Text(format_bytes(each.sent_bytes)),
                Text(f"{each.num_exchanges:,}"),
            ]
            for each in facts.exchanges
        ],
    )


def _top_table(facts: Facts) -> FittedTable:
    return FittedTable(
        columns=(
            Column(title="longest ops", is_name=True),
            Column(title="kind", is_name=True, rank=1),
            Column(title="device", is_name=True, rank=2),
            Column(title="time", align="right"),
            Column(title="of step", align="right"),
        ),
        rows=[
            [
                Text(op.name),
                Text(op.kind, style="dim"),
                Text(op.device),
                Text(format_seconds(op.duration_s)),
                Text(format_percent(op.step_share)),
            ]
            for op in facts.top_ops[:_MOST_ROWS]
        ],
    )


# ── hocket explain ───────────────────────────────────────────────────────────────────────────


def explanation(
    problem: Problem, plan: Plan, timeline: Timeline, within: WithinBudget | None = None
) -> RenderableType:
    """What ``hocket explain`` prints: where the time goes, what limits it, what would help."""
    facts = facts_of(problem, plan, timeline)
    parts: list[RenderableType] = [_headline(facts), *_budget_lines(plan, within)]
    parts += _headroom_line(facts)
    parts += _module_table(facts)
    parts += [Text(), Text(path_sentence(facts)), Text()]
    rows = [
        [
            Text(step.name),
            Text(step.place),
            Text(format_seconds(step.duration_s)),
            Text(format_percent(step.step_share)),
            Text(step.reason, style="dim"),
        ]
        for step in longest_steps(problem, timeline, facts, 10)
    ]
    if rows:
        columns = (
            Column(title="longest steps of the path", is_name=True),
            Column(title="on", is_name=True, rank=2),
            Column(title="time", align="right"),
            Column(title="of step", align="right"),
            Column(title="started after", rank=1),
        )
        parts += [FittedTable(columns=columns, rows=rows), Text()]
    if facts.bottleneck:
        parts.append(Text(facts.bottleneck))
    helpful = advice(facts) if within is None else budget_advice(facts, within)
    parts += [Text(f"would help: {sentence}") for sentence in helpful]
    return Group(*parts)
