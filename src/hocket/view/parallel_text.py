"""Format parallel configurations and parallel plans for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.cost.chips import chip_of
from hocket.cost.ranges import source_of, step_range
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.forecast import GraphForecast, label
from hocket.simulate.timeline import Timeline
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.parallel import (
    counts_text,
    fields_of,
    rank_facts,
    schedule_text,
    shown,
    step_parts,
    winning,
)
from hocket.view.table import Column, FittedTable, name, number, share
from hocket.view.wording import count_of, of_capacity

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.planners.parallel.forecast import ConfigForecast

MAX_REASONS = 3
"""Number of losing candidates, and of candidates that do not fit, whose reason is printed."""
MAX_RANKS = 16
"""Number of pipeline ranks that are listed; the rest is only counted."""


def comparison_table(comparison: Comparison, top: int) -> RenderableType:
    """Table of candidates with ✔ at the chosen one, reasons of the others, and notes on the
    winner."""
    candidates = shown(comparison, top)
    parts: list[RenderableType] = []
    if candidates:
        parts.append(configs_table(comparison, candidates))
        reasons = _reasons(comparison, candidates)
        parts += [reasons] if reasons.plain else []
    winner = winning(comparison)
    if winner is not None:
        # If nothing fits, the error message contains the reason.
        parts.append(Text(inert(comparison.why, LONGEST_SENTENCE)))
        parts.append(Text(range_sentence(winner)))
        parts.append(Text(mfu_sentence(winner)))
    return Group(*parts, Text(counts_text(comparison), style="dim"))


def configs_table(
    comparison: Comparison, candidates: tuple[ConfigForecast, ...], *, labelled: bool = False
) -> FittedTable:
    """Table of parallel configurations, the chosen one first.

    With ``labelled`` one column names each configuration, which is narrow enough for a phone.
    """
    fields = fields_of(candidates)
    if labelled:
        first = [column.title for column, _ in fields].index("step")
        names = tuple(label(c.config) for c in candidates)
        fields = [(Column(title="parallel config"), names), *fields[first:]]
    chosen = None if comparison.winner is None else 0
    rows, styles = [], []
    for index, candidate in enumerate(candidates):
        rank, mark = candidate.fullest_rank, " " if candidate.feasible else "✗"
        rows.append([
            "✔" if index == chosen else str(index + 1),
            *(cells[index] for _, cells in fields),
            format_bytes(candidate.peak_bytes[rank]) + mark,
            format_bytes(candidate.capacity_bytes[rank]),
        ])  # fmt: skip
        styles.append("bold" if index == chosen else "" if candidate.feasible else "dim")
    columns = (
        Column(title="", align="right"),
        *(column for column, _ in fields),
        number("peak "),
        number("of", 5),
    )  # fmt: skip
    return FittedTable(columns=columns, rows=rows, styles=styles, indent=1, least_gap=1)


def range_sentence(candidate: ConfigForecast) -> str:
    """Sentence about the expected range of measured steps and the source of that range."""
    low_s, high_s = map(format_seconds, candidate.range_s)
    problem = candidate.problem
    if isinstance(candidate, GraphForecast):
        source, rows = source_of(problem.costs.settings), step_range(problem.costs).rows
        why = f"{source} costs, 80 % of {rows} measured steps"
    elif problem.training.coefficients.is_measured:
        why = f"calibrated with {problem.training.coefficients.source}"
    elif problem.training.model.experts is not None:
        why = "mixtures of experts vary most between releases of a program"
    else:
        chips = {chip_of(kind, problem.training.software.libraries) for kind in candidate.kinds}
        least_known = max(chips, key=lambda chip: chip.uncertainty)
        why = f"{least_known.name}: {least_known.source.partition(':')[0].partition(' (')[0]}"
    return f"expect {low_s} to {high_s} per step ({inert(why, LONGEST_SENTENCE)})"


def mfu_sentence(candidate: ConfigForecast) -> str:
    """MFU by both conventions of publications, which differ for long sequences."""
    if candidate.causal_mfu is None:
        return f"MFU {format_percent(candidate.mfu)} of the peak arithmetic of the devices in use"
    whole, causal = map(format_percent, (candidate.mfu, candidate.causal_mfu))
    return f"MFU {whole} counts all pairs of tokens; without those beyond a causal mask {causal}"


def _reasons(comparison: Comparison, candidates: tuple[ConfigForecast, ...]) -> Text:
    """Reasons of the first losing and non-fitting candidates, by line number of the table."""
    others = list(enumerate(candidates, 1))[comparison.winner is not None :]
    losers = [pair for pair in others if pair[1].feasible][:MAX_REASONS]
    misfits = [pair for pair in others if not pair[1].feasible][:MAX_REASONS]
    notes = [f"{i:>4}  {inert(c.reason, LONGEST_SENTENCE)}" for i, c in (*losers, *misfits)]
    return Text("\n".join(notes), style="dim")


# ── plans ────────────────────────────────────────────────────────────────────────────────────────


def parallel_summary(plan: TransformerPlan, timeline: Timeline) -> RenderableType:
    """Output of ``hocket show`` for a parallel plan."""
    hidden = len(plan.devices) - MAX_RANKS
    more = [Text(f"  and {hidden} ranks more", style="dim")] if hidden > 0 else []
    return Group(headline(plan, timeline), Text(), rank_table(plan, timeline, MAX_RANKS), *more)


def headline(plan: TransformerPlan, timeline: Timeline) -> RenderableType:
    """Model, degrees and predicted step of a plan, in three lines."""
    config = plan.config
    title = Text(f"{inert(plan.model.name)} on {inert(plan.cluster.name)}", style="bold")
    degrees = [
        f"tensor {config.tensor}",
        f"pipeline {config.pipeline}",
        f"data {config.data}",
    ]
    degrees += [f"context {config.context}"] * (config.context > 1)
    degrees += [f"expert {config.expert}"] * (config.expert > 1)
    degrees.append(f"microbatches {config.num_microbatches} of {config.microbatch}")
    modes = [schedule_text(config)] * (config.pipeline > 1)
    modes += [f"recompute {config.recompute}", f"ZeRO {config.zero}"]
    modes += ["sequence parallel"] * config.sequence_parallel
    tokens = config.global_batch * plan.model.sequence / (timeline.makespan_s or 1.0)
    numbers = [f"step {format_seconds(timeline.makespan_s)}", f"{tokens:,.0f} tokens/s"]
    numbers += [f"MFU {format_percent(plan.mfu)}"] if plan.mfu is not None else []
    numbers.append(f"bubble {format_percent(timeline.idle_share)}")
    numbers.append(count_of(config.num_devices, "device"))
    return Group(title, *(Text(" · ".join(words)) for words in (degrees, modes, numbers)))


def rank_table(plan: TransformerPlan, timeline: Timeline, most: int) -> FittedTable:
    """Table of the first ``most`` pipeline ranks: device, layers, load and memory."""
    rows = [
        [
            str(fact.rank),
            inert(fact.first_device),
            inert(fact.kind),
            str(fact.num_layers),
            format_percent(fact.busy_share),
            format_bytes(fact.state_bytes),
            of_capacity(fact.peak_bytes, fact.capacity_bytes)
            + ("  " if fact.peak_bytes <= fact.capacity_bytes else " ✗"),
        ]
        for fact in rank_facts(plan, timeline)[:most]
    ]
    columns = (
        number("rank"), name("from device", 1), name("type", 2), number("layers"), share("busy"),
        number("state", 3), number("peak memory  "),
    )  # fmt: skip
    return FittedTable(columns=columns, rows=rows)


def parts_table(plan: TransformerPlan) -> FittedTable:
    """Table of the parts of the step time, largest first."""
    from hocket.planners.parallel.transformer_why import PARTS_IN_WORDS

    parts = step_parts(plan)
    total_s = sum(parts.values()) or 1.0
    rows = [
        [inert(PARTS_IN_WORDS.get(part, part)), format_seconds(value),
         format_percent(value / total_s)]
        for part, value in parts.items()
    ]  # fmt: skip
    columns = (name("the step's time goes into"), number("time"), share("of step"))
    return FittedTable(columns=columns, rows=rows)


def parallel_explanation(plan: TransformerPlan, timeline: Timeline) -> RenderableType:
    """Output of ``hocket explain`` for a parallel plan: parts of the step time."""
    slowest = max(rank_facts(plan, timeline), key=lambda fact: fact.busy_share)
    why = plan.plan.notes.get("why")
    notes = [Text(inert(why, LONGEST_SENTENCE))] if why else []
    busiest = (
        f"pipeline rank {slowest.rank} is busiest ({format_percent(slowest.busy_share)}); devices "
        f"wait {format_percent(timeline.idle_share)} of their time"
    )
    parts = parts_table(plan)
    table: list[RenderableType] = [parts, Text()] if parts.rows else []
    return Group(headline(plan, timeline), Text(), *table, Text(busiest), *notes)
