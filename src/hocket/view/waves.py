"""What tick-tock gains: the table of ways, the verdict and its reason, plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_bytes, format_percent, format_seconds
from hocket.planners.waves.round_robin import SWITCHING, PartitionFit, PartitionWay
from hocket.planners.waves.search import WaveFit
from hocket.planners.waves.way import WaveWay
from hocket.planners.waves.why import reasons
from hocket.view.table import Column, FittedTable, name, number
from hocket.view.wording import sentence

if TYPE_CHECKING:
    from hocket.api.waves import WaveOutlook


COMPILED = (
    "Kernels are PyTorch's own. torch.compile makes fewer and larger ones, which leave less to a "
    "second lane: where it was measured, the whole batch compiled and captured was quicker than "
    "two lanes. Try that first: hocket.prepare(model, optimizer, batch, compiled=True)."
)


def shown_ways(fit: WaveFit) -> list[tuple[str, WaveWay]]:
    """The ways without lanes, both waves together, the chosen start (or the leanest), and a lean
    one."""
    told = fit.chosen or fit.leanest
    ways = [("one batch", fit.plain), ("one after the other", fit.accumulated)]
    if told is not fit.aligned:
        ways.append(("both together", fit.aligned))
    ways.append(("tick-tock", told))
    if fit.lean is not None and fit.lean is not told:
        ways.append(("tick-tock, lean", fit.lean))
    return ways


def data(outlook: WaveOutlook) -> dict[str, Any]:
    """The result as plain data."""
    fit = outlook.fit
    other = outlook.other
    return {
        "graph": {"name": fit.problem.graph.name, "hash": fit.problem.graph.content_hash},
        "cluster": fit.problem.cluster.name,
        "launches": outlook.launches,
        "feasible": fit.chosen is not None,
        "pays": fit.pays,
        "gain": fit.gain,
        "why": reasons(fit),
        "budget_bytes": fit.budget_bytes,
        "one_wave_bytes": fit.one_wave_bytes,
        "ways": [
            {"name": name, **numbers(way, fit)} for name, way in shown_ways(fit)
        ],
        "starts": [
            {"lead": way.lanes.lead, "step_s": way.step_s, "peak_bytes": way.peak_bytes}
            for way in fit.tried
            if way.lanes is not None
        ],
        "other_launches": None if other is None else {"gain": other.gain, "pays": other.pays},
    }  # fmt: skip


def numbers(way: WaveWay, fit: WaveFit) -> dict[str, Any]:
    """Step, rate and peak of a way."""
    return {
        "step_s": way.step_s,
        "samples_per_s": way.samples_per_s,
        "peak_bytes": way.peak_bytes,
        "fits": way.peak_bytes <= fit.budget_bytes,
        "lead": None if way.lanes is None else way.lanes.lead,
    }


def waves_table(outlook: WaveOutlook) -> RenderableType:
    """A line per strategy, then the verdict."""
    return Group(strategy_table(outlook.fit), Text(), *map(Text, sentences(outlook)))


def strategy_table(fit: WaveFit | PartitionFit) -> FittedTable:
    """A line per strategy: step, samples per second and peak, the best one marked."""
    best: WaveWay | PartitionWay | None
    if isinstance(fit, WaveFit):
        best = fit.chosen if fit.pays else fit.best_alone
        found: Sequence[tuple[str, WaveWay | PartitionWay]] = shown_ways(fit)
        one_wave = [f"{each.peak_bytes / fit.one_wave_bytes:.2f} x" for _, each in found]
    else:
        best, found = fit.best, [(each.name, each) for each in fit.ways]
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


def sentences(outlook: WaveOutlook) -> list[str]:
    """Whether it pays, why, and what the other way to issue ops would change."""
    fit, other = outlook.fit, outlook.other
    lines = [verdict(fit), *map(sentence, reasons(fit))]
    if other is not None and other.pays != fit.pays:
        how = (
            "one captured graph were replayed" if outlook.launches == "eager" else "ops were eager"
        )
        gain = "" if other.gain is None else f" ({other.gain:.2f} x)"
        told = "it would pay" if other.pays else "it would not"
        lines.append(f"If {how}, {told}{gain}.")
    if outlook.launches == "replayed":
        lines.append(
            "Times are of a step that is replayed as one captured graph, as hocket.prepare does on "
            "one GPU; those of hocket plan have the host's call of every op in them."
        )
        if fit.pays and fit.plain.peak_bytes <= fit.budget_bytes:
            lines.append(COMPILED)
    return lines


def verdict(fit: WaveFit) -> str:
    """One sentence."""
    if fit.chosen is None:
        return (
            f"Two waves do not fit into {format_bytes(fit.budget_bytes)}: the leanest start needs "
            f"{format_bytes(fit.leanest.peak_bytes)}."
        )
    if fit.gain is None:
        return "Two waves fit where nothing else does."
    if fit.is_equal:
        return "Tick-tock makes no difference here: as many samples per second as without lanes."
    if fit.pays:
        told = f"Tick-tock pays: {format_percent(fit.gain - 1)} more samples per second"
        return f"{told}, less than predictions are off: time both." if fit.is_close else f"{told}."
    return f"Tick-tock does not pay here: {fit.gain:.2f} times the samples per second."


def behind_words(fit: WaveFit) -> str:
    """What a plan that is written is behind, where it is not that of the best way; else nothing."""
    if fit.pays or fit.best_alone is None or fit.gain is None:
        return ""
    better = next(name for name, way in shown_ways(fit) if way is fit.best_alone)
    how = "as quick as" if fit.is_equal else f"slower ({fit.gain:.2f} x) than"
    return f"the plan of two waves, {how} {better}"


def turns_behind_words(fit: PartitionFit) -> str:
    """The same of waves that take partitions in turn."""
    own = fit.ways[-1]
    if own.peak_bytes > fit.budget_bytes:
        return "the plan of waves in turn, which do not fit"
    if fit.best is None or fit.best is own:
        return ""
    return f"the plan of waves in turn, slower ({fit.gain:.2f} x) than {fit.best.name}"


def partition_data(fit: PartitionFit) -> dict[str, Any]:
    """A model in partitions as plain data."""
    ways = [
        {"name": way.name, "step_s": way.step_s, "samples_per_s": way.samples_per_s,
         "peak_bytes": way.peak_bytes}
        for way in fit.ways
    ]  # fmt: skip
    return {
        "graph": {"name": fit.problem.graph.name, "hash": fit.problem.graph.content_hash},
        "cluster": fit.problem.cluster.name,
        "pays": fit.gain > 1,
        "gain": fit.gain,
        "best": None if fit.best is None else fit.best.name,
        "budget_bytes": fit.budget_bytes,
        "ways": ways,
        "cuts": list(fit.turns.shares.replicas[0].cuts),
        "stall_s": fit.turns.stall_s,
    }


def partition_table(fit: PartitionFit) -> RenderableType:
    """A line per strategy, then the verdict."""
    return Group(strategy_table(fit), Text(), Text(partition_verdict(fit)))


def partition_verdict(fit: PartitionFit) -> str:
    """One sentence."""
    return (
        f"Waves that take partitions in turn give {fit.gain:.2f} times the samples per second of "
        f"the better of the others; switching takes {format_percent(SWITCHING)}, fetches that no "
        f"slot hides {format_seconds(fit.turns.stall_s)} of a step."
    )
