"""The report of two waves, or of waves that take partitions: one HTML file without scripts.

The ways that were compared, both lanes over time, what each lane and both hold, and the starts that
were tried.
"""

from __future__ import annotations

from hocket import __version__
from hocket.base.units import format_bytes, format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.waves.round_robin import PartitionFit, RoundRobin
from hocket.planners.waves.search import WaveFit
from hocket.planners.waves.way import WaveWay
from hocket.planners.waves.why import reasons
from hocket.simulate.parallel.lane_blocks import LaneBlocks
from hocket.view.drawing import memory_card
from hocket.view.facts import Facts, facts_of
from hocket.view.names import inert
from hocket.view.page import Cell, ColumnHead, fitted, page_html, section, stats_html, table
from hocket.view.picture import draw_timeline, memory_paths
from hocket.view.sections import Stat, head_stats, next_steps, range_note
from hocket.view.shared import unfolded
from hocket.view.step_inputs import step_data
from hocket.view.waves import partition_verdict, strategy_table, verdict
from hocket.view.wording import of_capacity, sentence

LANE_NAMES = ("tick", "tock")


def waves_report_html(fit: WaveFit) -> str:
    """The report as one HTML text."""
    told = fit.chosen or fit.leanest
    gain = "nothing else fits" if fit.gain is None else f"{fit.gain:.2f} times without lanes"
    more = f"{told.peak_bytes / fit.one_wave_bytes:.2f} times one wave"
    picture, facts = _timeline(fit.problem, fit.plan_of(told), told)
    return page_html(
        title=f"Two waves of {inert(fit.problem.graph.name)}",
        lead=" ".join([verdict(fit), *(sentence(why) for why in reasons(fit))]),
        stats=stats_html([
            *_head(fit.problem, told, facts),
            ("Gain", "–" if fit.gain is None else f"{fit.gain:.2f} x", gain),
            ("Peak", of_capacity(told.peak_bytes, fit.budget_bytes), more),
        ]),
        body=(
            section("strategies", "Strategies", fitted(strategy_table(fit))),
            section(
                "lanes", "Lanes", picture,
                '<p class="note">The two lanes of each device, one above the other.</p>',
            ),
            _next(fit.problem),
            _curves(fit, told),
            _starts(fit),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
    )  # fmt: skip


def partitions_report_html(fit: PartitionFit) -> str:
    """The report of waves that take partitions in turn."""
    turns, (*others, _) = fit.turns, fit.ways
    picture, facts = _timeline(fit.problem, fit.plan(), turns)
    note = (
        '<p class="note">Shown without the time to switch partitions and without fetches that no '
        "slot hides; the step time includes both.</p>"
    )
    more = f"{fit.gain:.2f} times {max(others, key=lambda way: way.samples_per_s).name}"
    peak = of_capacity(turns.peak_bytes, fit.budget_bytes)
    return page_html(
        title=f"Waves in turn of {inert(fit.problem.graph.name)}",
        lead=partition_verdict(fit),
        stats=stats_html([
            *_head(fit.problem, turns, facts),
            ("Gain", f"{fit.gain:.2f} x", more),
            ("Peak", peak, "of a device"),
        ]),
        body=(
            section("strategies", "Strategies", fitted(strategy_table(fit))),
            section("devices", "Devices", picture, note),
            _next(fit.problem),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
    )  # fmt: skip


def _head(problem: Problem, told: WaveWay | RoundRobin, facts: Facts) -> list[Stat]:
    note = range_note(problem, told.step_s)
    return head_stats(step_data(problem.graph), told.step_s, note, facts.price_per_hour)


def _timeline(problem: Problem, plan: Plan, told: WaveWay | RoundRobin) -> tuple[str, Facts]:
    """The picture of every device over time, and the facts that it was drawn from."""
    inner, placed = unfolded(problem, plan)
    facts = facts_of(inner, placed, told.timeline)
    picture = draw_timeline(inner, told.timeline, facts, width=1080, styled=False)
    return f'<div class="scroll">{picture}</div>', facts


def _next(problem: Problem) -> str:
    if problem.cluster.num_devices > 1:
        return next_steps(
            ("hocket launch plan.json train.py", "your training script, once per device"),
        )
    return next_steps(
        (
            "train = hocket.prepare(model, optimizer, batch, compiled=True)",
            "torch.compile often gains more than two lanes: time it first",
        ),
        ("hocket run plan.json --steps 5", "a few steps of two waves: predicted and measured"),
        ('train = hocket.prepare(model, optimizer, batch, plan="plan.json")', "in your loop"),
    )


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
