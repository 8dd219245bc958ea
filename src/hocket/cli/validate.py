"""``hocket validate``: predict published or own measured runs again and compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.output import answer, console, fail

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hocket.cost.validation import TableResult, TableScores

_PARTS = ("zero-shot", "calibrated")


@declare("validate")
def command(
    *,
    tables: Annotated[tuple[str, ...], argument("[TABLE]...", nargs=-1)],
    data_dir: Annotated[
        Path | None,
        option(
            "Folder with tables of measured runs (CSV), read besides the tables inside hocket.",
            "--data",
        ),
    ] = None,
    mine: Annotated[
        bool, "Compare your own runs: the arguments are files of hocket run --json."
    ] = False,
    as_json: bool,
) -> None:
    """Compare predictions of parallel training with published TABLEs. Exit 6 outside tolerance.

    Without a name all tables are compared. Zero-shot uses nothing that was measured; calibrated
    uses at most ten runs per site, which are not scored. With --mine the arguments are files of
    your own runs: predicted and measured steps of this machine.
    """
    if mine:
        _compare_runs(tables, as_json)
        return
    from hocket.base.errors import CheckError, unknown_name
    from hocket.cost.validation import load_tables, validate

    known = load_tables(data_dir)
    for name in tables:
        if name not in known:
            raise unknown_name("table", name, known)
    results = validate(known, tables)
    violations = [text for result in results for text in result.violations]
    listed = {"tables": [_as_json(result) for result in results]}
    if not as_json:
        screen = console()
        for shown in _tables(results):
            screen.print(shown)
    if violations:
        error = CheckError("; ".join(violations), hint="see the columns that name what is allowed")
        raise SystemExit(fail(error, as_json=as_json, extra=listed))
    answer(as_json, {"ok": True, **listed}, "all within tolerance")


def _compare_runs(files: tuple[str, ...], as_json: bool) -> None:
    import numpy as np

    from hocket.cost.measured_steps import read_runs
    from hocket.cost.validation import error_score
    from hocket.view.inputs import measured_run_lines

    if not files:
        raise click.UsageError("--mine needs files of runs: hocket run PLAN --json > run.json")
    runs = read_runs(files)
    score = error_score(np.array([run.predicted_s / run.measured_s - 1 for run in runs]))
    assert score is not None, "read_runs returns a run per file"
    summary = (
        f"{score.rows} run{'s' * (score.rows > 1)}: mean error {score.mean:.1%}, largest "
        f"{score.max:.1%} — next: hocket calibrate --from RUN…"
    )
    found = {"ok": True, "runs": [asdict(run) for run in runs], "step": asdict(score)}
    answer(as_json, found, *measured_run_lines(runs), summary)


def _as_json(result: TableResult) -> dict[str, Any]:
    return {**asdict(result), "ok": not result.violations, "violations": list(result.violations)}


def _percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{100 * value:{sign}.1f}"


def _tables(results: list[TableResult]) -> Iterator[RenderableType]:
    """Yield tables of errors in step time, choice among alternatives, and memory; skip empty
    ones."""
    from hocket.view.table import Column, FittedTable, number

    headings = {
        "step time: errors in %": ("runs", "mean", "limit", "median", "p95", "max", "bias"),
        "choice among measured alternatives: % longer than the best": (
            "groups", "mean", "limit", "worst", "limit", "Kendall tau",
        ),
        "memory of the fullest device: errors in %": (
            "runs", "mean", "limit", "bias", "OOM seen", "false alarms",
        ),
    }  # fmt: skip
    for (title, columns), cells_of in zip(headings.items(), (_step, _choice, _memory), strict=True):
        rows = [
            [result.table if what == _PARTS[0] else "", what, *cells]
            for result in results
            for what, part in zip(_PARTS, (result.zero_shot, result.calibrated), strict=True)
            if (cells := cells_of(result, part, what == "calibrated"))
        ]
        if rows:
            yield title
            heads = (Column(title="table"), Column(title=""), *map(number, columns))
            yield FittedTable(columns=heads, rows=rows)


def _step(result: TableResult, part: TableScores, is_calibrated: bool) -> list[str]:
    score, allowed = part.step, result.tolerance
    if score is None:
        return []
    limit = allowed.calibrated_mean if is_calibrated else allowed.zero_shot_mean
    figures = (score.mean, limit, score.median, score.p95, score.max)
    return [str(score.rows), *map(_percent, figures), _percent(score.bias, "+")]


def _choice(result: TableResult, part: TableScores, is_calibrated: bool) -> list[str]:
    score, allowed = part.ranking, result.tolerance
    if score is None:
        return []
    limits = (allowed.mean_regret_of(score), allowed.max_regret) if is_calibrated else (None, None)
    figures = (score.mean_regret, limits[0], score.max_regret, limits[1])
    return [str(score.groups), *map(_percent, figures), f"{score.kendall_tau:.2f}"]


def _memory(result: TableResult, part: TableScores, is_calibrated: bool) -> list[str]:
    score, outcome = part.memory, part.out_of_memory
    if score is None and outcome is None:
        return []
    cells = ["–"] * 6
    if score is not None:
        limit = result.tolerance.memory_mean if is_calibrated else None
        cells[:4] = [str(score.rows), _percent(score.mean), _percent(limit),
                     _percent(score.bias, "+")]  # fmt: skip
    if outcome is not None:
        if outcome.ran_out:
            cells[4] = f"{outcome.ran_out - outcome.missed} of {outcome.ran_out}"
        cells[5] = f"{outcome.false_alarms} of {outcome.ran}"
    return cells
