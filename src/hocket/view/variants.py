"""What other clusters would bring: a line for each, beside the one that was asked about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_seconds
from hocket.planners.goal import dollars_per_million
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.shared import how_of, money_text
from hocket.view.table import Column, FittedTable

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.planners.whole.variants import ChangedCluster


def variants_table(comparison: Comparison, variants: Sequence[ChangedCluster]) -> RenderableType:
    """What each change would bring, the quickest first, and what helps most."""
    before = comparison.winner.step_s if comparison.winner is not None else None
    rows = [_cells(variant, before) for variant in variants]
    columns = (
        Column(title="change", is_name=True),
        Column(title="step", align="right"),
        Column(title="speed", align="right"),
        Column(title="$ per M samples", align="right", rank=1),
        Column(title="by", is_name=True, rank=2),
    )
    return Group(FittedTable(columns=columns, rows=rows), Text(_told(variants, before)))


def _cells(variant: ChangedCluster, before: float | None) -> list[Text]:
    winner, step_s = variant.comparison.winner, variant.step_s
    if winner is None or not step_s:
        return [Text(text, style="dim") for text in (variant.change, "–", "", "", "nothing fits")]
    speed = "" if before is None else f"{before / step_s:.2f}x"
    cells = (variant.change, format_seconds(step_s), speed,
             money_text(variant.comparison.problem, winner), how_of(winner))  # fmt: skip
    return [Text(inert(cell, LONGEST_SENTENCE)) for cell in cells]


def _told(variants: Sequence[ChangedCluster], before: float | None) -> str:
    best = next((v for v in variants if v.step_s is not None), None)
    if best is None or best.step_s is None:
        return "nothing of this fits, or the money buys nothing"
    change = inert(best.change)
    if before is None:
        return f"{change} helps most: it fits, {format_seconds(best.step_s)} per step"
    if best.step_s >= before:
        return "none of this makes a step shorter"
    return f"{change} helps most: {before / best.step_s:.2f} times as fast"


def variants_data(variants: Sequence[ChangedCluster]) -> list[dict[str, Any]]:
    """The same for ``--json``."""
    told: list[dict[str, Any]] = []
    for variant in variants:
        winner = variant.comparison.winner
        told.append({
            "change": variant.change,
            "cluster": variant.comparison.problem.cluster.name,
            "step_s": variant.step_s,
            "how": None if winner is None else how_of(winner),
            "dollars_per_million_samples": None
            if winner is None
            else dollars_per_million(variant.comparison.problem, winner),
        })  # fmt: skip
    return told
