"""The report of two waves, or of waves that take partitions: one HTML file without scripts.

The ways that were compared, both lanes over time, what each lane and both hold, and the starts that
were tried.
"""

from __future__ import annotations

from collections.abc import Iterable

from hocket import __version__
from hocket.base.units import format_bytes, format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.waves.round_robin import PartitionFit, PartitionWay
from hocket.planners.waves.search import WaveFit
from hocket.planners.waves.way import WaveWay
from hocket.planners.waves.why import reasons
from hocket.simulate.parallel.lane_blocks import LaneBlocks
from hocket.view.drawing import memory_card
from hocket.view.facts import facts_of
from hocket.view.names import inert
from hocket.view.page import Cell, ColumnHead, page_html, section, stats_html, table
from hocket.view.picture import draw_timeline, memory_paths
from hocket.view.shared import unfolded
from hocket.view.waves import partition_verdict, shown_ways, verdict
from hocket.view.wording import of_capacity, sentence

LANE_NAMES = ("tick", "tock")


def waves_report_html(fit: WaveFit) -> str:
    """The report as one HTML text."""
    told = fit.chosen or fit.leanest
    name = inert(fit.problem.graph.name)
    plan = fit.plan_of(told)
    return page_html(
        title=f"Two waves of {name}",
        lead=" ".join([verdict(fit), *(sentence(why) for why in reasons(fit))]),
        stats=_stats(fit, told),
        body=(
            _table_of(shown_ways(fit), fit.budget_bytes),
            _timeline(fit.problem, plan, told),
            _curves(fit, told),
            _starts(fit),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
    )


def partitions_report_html(fit: PartitionFit) -> str:
    """The report of waves that take partitions in turn: the ways, and every device over time."""
    turns, (*others, _) = fit.turns, fit.ways
    inner, placed = unfolded(fit.problem, fit.plan())
    facts = facts_of(inner, placed, turns.timeline)
    picture = draw_timeline(inner, turns.timeline, facts, width=1080, styled=False)
    note = (
        '<p class="note">As if all partitions were there: switching and what of fetches no slot '
        "hides come on top.</p>"
    )
    rate = f"{turns.samples_per_s:,.1f} samples per second"
    more = f"{fit.gain:.2f} times {max(others, key=lambda way: way.samples_per_s).name}"
    peak = of_capacity(turns.peak_bytes, fit.budget_bytes)
    return page_html(
        title=f"Waves in turn of {inert(fit.problem.graph.name)}",
        lead=partition_verdict(fit),
        stats=stats_html([
            ("Step", format_seconds(turns.step_s), rate),
            ("Gain", f"{fit.gain:.2f} x", more),
            ("Peak", peak, "of a device"),
        ]),
        body=(
            _table_of(((way.name, way) for way in fit.ways), fit.budget_bytes),
            section("devices", "Devices", f"<figure>{picture}</figure>", note),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
    )  # fmt: skip


def _stats(fit: WaveFit, told: WaveWay) -> str:
    gain = "nothing else fits" if fit.gain is None else f"{fit.gain:.2f} times without lanes"
    more = told.peak_bytes / fit.one_wave_bytes
    return stats_html([
        ("Step", format_seconds(told.step_s), f"{told.samples_per_s:,.1f} samples per second"),
        ("Gain", "–" if fit.gain is None else f"{fit.gain:.2f} x", gain),
        ("Peak", of_capacity(told.peak_bytes, fit.budget_bytes), f"{more:.2f} times one wave"),
    ])  # fmt: skip


def _table_of(ways: Iterable[tuple[str, WaveWay | PartitionWay]], budget_bytes: int) -> str:
    heads = [
        ColumnHead("Way"),
        ColumnHead("Step", "number"),
        ColumnHead("Samples/s", "number"),
        ColumnHead("Peak", "number"),
    ]
    lines: list[list[Cell]] = [
        [
            name,
            format_seconds(way.step_s),
            f"{way.samples_per_s:,.1f}",
            format_bytes(way.peak_bytes) + ("" if way.peak_bytes <= budget_bytes else " ✗"),
        ]
        for name, way in ways
    ]
    return section("ways", "Ways", table(heads, lines))


def _timeline(problem: Problem, plan: Plan, told: WaveWay) -> str:
    inner, placed = unfolded(problem, plan)
    facts = facts_of(inner, placed, told.timeline)
    picture = draw_timeline(inner, told.timeline, facts, width=1080, styled=False)
    note = '<p class="note">The two lanes of each device, one above the other.</p>'
    return section("lanes", "Lanes", f"<figure>{picture}</figure>", note)


def _curves(fit: WaveFit, told: WaveWay) -> str:
    blocks = fit.blocks(told)
    lanes: list[tuple[str, int | None]] = [*zip(LANE_NAMES, range(2), strict=True)]
    lanes.append(("together", None))
    cards = "".join(_curve(name, blocks, lane, told) for name, lane in lanes)
    note = (
        '<p class="note">What each lane makes and holds on the first device, and both; parameters, '
        "optimizer state and the batch are there beside it. The dashed line is the peak of both."
        "</p>"
    )
    return section("memory", "Memory", f'<div class="devices">{cards}</div>', note)


def _curve(name: str, blocks: LaneBlocks, lane: int | None, told: WaveWay) -> str:
    time_s, held = blocks.curve(lane)
    peak, most = blocks.peak_bytes(lane), blocks.peak_bytes()
    curve = memory_paths(0, 400, 8, 92, time_s, held, told.timeline.makespan_s, most, peak)
    return memory_card(name, format_bytes(peak), curve)


def _starts(fit: WaveFit) -> str:
    heads = [
        ColumnHead("Second wave begins after", "number"),
        ColumnHead("Step", "number"),
        ColumnHead("Peak", "number"),
        ColumnHead("Of one wave", "number"),
    ]
    lines: list[list[Cell]] = [
        [f"{way.lanes.lead} ops", format_seconds(way.step_s), format_bytes(way.peak_bytes),
         f"{way.peak_bytes / fit.one_wave_bytes:.2f} x"]
        for way in fit.tried
        if way.lanes is not None
    ]  # fmt: skip
    return section("starts", "Starts that were tried", table(heads, lines))
