"""ParallelConfigs and parallel plans for the terminal, as rich renderables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.cost.chips import chip_of
from hocket.plan.transformer_plan import TransformerPlan
from hocket.simulate.timeline import Timeline
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.parallel import (
    MARK,
    counts_text,
    fields_of,
    only_here,
    rank_facts,
    schedule_text,
    shown,
    step_parts,
    winning,
)
from hocket.view.table import Column, FittedTable
from hocket.view.wording import count_of, of_capacity

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.planners.parallel.forecast import ConfigForecast

MAX_REASONS = 3
"""Candidates that lost, and candidates that do not fit, whose reason is told."""
MAX_RANKS = 16
"""Pipeline ranks that are listed; the rest is said to be there."""


def comparison_table(comparison: Comparison, top: int) -> RenderableType:
    """A line per candidate with ✔ at the chosen one, why the others lost, then the sentence."""
    candidates = shown(comparison, top)
    fields = fields_of(candidates)
    columns = [
        Column(title="", align="right"),
        *(
            Column(title=f.title, align="right" if f.is_number else "left", rank=f.rank)
            for f in fields
        ),
        Column(title="peak ", align="right"),
        Column(title="of", align="right", rank=5),
    ]
    chosen = None if comparison.winner is None else 0
    rows = [
        _row(candidate, index, [f.values[index] for f in fields], index == chosen)
        for index, candidate in enumerate(candidates)
    ]
    parts: list[RenderableType] = []
    if candidates:
        parts.append(FittedTable(columns=tuple(columns), rows=rows, indent=1, least_gap=1))
        if any(only_here(candidate) for candidate in candidates):
            program = comparison.problem.training.software.name
            told = f"  {MARK} hocket run only: {program} does not have this schedule"
            parts.append(Text(told, style="dim"))
        reasons = _reasons(comparison, candidates)
        parts += [reasons] if reasons.plain else []
    winner = winning(comparison)
    if winner is not None:
        # Where nothing fits, the error says why.
        parts.append(Text(inert(comparison.why, LONGEST_SENTENCE)))
        parts.append(Text(range_sentence(winner)))
        parts.append(Text(mfu_sentence(winner)))
    return Group(*parts, Text(counts_text(comparison), style="dim"))


def range_sentence(candidate: ConfigForecast) -> str:
    """Between what steps a measured one is expected, and why."""
    low_s, high_s = map(format_seconds, candidate.range_s)
    problem = candidate.problem
    if problem.training.coefficients.source:
        why = f"calibrated with {problem.training.coefficients.source}"
    elif problem.training.model.experts is not None:
        why = "mixtures of experts vary most between releases of a program"
    else:
        chips = {chip_of(kind, problem.training.software.libraries) for kind in candidate.kinds}
        least_known = max(chips, key=lambda chip: chip.uncertainty)
        why = f"{least_known.name}: {least_known.source.partition(':')[0].partition(' (')[0]}"
    return f"expect {low_s} to {high_s} per step ({inert(why, LONGEST_SENTENCE)})"


def mfu_sentence(candidate: ConfigForecast) -> str:
    """Both ways in which published runs count it: long sequences lie far apart in them."""
    whole, causal = map(format_percent, (candidate.mfu, candidate.causal_mfu))
    return f"MFU {whole} counts all pairs of tokens; without those beyond a causal mask {causal}"


def _reasons(comparison: Comparison, candidates: tuple[ConfigForecast, ...]) -> Text:
    """Why the first few others lost, and why some cannot be used, by their line's number."""
    others = list(enumerate(candidates, 1))[comparison.winner is not None :]
    losers = [pair for pair in others if pair[1].feasible][:MAX_REASONS]
    misfits = [pair for pair in others if not pair[1].feasible][:MAX_REASONS]
    told = [f"{i:>4}  {inert(c.reason, LONGEST_SENTENCE)}" for i, c in (*losers, *misfits)]
    return Text("\n".join(told), style="dim")


def _row(candidate: ConfigForecast, index: int, cells: list[str], chosen: bool) -> list[Text]:
    style = "bold" if chosen else "" if candidate.feasible else "dim"
    tick = Text("✔", style="bold green") if chosen else Text(str(index + 1), style="dim")
    return [
        tick,
        *(Text(cell, style=style) for cell in cells),
        *_memory_cells(candidate, style),
    ]


def _memory_cells(candidate: ConfigForecast, style: str) -> tuple[Text, Text]:
    """Peak of the fullest rank and what its devices have."""
    rank = candidate.fullest_rank
    mark = " " if candidate.feasible else "✗"
    peak = Text.assemble((format_bytes(candidate.peak_bytes[rank]), style), (mark, "bold red"))
    return peak, Text(format_bytes(candidate.capacity_bytes[rank]), style="dim")


# ── plans ────────────────────────────────────────────────────────────────────────────────────────


def parallel_summary(plan: TransformerPlan, timeline: Timeline) -> RenderableType:
    """What ``hocket show`` prints of a parallel plan."""
    return Group(headline(plan, timeline), Text(), _rank_table(plan, timeline))


def headline(plan: TransformerPlan, timeline: Timeline) -> RenderableType:
    """The model, how it is divided, and the step."""
    division = plan.division
    title = Text(f"{inert(plan.model.name)} on {inert(plan.cluster.name)}", style="bold")
    degrees = [
        f"tensor {division.tensor}",
        f"pipeline {division.pipeline}",
        f"data {division.data}",
    ]
    degrees += [f"context {division.context}"] * (division.context > 1)
    degrees += [f"expert {division.expert}"] * (division.expert > 1)
    degrees.append(f"microbatches {division.num_microbatches} of {division.microbatch}")
    modes = [schedule_text(division, plan.schedule.name)] * (division.pipeline > 1)
    modes += [f"recompute {division.recompute}", f"ZeRO {division.zero}"]
    modes += ["sequence parallel"] * division.sequence_parallel
    tokens = division.global_batch * plan.model.sequence / (timeline.makespan_s or 1.0)
    numbers = [f"step {format_seconds(timeline.makespan_s)}", f"{tokens:,.0f} tokens/s"]
    numbers += [f"MFU {format_percent(plan.mfu)}"] if plan.mfu is not None else []
    numbers.append(f"bubble {format_percent(timeline.idle_share)}")
    numbers.append(count_of(division.num_devices, "device"))
    return Group(title, *(Text(" · ".join(words)) for words in (degrees, modes, numbers)))


def _rank_table(plan: TransformerPlan, timeline: Timeline) -> RenderableType:
    facts = rank_facts(plan, timeline)
    rows = [
        [
            Text(str(fact.rank)),
            Text(inert(fact.first_device)),
            Text(inert(fact.kind), style="dim"),
            Text(str(fact.num_layers)),
            Text(format_percent(fact.busy_share)),
            Text(format_bytes(fact.state_bytes)),
            Text(of_capacity(fact.peak_bytes, fact.capacity_bytes)),
            Text("✗" if fact.peak_bytes > fact.capacity_bytes else "", style="bold red"),
        ]
        for fact in facts[:MAX_RANKS]
    ]
    table = FittedTable(
        columns=(
            Column(title="rank", align="right"),
            Column(title="from device", is_name=True, rank=1),
            Column(title="kind", is_name=True, rank=2),
            Column(title="layers", align="right"),
            Column(title="busy", align="right"),
            Column(title="state", align="right", rank=3),
            Column(title="peak memory", align="right"),
            Column(title=""),
        ),
        rows=rows,
    )
    hidden = len(facts) - MAX_RANKS
    if hidden <= 0:
        return table
    return Group(table, Text(f"  and {hidden} ranks more", style="dim"))


def parallel_explanation(plan: TransformerPlan, timeline: Timeline) -> RenderableType:
    """What ``hocket explain`` prints of a parallel plan: where the step's time goes."""
    from hocket.planners.parallel.transformer_why import PARTS_IN_WORDS

    step_s = timeline.makespan_s or 1.0
    rows = [
        [
            Text(inert(PARTS_IN_WORDS.get(name, name))),
            Text(format_seconds(value)),
            Text(format_percent(value / step_s)),
        ]
        for name, value in step_parts(plan).items()
    ]
    columns = (
        Column(title="the step's time goes into", is_name=True),
        Column(title="time", align="right"),
        Column(title="of step", align="right"),
    )
    slowest = max(rank_facts(plan, timeline), key=lambda fact: fact.busy_share)
    why = plan.plan.notes.get("why")
    told = [Text(inert(why, LONGEST_SENTENCE))] if why else []
    busiest = (
        f"pipeline rank {slowest.rank} is busiest ({format_percent(slowest.busy_share)}); devices "
        f"wait {format_percent(timeline.idle_share)} of their time"
    )
    table: list[RenderableType] = [FittedTable(columns=columns, rows=rows), Text()] if rows else []
    return Group(headline(plan, timeline), Text(), *table, Text(busiest), *told)
