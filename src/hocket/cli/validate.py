"""``hocket validate``: predict published measurements again and compare."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.output import console, emit, fail, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from hocket.base.errors import InputFileError
    from hocket.cost.validation import TableResult, TableScores

_PARTS = ("zero-shot", "calibrated")


@click.command("validate")
@click.argument("tables", nargs=-1, metavar="[TABLE]...")
@click.option(
    "--data",
    "data_dir",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder with public files of measurements, read besides the tables inside hocket.",
)
@click.option(
    "--mine",
    is_flag=True,
    help="Compare your own runs: arguments are files of hocket run --json.",
)
@json_option
def command(tables: tuple[str, ...], data_dir: Path | None, mine: bool, as_json: bool) -> None:
    """Compare predictions of parallel training with published TABLEs. Exit 6 outside tolerance.

    Without a name all tables are compared. Zero-shot uses nothing that was measured; calibrated
    uses at most ten runs per site, which are not scored. With --mine the arguments are files of
    your own runs: predicted and measured steps of this machine.
    """
    if mine:
        _compare_runs(tables, as_json)
        return
    from hocket.base.errors import CheckError, unknown_name
    from hocket.cost.published_files import absent_tables
    from hocket.cost.published_tables import load_tables
    from hocket.cost.validation import validate

    known = load_tables(data_dir)
    absent = absent_tables(known)
    for name in tables:
        if name in absent:
            raise _absent(name, absent[name])
        if name not in known:
            raise unknown_name("table", name, [*known, *absent])
    results = validate(known, tables)
    violations = [text for result in results for text in result.violations]
    listed = {"tables": [_as_json(result) for result in results], "not_read": absent}
    if not as_json:
        screen = console()
        for shown in (_steps(results), _choices(results), _memory(results)):
            if shown.row_count:
                screen.print(shown)
        if absent and not tables:
            click.echo(f"not compared, their files were not given (--data): {', '.join(absent)}")
    if violations:
        error = CheckError("; ".join(violations), hint="see the columns that name what is allowed")
        raise SystemExit(fail(error, as_json=as_json, extra=listed))
    if as_json:
        emit({"ok": True, **listed})
    else:
        click.echo("all within tolerance")


def _compare_runs(files: tuple[str, ...], as_json: bool) -> None:
    import numpy as np

    from hocket.cost.measured_steps import read_runs
    from hocket.cost.validation import error_score
    from hocket.view.inputs import measured_run_lines

    if not files:
        raise click.UsageError("--mine needs files of runs: hocket run PLAN --json > run.json")
    runs = read_runs(files)
    errors = [run.predicted_s / run.measured_s - 1 for run in runs]
    score = error_score(np.array(errors))
    assert score is not None
    if as_json:
        emit({"ok": True, "runs": [asdict(run) for run in runs], "step": asdict(score)})
        return
    for line in measured_run_lines(runs):
        click.echo(line)
    click.echo(
        f"{score.rows} run{'s' * (score.rows > 1)}: mean error {score.mean:.1%}, largest "
        f"{score.max:.1%} — next: hocket calibrate --from RUN…"
    )


def _absent(name: str, file: str) -> InputFileError:
    from hocket.base.errors import InputFileError

    return InputFileError(
        f"table {name!r} is not at hand", hint=f"give the folder that holds {file} as --data"
    )


def _as_json(result: TableResult) -> dict[str, Any]:
    return {**asdict(result), "ok": not result.violations, "violations": list(result.violations)}


def _steps(results: list[TableResult]) -> Table:
    shown = _empty_table(
        "step time: errors in %", ("runs", "mean", "limit", "median", "p95", "max", "bias")
    )
    for result in results:
        allowed = (result.tolerance.zero_shot_mean, result.tolerance.calibrated_mean)
        parts = (result.zero_shot, result.calibrated)
        for what, part, limit in zip(_PARTS, parts, allowed, strict=True):
            if part.step:
                shown.add_row(_name(result, what), what, *_step_cells(part, limit))
    return shown


def _step_cells(part: TableScores, limit: float | None) -> list[str]:
    score = part.step
    assert score is not None
    figures = (score.mean, limit, score.median, score.p95, score.max)
    return [str(score.rows), *map(_percent, figures), f"{100 * score.bias:+.1f}"]


def _choices(results: list[TableResult]) -> Table:
    shown = _empty_table(
        "choice among measured alternatives: % longer than the best",
        ("groups", "mean", "limit", "worst", "limit", "Kendall tau"),
    )
    for result in results:
        for what, part in zip(_PARTS, (result.zero_shot, result.calibrated), strict=True):
            if part.ranking:
                tolerance = result.tolerance
                limits = (tolerance.mean_regret_of(part.ranking), tolerance.max_regret)
                is_judged = what == "calibrated"
                shown.add_row(
                    _name(result, what),
                    what,
                    *_choice_cells(part, limits if is_judged else (None, None)),
                )
    return shown


def _choice_cells(part: TableScores, limits: tuple[float | None, float | None]) -> list[str]:
    score = part.ranking
    assert score is not None
    figures = (score.mean_regret, limits[0], score.max_regret, limits[1])
    return [str(score.groups), *map(_percent, figures), f"{score.kendall_tau:.2f}"]


def _memory(results: list[TableResult]) -> Table:
    shown = _empty_table(
        "memory of the fullest device: errors in %",
        ("runs", "mean", "limit", "bias", "OOM seen", "false alarms"),
    )
    for result in results:
        for what, part in zip(_PARTS, (result.zero_shot, result.calibrated), strict=True):
            if part.memory or part.out_of_memory:
                limit = result.tolerance.memory_mean if what == "calibrated" else None
                shown.add_row(_name(result, what), what, *_memory_cells(part, limit))
    return shown


def _memory_cells(part: TableScores, limit: float | None) -> list[str]:
    score, outcome = part.memory, part.out_of_memory
    cells = ["–"] * 4
    if score is not None:
        cells = [str(score.rows), _percent(score.mean), _percent(limit), f"{100 * score.bias:+.1f}"]
    if outcome is None:
        return [*cells, "–", "–"]
    predicted = (
        f"{outcome.ran_out - outcome.missed} of {outcome.ran_out}" if outcome.ran_out else "–"
    )
    return [*cells, predicted, f"{outcome.false_alarms} of {outcome.ran}"]


def _empty_table(title: str, headings: tuple[str, ...]) -> Table:
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("table", ""):
        shown.add_column(heading, no_wrap=True)
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    return shown


def _name(result: TableResult, what: str) -> str:
    return result.table if what == _PARTS[0] else ""


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
