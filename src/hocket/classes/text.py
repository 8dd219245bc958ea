"""Format a split as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hocket.base.units import format_seconds
from hocket.classes.table import PartTable
from hocket.view.names import inert

_MOST_NAMES = 6
_GUESSING = 1.5
"""A net is called untrained below this multiple of the accuracy of guessing."""


def split_text(table: PartTable, validation: Mapping[str, Any]) -> str:
    """Format parts, stages, lost workers and whether the split pays."""
    return "\n".join(
        [
            *_parts(table),
            "",
            *_stages(validation),
            *_untrained(table, validation),
            "",
            *_losses(validation),
            *_overlap(table, validation),
            "",
            *_end(table, validation),
        ]
    )


def _untrained(table: PartTable, validation: Mapping[str, Any]) -> list[str]:
    """Hint if the net is hardly better than guessing, so that parts learn nothing from it."""
    if validation["test_whole"] > _GUESSING / len(table.class_names):
        return []
    return ["  the whole net hardly does better than guessing; --train STEPS trains it first"]


def _parts(table: PartTable) -> list[str]:
    whole = table.whole
    lines = [f"  {'sub-model':<11}{'work':>8}{'size':>8}{'one input':>12}   classes"]
    for index, part in enumerate(table.parts):
        names = [inert(table.class_names[each]) for each in part.classes]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        lines.append(
            f"  {index:<11}{part.macs / whole.macs:>8.3f}{part.parameters / whole.parameters:>8.3f}"
            f"{format_seconds(part.latency_s):>12}   {', '.join(names[:_MOST_NAMES])}{more}"
        )
    lines.append(
        f"  {'whole':<11}{1.0:>8.3f}{1.0:>8.3f}{format_seconds(whole.latency_s):>12}   "
        f"(eager torch {format_seconds(whole.eager_s)})"
    )
    return lines


def _stages(validation: Mapping[str, Any]) -> list[str]:
    lines = [f"  {'stage':<34}{'accuracy':>10}{'slowest sub-model':>20}"]
    for stage in validation["stages"]:
        lines.append(
            f"  {stage['name']:<34}{100 * stage['accuracy']:>8.2f} %"
            f"{format_seconds(stage['slowest_s']):>20}"
        )
    lines.append(
        f"  test inputs ({validation['num_test']}): whole {100 * validation['test_whole']:.2f} %, "
        f"sub-models {100 * validation['test_parts']:.2f} % "
        f"(standard error of the difference {100 * validation['test_error']:.2f})"
    )
    return lines


def _losses(validation: Mapping[str, Any]) -> list[str]:
    lines = ["  lost workers   patterns   that lose a group   worst: groups lost"]
    for row in validation["losses"]:
        lines.append(f"  {row['lost']:<15}{row['patterns']:<11}{row['losing']:<20}{row['worst']}")
    lost = [
        f"{row['lost']} lost: mean {100 * row['mean']:.2f} %, worst {100 * row['worst']:.2f} %"
        for row in validation["lost_workers"]
    ]
    return [*lines, "  test accuracy with workers lost: " + "; ".join(lost)]


def _overlap(table: PartTable, validation: Mapping[str, Any]) -> list[str]:
    rows = validation.get("pruned_overlap", ())
    pairs = [(rows[a][b], a, b) for a in range(len(rows)) for b in range(a)]
    if not pairs:
        return []

    def pair(found: tuple[float, int, int]) -> str:
        names = [inert(table.class_names[each]) for each in found[1:]]
        return f"{found[0]:.2f} ({names[0]}, {names[1]})"

    mean = sum(each for each, _, _ in pairs) / len(pairs)
    return [
        "  channels pruned for one class and for another, intersection over union: "
        f"mean {mean:.2f}, least {pair(min(pairs))}, most {pair(max(pairs))}"
    ]


def _end(table: PartTable, validation: Mapping[str, Any]) -> list[str]:
    answer_s = validation["predicted_s"]
    lines = [
        f"predicted on {validation['cores']} cores: {format_seconds(answer_s)} per answer, "
        f"{table.whole.latency_s / answer_s:.2g}x as fast as the whole net and "
        f"{table.whole.eager_s / answer_s:.2g}x as fast as that in eager torch; the slowest "
        f"sub-model takes {format_seconds(validation['slowest_s'])} of it",
        str(validation["verdict"]["why"]),
    ]
    if (
        validation["target_s"] is not None
        and validation["slowest_s"] > 1.1 * validation["target_s"]
    ):
        lines.append(
            f"the slowest takes more than {format_seconds(validation['target_s'])}: channels "
            "were given back for accuracy"
        )
    asked_s = validation["asked_s"]
    if asked_s is not None and validation["predicted_s"] > 1.1 * asked_s:
        lines.append(
            f"an answer takes longer than the {format_seconds(asked_s)} that were asked for: allow "
            "fewer --parts, or a core for each worker and one more"
        )
    return lines
