"""The best plan for changed clusters (``--what-if``, ``--budget``): table, verdict and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from hocket.base.units import format_percent, format_seconds
from hocket.planners.goal import TIED, Goal, dollars_per_million, goal_values, is_priced
from hocket.view.comparison import how_of, money_text
from hocket.view.names import LONGEST_SENTENCE, inert
from hocket.view.table import FittedTable, name, number

if TYPE_CHECKING:
    from hocket.planners.candidates import Comparison
    from hocket.planners.parallel.scenarios import ChangedCluster

_HELP: dict[Goal, str] = {
    "time": "makes a step shorter",
    "cost": "makes a step cheaper",
    "memory": "leaves more memory free",
}


def variants_table(
    comparison: Comparison, variants: Sequence[ChangedCluster], goal: Goal
) -> RenderableType:
    """Table of the effect of each change, and the change that helps most."""
    steps = [v.step_s for v in variants if v.step_s is not None]
    rows = [_cells(variant, comparison, min(steps, default=None)) for variant in variants]
    columns = (
        name("change"), number("step"), number("speed"), number("$ per M samples", 1),
        number("fullest", 3), name("by", 2),
    )  # fmt: skip
    found = Text(_found(comparison, variants, goal))
    return Group(FittedTable(columns=columns, rows=rows), found)


def _cells(variant: ChangedCluster, comparison: Comparison, least_s: float | None) -> list[Text]:
    winner, step_s, problem = variant.comparison.winner, variant.step_s, variant.comparison.problem
    if winner is None or not step_s:
        empty = (variant.change, "–", "", "", "", "nothing fits")
        return [Text(text, style="dim") for text in empty]
    before_s = comparison.winner.step_s if comparison.winner is not None else None
    speed = "" if before_s is None else f"{before_s / step_s:.2f}x"
    (share,) = goal_values([(problem, winner)], "memory")
    cells = (variant.change, format_seconds(step_s, least_s), speed, money_text(problem, winner),
             format_percent(share), how_of(winner))  # fmt: skip
    return [Text(inert(cell, LONGEST_SENTENCE)) for cell in cells]


def _found(comparison: Comparison, variants: Sequence[ChangedCluster], goal: Goal) -> str:
    """Sentence about the change that helps the goal most, and by how much."""
    best = next((v for v in variants if v.comparison.winner is not None), None)
    if best is None or best.comparison.winner is None:
        return "nothing of this fits, or the money buys nothing"
    change = inert(best.change)
    if comparison.winner is None:
        return f"{change} helps most: it fits, {format_seconds(best.step_s or 0.0)} per step"
    both = [(best.comparison.problem, best.comparison.winner),
            (comparison.problem, comparison.winner)]  # fmt: skip
    after, before = goal_values(both, goal)
    # A smaller value is better for every goal; differences within the tie margin are no gain.
    if after >= before * (1 - TIED):
        return f"none of this {_HELP[goal]}"
    if goal == "time":
        return f"{change} helps most: {before / after:.2f} times as fast"
    if goal == "memory":
        found = f"its fullest device is {format_percent(after)} full"
        return f"{change} helps most: {found}, not {format_percent(before)}"
    thing = "money" if is_priced(both) else "device time"
    return f"{change} helps most: steps take {format_percent(1 - after / before)} less {thing}"


def variants_data(variants: Sequence[ChangedCluster]) -> list[dict[str, Any]]:
    """The changed clusters and their best plans as data for ``--json``."""
    found: list[dict[str, Any]] = []
    for variant in variants:
        winner = variant.comparison.winner
        found.append({
            "change": variant.change,
            "cluster": variant.comparison.problem.cluster.name,
            "step_s": variant.step_s,
            "how": None if winner is None else how_of(winner),
            "dollars_per_million_samples": None
            if winner is None
            else dollars_per_million(variant.comparison.problem, winner),
        })  # fmt: skip
    return found
