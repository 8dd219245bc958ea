"""Gain of interleaved waves (tick-tock, Wavelet): table of candidates, verdict, JSON.

Covers two waves on one device, and round-robin waves over partitions of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.planners.waves.round_robin import SWITCHING, PartitionCandidate, PartitionFit
from hocket.planners.waves.wave_candidate import WaveCandidate
from hocket.planners.waves.wave_search import WaveFit, reasons
from hocket.view.table import Column, FittedTable, name, number
from hocket.view.wording import picked, sentence

if TYPE_CHECKING:
    from hocket.api.waves import WaveForecast


COMPILED = (
    "Kernels are PyTorch's own. torch.compile makes fewer and larger ones, which leave less to a "
    "second stream: where it was measured, the whole batch compiled and captured was faster than "
    "two streams. Try that first: hocket.prepare(model, optimizer, batch, compiled=True)."
)


def shown_candidates(fit: WaveFit) -> list[tuple[str, WaveCandidate]]:
    """Named candidates: without waves, waves without delay, and the chosen or smallest start."""
    found = [("one batch", fit.plain), ("one after the other", fit.accumulated)]
    if fit.shown is not fit.aligned:
        found.append(("both together", fit.aligned))
    return [*found, ("tick-tock", fit.shown)]


def data(forecast: WaveForecast) -> dict[str, Any]:
    """The result as data for JSON."""
    fit = forecast.fit
    other = forecast.other
    return {
        "graph": {"name": fit.problem.graph.name, "hash": fit.problem.graph.content_hash},
        "cluster": fit.problem.cluster.name,
        "launches": forecast.launches,
        "feasible": fit.chosen is not None,
        "why": reasons(fit),
        **picked(fit, "pays", "gain", "budget_bytes", "one_wave_bytes"),
        "candidates": [
            {"name": name, **numbers(each, fit)} for name, each in shown_candidates(fit)
        ],
        "starts": [
            {"lead": each.waves.lead, **picked(each, "step_s", "peak_bytes")}
            for each in fit.tried
            if each.waves is not None
        ],
        "other_launches": None if other is None else picked(other, "gain", "pays"),
    }  # fmt: skip


def numbers(candidate: WaveCandidate, fit: WaveFit) -> dict[str, Any]:
    """Step, rate and peak of a candidate."""
    return {
        **picked(candidate, "step_s", "samples_per_s", "peak_bytes"),
        "fits": candidate.peak_bytes <= fit.budget_bytes,
        "lead": None if candidate.waves is None else candidate.waves.lead,
    }


def waves_table(forecast: WaveForecast) -> RenderableType:
    """Table of strategies and the verdict."""
    return Group(strategy_table(forecast.fit), Text(), *map(Text, sentences(forecast)))


def strategy_table(fit: WaveFit | PartitionFit) -> FittedTable:
    """Table of strategies: step, samples per second and peak; the best one is marked."""
    best: WaveCandidate | PartitionCandidate | None
    if isinstance(fit, WaveFit):
        best = fit.chosen if fit.pays else fit.best_alone
        found: Sequence[tuple[str, WaveCandidate | PartitionCandidate]] = shown_candidates(fit)
        one_wave = [f"{each.peak_bytes / fit.one_wave_bytes:.2f} x" for _, each in found]
    else:
        best, found = fit.best, [(each.name, each) for each in fit.candidates]
        one_wave = [""] * len(found)
    rows, styles = [], []
    for (label, each), of_one in zip(found, one_wave, strict=True):
        fits = each.peak_bytes <= fit.budget_bytes
        rows.append([
            "✔" if each is best else "",
            label,
            format_seconds(each.step_s),
            f"{each.samples_per_s:,.1f}",
            f"{format_bytes(each.peak_bytes)} {' ' if fits else '✗'}",
            of_one,
        ])  # fmt: skip
        styles.append("bold" if each is best else "" if fits else "dim")
    columns = (
        Column(title=""), name("strategy"), number("step"), number("samples/s", 1),
        number("peak memory  "), number("of one wave", 2),
    )  # fmt: skip
    return FittedTable(columns=columns, rows=rows, styles=styles).without_empty()


def sentences(forecast: WaveForecast) -> list[str]:
    """The verdict, its reasons, and the effect of the other launch mode."""
    fit, other = forecast.fit, forecast.other
    lines = [verdict(fit), *map(sentence, reasons(fit))]
    if other is not None and other.pays != fit.pays:
        how = (
            "one captured graph were replayed" if forecast.launches == "eager" else "ops were eager"
        )
        gain = "" if other.gain is None else f" ({other.gain:.2f} x)"
        effect = "it would pay" if other.pays else "it would not"
        lines.append(f"If {how}, {effect}{gain}.")
    if forecast.launches == "replayed":
        lines.append(
            "Times are of a step that is replayed as one captured graph, as hocket.prepare does on "
            "one GPU; those of hocket plan include the host's launch of every op."
        )
        if fit.pays and fit.plain.peak_bytes <= fit.budget_bytes:
            lines.append(COMPILED)
    return lines


def verdict(fit: WaveFit) -> str:
    """One sentence: waves pay, make no difference, do not pay, or do not fit."""
    if fit.chosen is None:
        return (
            f"Two waves do not fit into {format_bytes(fit.budget_bytes)}: they need "
            f"{format_bytes(fit.smallest.peak_bytes)}."
        )
    if fit.gain is None:
        return "Two waves fit where nothing else does."
    if fit.is_equal:
        return "Tick-tock makes no difference here: as many samples per second as without waves."
    if fit.pays:
        gain = f"Tick-tock pays: {format_percent(fit.gain - 1)} more samples per second"
        close = ", within the error of predictions: time both" if fit.is_close else ""
        return f"{gain}{close}."
    return f"Tick-tock does not pay here: {fit.gain:.2f} times the samples per second."


def slower_note(fit: WaveFit) -> str:
    """Note on a strategy that is faster than the written plan; empty if there is none."""
    if fit.pays or fit.best_alone is None or fit.gain is None:
        return ""
    better = next(name for name, each in shown_candidates(fit) if each is fit.best_alone)
    how = "as fast as" if fit.is_equal else f"slower ({fit.gain:.2f} x) than"
    return f"the plan of two waves, {how} {better}"


def partition_slower_note(fit: PartitionFit) -> str:
    """Same as `slower_note`, for round-robin waves over partitions."""
    own = fit.candidates[-1]
    if own.peak_bytes > fit.budget_bytes:
        return "the plan of waves in turn, which do not fit"
    if fit.best is None or fit.best is own:
        return ""
    return f"the plan of waves in turn, slower ({fit.gain:.2f} x) than {fit.best.name}"


def partition_data(fit: PartitionFit) -> dict[str, Any]:
    """Waves over partitions of a model as data for JSON."""
    candidates = [
        picked(each, "name", "step_s", "samples_per_s", "peak_bytes") for each in fit.candidates
    ]
    return {
        "graph": {"name": fit.problem.graph.name, "hash": fit.problem.graph.content_hash},
        "cluster": fit.problem.cluster.name,
        "pays": fit.gain > 1,
        "gain": fit.gain,
        "best": None if fit.best is None else fit.best.name,
        "budget_bytes": fit.budget_bytes,
        "candidates": candidates,
        "cuts": list(fit.turns.parallel.replicas[0].cuts),
        "stall_s": fit.turns.stall_s,
    }


def partition_table(fit: PartitionFit) -> RenderableType:
    """Table of strategies and the verdict."""
    return Group(strategy_table(fit), Text(), Text(partition_verdict(fit)))


def partition_verdict(fit: PartitionFit) -> str:
    """One sentence about the gain of waves over partitions."""
    return (
        f"Waves that take partitions in turn give {fit.gain:.2f} times the samples per second of "
        f"the better of the others; switching takes {format_percent(SWITCHING)}, fetches that no "
        f"slot hides {format_seconds(fit.turns.stall_s)} of a step."
    )
