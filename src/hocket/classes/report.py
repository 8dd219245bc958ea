"""Report of a split: tables that the terminal prints and one HTML file without scripts shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hocket import __version__
from hocket.base.atomic import write_atomically
from hocket.base.units import format_percent, format_seconds
from hocket.classes.artefact import REPORT
from hocket.classes.table import PartTable
from hocket.view.names import inert
from hocket.view.page import fitted, page_html, section, stats_html
from hocket.view.table import FittedTable, name, number, plain

_WIDTH = 100
"""Width of a terminal line in characters."""
_MOST_OVERLAP_CLASSES = 24
"""Maximum number of classes in the overlap table; larger tables are only in validation.json."""
_GUESSING = 1.5
"""Multiple of the accuracy of guessing below which a net is called untrained."""


def split_text(parts: PartTable, validation: Mapping[str, Any]) -> str:
    """Format sub-models, stages, lost workers and whether the split pays, for the terminal."""
    tables = [_parts(parts), _stages(parts, validation), _losses(validation)]
    return "\n".join([*(plain(each, _WIDTH) for each in tables), *_notes(parts, validation)])


def write_split_report(folder: Path, parts: PartTable, validation: Mapping[str, Any]) -> None:
    """Write the report into the folder of the split."""
    lost = 100 * (validation["test_whole"] - validation["test_parts"])
    stats = [
        ("Slowest sub-model", format_seconds(validation["slowest_s"]),
         f"whole {format_seconds(parts.whole.latency_s)}"),
        ("Answer", format_seconds(validation["predicted_s"]), f"on {validation['cores']} cores"),
        ("Test accuracy", _percent(validation["test_parts"]),
         f"whole {_percent(validation['test_whole'])}: {abs(lost):.2f} points "
         + ("lost" if lost >= 0 else "gained")),
    ]  # fmt: skip
    body = [
        section("stages", "Accuracy against latency", fitted(_stages(parts, validation))),
        section("parts", "Sub-models", fitted(_parts(parts))),
        section("losses", "When workers are lost", fitted(_losses(validation))),
    ]
    if 0 < len(validation["pruned_overlap"]) <= _MOST_OVERLAP_CLASSES:
        title = "Channels pruned for each class alone: intersection over union"
        body.append(section("overlap", title, fitted(_overlap(parts, validation))))
    page = page_html(
        title=f"{len(parts.class_names)} classes in {len(parts.parts)} sub-models",
        lead=f"{str(validation['verdict']['why']).capitalize()}.",
        stats=stats_html(stats),
        body=body,
        footer=f"Measured with hocket {__version__}; decisions were made on validation data, the "
        "test split was looked at once, at the end.",
    )
    write_atomically(folder / REPORT, page.encode())


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _stages(parts: PartTable, validation: Mapping[str, Any]) -> FittedTable:
    """Accuracy and slowest sub-model of every stage, then of the served answer, the slower one."""
    stages = [(each["name"], each["accuracy"], each["slowest_s"]) for each in validation["stages"]]
    answer = f"answer of {len(parts.parts)} workers on {validation['cores']} cores"
    stages.append((answer, max(each[1] for each in stages[1:]), validation["predicted_s"]))
    return FittedTable(
        columns=(name("stage"), number("accuracy (validation)"), number("slowest")),
        rows=[[label, _percent(share), format_seconds(took)] for label, share, took in stages],
    )


def _parts(parts: PartTable) -> FittedTable:
    whole = parts.whole
    rows = [
        [
            str(index),
            format_percent(part.macs / whole.macs),
            format_percent(part.parameters / whole.parameters),
            format_seconds(part.latency_s),
            ", ".join(inert(parts.class_names[each]) for each in part.classes),
        ]
        for index, part in enumerate(parts.parts)
    ]
    eager = f"all; in eager torch {format_seconds(whole.eager_s)}"
    rows.append(["whole", "100 %", "100 %", format_seconds(whole.latency_s), eager])
    columns = number("sub-model"), number("work"), number("size"), number("one input")
    return FittedTable(columns=(*columns, name("classes")), rows=rows)


def _losses(validation: Mapping[str, Any]) -> FittedTable:
    accuracy = {row["lost"]: row for row in validation["lost_workers"]}
    rows = []
    for row in validation["losses"]:
        known = accuracy.get(row["lost"])
        shares = [_percent(known["mean"]), _percent(known["worst"])] if known else ["", ""]
        rows.append([*(str(row[key]) for key in ("lost", "patterns", "losing", "worst")), *shares])
    titles = ("workers lost", "patterns", "that lose a group", "groups lost at worst",
              "mean accuracy", "worst accuracy")  # fmt: skip
    return FittedTable(columns=tuple(map(number, titles)), rows=rows)


def _overlap(parts: PartTable, validation: Mapping[str, Any]) -> FittedTable:
    names = [inert(each) for each in parts.class_names]
    rows = [
        [label, *(f"{each:.2f}" for each in row)]
        for label, row in zip(names, validation["pruned_overlap"], strict=True)
    ]
    return FittedTable(columns=(name("class"), *map(number, names)), rows=rows)


def _notes(parts: PartTable, validation: Mapping[str, Any]) -> Iterator[str]:
    """Sentences below the tables: test accuracy, overlap, predicted time, verdict, warnings."""
    whole, answer_s = parts.whole, validation["predicted_s"]
    yield (
        f"test inputs ({validation['num_test']}): whole {_percent(validation['test_whole'])}, "
        f"sub-models {_percent(validation['test_parts'])} "
        f"(standard error of the difference {100 * validation['test_error']:.2f})"
    )
    if validation["test_whole"] <= _GUESSING / len(parts.class_names):
        yield "the whole net hardly does better than guessing; --train STEPS trains it first"
    rows = validation["pruned_overlap"]
    pairs = sorted((rows[a][b], a, b) for a in range(len(rows)) for b in range(a))
    if pairs:
        least, most = (
            f"{share:.2f} ({inert(parts.class_names[a])}, {inert(parts.class_names[b])})"
            for share, a, b in (pairs[0], pairs[-1])
        )
        mean = sum(each for each, _, _ in pairs) / len(pairs)
        yield (
            "channels pruned for one class and for another, intersection over union: "
            f"mean {mean:.2f}, least {least}, most {most}"
        )
    yield (
        f"predicted on {validation['cores']} cores: {format_seconds(answer_s)} per answer, "
        f"{whole.latency_s / answer_s:.2g}x as fast as the whole net and "
        f"{whole.eager_s / answer_s:.2g}x as fast as that in eager torch; the slowest "
        f"sub-model takes {format_seconds(validation['slowest_s'])} of it"
    )
    yield str(validation["verdict"]["why"])
    target_s, asked_s = validation["target_s"], validation["asked_s"]
    if target_s is not None and validation["slowest_s"] > 1.1 * target_s:
        yield (
            f"the slowest takes more than {format_seconds(target_s)}: channels were given back for "
            "accuracy"
        )
    if asked_s is not None and answer_s > 1.1 * asked_s:
        yield (
            f"an answer takes longer than the {format_seconds(asked_s)} that were asked for: allow "
            "fewer --parts, or a core for each worker and one more"
        )
