"""``hocket parallel``: choose how the training of a transformer is divided over a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hocket.cli.output import console, emit, fail, json_option, say, working
from hocket.cli.sources import ModelOptions, load_graph, say_joining
from hocket.cli.written import overwrite_option, require_folder, require_own_kind

if TYPE_CHECKING:
    from hocket.graph.graph import Graph
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.planners.candidates import Comparison
    from hocket.transformer import Transformer

MAX_BATCH = 2**24
OWN_SOFTWARE = "hocket"
"""The program whose ops are captured and simulated, as `hocket plan` does."""
_AMP = {"bfloat16": "bf16", "float16": "fp16"}
"""Autocast of each type of arithmetic."""


@click.command("parallel")
@click.argument("model", required=False, metavar="MODEL")
@click.option("--on", metavar="CLUSTER", help="A TOML file, a preset, shorthand such as "
              "512xdgx-a100-80g, or 'auto' for this machine.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), help="Sequences per step.")
@click.option("--seq", type=click.IntRange(1, 2**24),
              help="Tokens per sequence. [default: the model's]")  # fmt: skip
@click.option("--dtype", type=click.Choice(["float16", "bfloat16", "float8"]),
              help="Arithmetic of matrix products. [default: the software's]")  # fmt: skip
@click.option("--software", metavar="NAME", default=None,
              help="The training program; only what it can run is tried. hocket captures the model "
              "and simulates its ops, with the answer of hocket plan. "
              "[default: megatron-core; hocket for a captured graph]")  # fmt: skip
@click.option("--options", multiple=True, metavar="NAME[=VALUE],...",
              help="How the program is set: async-tp, async-ep, compiled, eager, "
              "float8=rowwise, graphs, hsdp=N, offload, selective=ops.")  # fmt: skip
@click.option("--coefficients", type=click.Path(path_type=Path), default=None,
              help="Fitted coefficients from hocket calibrate parallel.")  # fmt: skip
@click.option("--fix", "fixed", multiple=True, metavar="NAME=VALUE,...",
              help="Try only this value of a degree or mode: tensor=8,recompute=full.")  # fmt: skip
@click.option("--schedule", "schedules", multiple=True, metavar="NAME",
              help="Try only this pipeline schedule; may be given several times. One that the "
              "program lacks is for hocket run.")  # fmt: skip
@click.option("--max-tensor", type=click.IntRange(1, 4096), default=None,
              help="Largest tensor degree. [default: the devices of a host]")  # fmt: skip
@click.option(
    "--synthesise",
    is_flag=True,
    help="Also make schedules of their own for the best pipelines (some seconds more).",
)
@click.option("--top", type=click.IntRange(1, 200), default=10, show_default=True,
              help="Candidates to show.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), default=None,
              help="Plan file to write. [default: plan.json, nothing with --json]")  # fmt: skip
@click.option("--report", type=click.Path(path_type=Path), default=None,
              help="Also write the HTML report here.")  # fmt: skip
@click.option("--predict", "config", type=click.Path(path_type=Path), default=None,
              metavar="CONFIG", help="Predict the one config of a TOML file.")  # fmt: skip
@overwrite_option
@json_option
def command(
    model: str | None,
    on: str | None,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    software: str | None,
    options: tuple[str, ...],
    coefficients: Path | None,
    fixed: tuple[str, ...],
    schedules: tuple[str, ...],
    max_tensor: int | None,
    synthesise: bool,
    top: int,
    output: Path | None,
    report: Path | None,
    config: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Divide the training of MODEL over a cluster: data x tensor x pipeline, and how.

    MODEL is a preset such as gpt3-175b, a TOML file, an HF config.json, or a captured graph. The
    ops of a graph that knows its batch, and of any model with --software hocket, are captured and
    simulated: the search and the answer are those of hocket plan. Other programs are known by a
    closed form of the model's shape.
    """
    from hocket.api.parallel_configs import limited

    if output is not None or (config is None and not as_json):
        require_own_kind(output or Path("plan.json"), "parallel", overwrite=overwrite)
    if config is not None:
        _refuse_besides_predict()
        _predict(config, output, report, as_json)
        return
    program = (options, coefficients, schedules, max_tensor, synthesise)
    graph = _captured(model, batch, seq, dtype, software, is_limited=any(map(bool, program)))
    if graph is not None and on is not None:
        _divide_recorded(graph, on, batch, fixed, top, output, report, as_json)
        return
    problem = _training(model, on, batch, seq, dtype, software, options, coefficients)
    problem = limited(
        problem, software=software, fixed=",".join(fixed), schedules=schedules,
        max_tensor=max_tensor, synthesise=synthesise,
    )  # fmt: skip
    if output is None and not as_json:
        output = Path("plan.json")
    _require_folders(output, report)
    _search(problem, top, output, report, as_json)


def _captured(
    model: str | None,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    software: str | None,
    *,
    is_limited: bool,
) -> Graph | None:
    """The graph that is simulated; None where a program's closed form is wanted.

    ``is_limited`` if options are given that only closed forms of programs have.
    """
    from hocket.api.graphs import recorded_step
    from hocket.base.errors import UsageError

    if model is None or software not in (None, OWN_SOFTWARE):
        return None
    if software is None:
        return None if is_limited or dtype or seq else recorded_step(model)
    if is_limited or dtype == "float8":
        raise UsageError(
            "--software hocket simulates ops as they are: it has no float8, --options, "
            "--coefficients, --schedule, --max-tensor or --synthesise",
            hint="leave these out, or name another program: --software megatron-core",
        )
    amp = None if dtype is None else _AMP[dtype]
    graph, _ = load_graph(
        model, ModelOptions(batch=batch, seq=seq, dtype=None, optimizer=None, amp=amp), check=True
    )
    return graph


def _divide_recorded(
    graph: Graph,
    on: str,
    batch: int | None,
    fixed: tuple[str, ...],
    top: int,
    output: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Divide recorded ops as ``hocket plan`` does, with the degrees that are asked for."""
    from hocket.api import best_of, make_problem
    from hocket.api.planners import compare_divided, fixed_degrees
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.view.compared import answered_by, comparison_data
    from hocket.view.shared import whole_table

    must = fixed_degrees(fixed)
    problem = make_problem(graph, on)
    if output is None and not as_json:
        output = Path("plan.json")
    _require_folders(output, report)
    with working("searching"):
        comparison = compare_divided(problem, batch, must, top)
    if not as_json:
        console().print(whole_table(comparison))
        say(answered_by(comparison))
    try:
        planned = best_of(comparison)
    except NoFeasiblePlanError as error:
        raise SystemExit(fail(error, as_json=as_json, extra=comparison_data(comparison))) from None
    if report is not None:
        planned.save_report(report)
    if output is not None:
        planned.save(output)
    written = [path for path in (output, report) if path is not None]
    if as_json:
        emit({**comparison_data(comparison), "written": [str(path) for path in written]})
    elif written:
        following = f" — next: hocket show {output}, hocket run {output}" if output else ""
        say(f"wrote {', '.join(path.name for path in written)}{following}")


def _search(
    problem: Problem, top: int, output: Path | None, report: Path | None, as_json: bool
) -> None:
    from hocket.api.planners import compare_candidates
    from hocket.view.compared import answered_by, comparison_data, elsewhere
    from hocket.view.parallel_text import comparison_table

    with working("searching"):
        comparison = compare_candidates(problem)
    if not as_json:
        console().print(comparison_table(comparison, top))
        say(answered_by(comparison))
        if other := elsewhere(comparison):
            say(other)
    _answer(comparison, comparison_data(comparison, top), output, report, as_json)


def _answer(
    comparison: Comparison,
    result: dict[str, Any],
    output: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Write the winner's files and print the result; exit 4 where there is no winner."""
    from hocket.api.parallel_configs import plan_of
    from hocket.base.errors import NoFeasiblePlanError

    try:
        plan = plan_of(comparison)
    except NoFeasiblePlanError as error:
        raise SystemExit(fail(error, as_json=as_json, extra=result)) from None
    written = _write(plan, comparison, output, report)
    if as_json:
        emit({**result, "written": [str(path) for path in written]})
    elif written:
        following = f" — next: hocket show {output}, hocket run {output}" if output else ""
        say(f"wrote {', '.join(path.name for path in written)}{following}")


def _require_folders(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            require_folder(path)


def _write(
    plan: Plan, comparison: Comparison, output: Path | None, report: Path | None
) -> list[Path]:
    from hocket.base.atomic import write_together
    from hocket.plan.files import plan_bytes
    from hocket.plan.transformer_plan import TransformerPlan
    from hocket.view.parallel_report import parallel_report_html

    contents: dict[str | Path, bytes] = {}
    if output is not None:
        contents[output] = plan_bytes(output, comparison.problem, plan)
    if report is not None:
        page = parallel_report_html(TransformerPlan(comparison.problem, plan), comparison)
        contents[report] = page.encode()
    write_together(contents)
    return [Path(path) for path in contents]


# ── what is asked ────────────────────────────────────────────────────────────────────────────────


def _training(
    model: str | None,
    on: str | None,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    software: str | None,
    options: tuple[str, ...],
    coefficients: Path | None,
) -> Problem:
    from dataclasses import replace

    from hocket.base.errors import UsageError
    from hocket.transformer.files import check_model, find_model

    for value, what in ((model, "MODEL"), (on, "--on CLUSTER"), (batch, "--batch N")):
        if value is None:
            raise UsageError(
                f"{what} is missing",
                hint="hocket parallel gpt3-175b --on 512xdgx-a100-80g --batch 1536",
            )
    assert model is not None
    assert on is not None
    assert batch is not None
    shape = find_model(model)
    if seq is not None:
        shape = replace(shape, sequence=seq)
        check_model(shape)
    return _make_training(shape, on, batch, dtype, software, options, coefficients)


def _make_training(
    model: Transformer,
    on: str,
    batch: int,
    dtype: str | None,
    software: str | None,
    options: tuple[str, ...],
    coefficients: Path | None,
    spare: float | None = None,
) -> Problem:
    from hocket.api import make_training
    from hocket.api.parallel_configs import (
        DEFAULT_SOFTWARE,
        find_software,
        read_coefficients,
        with_options,
    )

    say_joining(on)
    with working(f"reading {on}"):
        problem = make_training(
            model,
            on,
            batch,
            software=software,
            options=options,
            dtype=dtype,
            coefficients=read_coefficients(coefficients) if coefficients else None,
            spare=spare,
        )
    program = with_options(find_software(software or DEFAULT_SOFTWARE), options)
    usual, taken = program.dtype, problem.training.software.dtype
    if dtype is None and taken != usual:
        say(f"{problem.cluster.name} has no {usual} everywhere: {taken} is taken")
    return problem


# ── one config ─────────────────────────────────────────────────────────────────────────────────


_BESIDES_PREDICT = frozenset({"config", "output", "report", "overwrite", "as_json"})


def _refuse_besides_predict() -> None:
    from hocket.base.errors import UsageError

    context = click.get_current_context()
    given = [
        param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        for param in context.command.params
        if param.name not in _BESIDES_PREDICT
        and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(
            "with --predict the file states what is asked",
            hint=f"leave out {', '.join(given)}",
        )


def _predict(config: Path, output: Path | None, report: Path | None, as_json: bool) -> None:
    from hocket.api.parallel_configs import forecast_of, read_configuration, single
    from hocket.view.parallel import forecast_data, parts_data
    from hocket.view.parallel_text import comparison_table

    _require_folders(output, report)
    asked = read_configuration(config)
    problem = _make_training(
        asked.model, asked.on, asked.batch, asked.dtype, asked.software, asked.options,
        asked.coefficients,
        spare=0.0,
    )  # fmt: skip
    with working("predicting"):
        comparison = single(problem, asked, str(config))
    forecast = forecast_of(problem, comparison.candidates[0])
    if not as_json:
        console().print(comparison_table(comparison, 1))
    result = forecast_data(forecast) | parts_data(forecast)
    if output is not None or report is not None:
        _answer(comparison, result, output, report, as_json)
    elif as_json:
        emit({**result, "written": []})
    elif comparison.winner is None:
        say(comparison.why)
