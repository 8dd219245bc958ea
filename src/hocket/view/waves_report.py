"""The report of two waves, or of waves that take partitions: one HTML file without scripts.

The candidates, both streams over time, the memory of each and of both, and the starts that were
tried.
"""

from __future__ import annotations

from hocket import __version__
from hocket.base.units import format_bytes, format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.waves.round_robin import PartitionFit, RoundRobin
from hocket.planners.waves.wave_candidate import WaveCandidate
from hocket.planners.waves.wave_search import WaveFit, reasons
from hocket.simulate.parallel.wave_streams import StreamMemory
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

WAVE_NAMES = ("tick", "tock")


def waves_report_html(fit: WaveFit) -> str:
    """The report as one HTML text."""
    shown = fit.shown
    gain = "nothing else fits" if fit.gain is None else f"{fit.gain:.2f} times without waves"
    more = f"{shown.peak_bytes / fit.one_wave_bytes:.2f} times one wave"
    picture, facts = _timeline(fit.problem, fit.plan_of(shown), shown)
    return page_html(
        title=f"Two waves of {inert(fit.problem.graph.name)}",
        lead=" ".join([verdict(fit), *(sentence(why) for why in reasons(fit))]),
        stats=stats_html([
            *_head(fit.problem, shown, facts),
            ("Gain", "–" if fit.gain is None else f"{fit.gain:.2f} x", gain),
            ("Peak", of_capacity(shown.peak_bytes, fit.budget_bytes), more),
        ]),
        body=(
            section("strategies", "Strategies", fitted(strategy_table(fit))),
            section(
                "streams", "Streams", picture,
                '<p class="note">The two streams of each device, one above the other.</p>',
            ),
            _next(fit.problem),
            _curves(shown),
            _starts(fit),
        ),
        footer=f"Predicted by simulation with hocket {__version__}.",
    )  # fmt: skip


def partitions_report_html(fit: PartitionFit) -> str:
    """The report of waves that take partitions in turn."""
    turns, (*others, _) = fit.turns, fit.candidates
    picture, facts = _timeline(fit.problem, fit.plan(), turns)
    note = (
        '<p class="note">Shown without the time to switch partitions and without fetches that no '
        "slot hides; the step time includes both.</p>"
    )
    more = f"{fit.gain:.2f} times {max(others, key=lambda each: each.samples_per_s).name}"
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


def _head(problem: Problem, shown: WaveCandidate | RoundRobin, facts: Facts) -> list[Stat]:
    note = range_note(problem, shown.step_s)
    return head_stats(step_data(problem.graph), shown.step_s, note, facts.price_per_hour)


def _timeline(problem: Problem, plan: Plan, shown: WaveCandidate | RoundRobin) -> tuple[str, Facts]:
    """The picture of every device over time, and the facts that it was drawn from."""
    inner, placed = unfolded(problem, plan)
    facts = facts_of(inner, placed, shown.timeline)
    picture = draw_timeline(inner, shown.timeline, facts, width=1080, styled=False)
    return f'<div class="scroll">{picture}</div>', facts


def _next(problem: Problem) -> str:
    if problem.cluster.num_devices > 1:
        return next_steps(
            ("hocket launch plan.json train.py", "your training script, once per device"),
        )
    return next_steps(
        (
            "train = hocket.prepare(model, optimizer, batch, compiled=True)",
            "torch.compile often gains more than two streams: time it first",
        ),
        ("hocket run plan.json --steps 5", "a few steps of two waves: predicted and measured"),
        ('train = hocket.prepare(model, optimizer, batch, plan="plan.json")', "in your loop"),
    )


def _curves(shown: WaveCandidate) -> str:
    memory = shown.memory
    streams: list[tuple[str, int | None]] = [*zip(WAVE_NAMES, range(2), strict=True)]
    streams.append(("together", None))
    cards = "".join(_curve(name, memory, stream, shown) for name, stream in streams)
    note = (
        '<p class="note">Memory that each stream allocates on the first device, and both, without '
        "parameters, optimizer state and the batch. The dashed line is the peak of both.</p>"
    )
    return section("memory", "Memory", f'<div class="devices">{cards}</div>', note)


def _curve(name: str, memory: StreamMemory, stream: int | None, shown: WaveCandidate) -> str:
    time_s, held = memory.curve(stream)
    peak, most = memory.peak_bytes(stream), memory.peak_bytes()
    curve = memory_paths(0, 400, 8, 92, time_s, held, shown.timeline.makespan_s, most, peak)
    return memory_card(name, format_bytes(peak), curve)


def _starts(fit: WaveFit) -> str:
    heads = [
        ColumnHead("Second wave begins after", "number"),
        ColumnHead("Step", "number"),
        ColumnHead("Peak", "number"),
        ColumnHead("Of one wave", "number"),
    ]
    lines: list[list[Cell]] = [
        [f"{each.waves.lead} ops", format_seconds(each.step_s), format_bytes(each.peak_bytes),
         f"{each.peak_bytes / fit.one_wave_bytes:.2f} x"]
        for each in fit.tried
        if each.waves is not None
    ]  # fmt: skip
    return section("starts", "Starts that were tried", table(heads, lines))
