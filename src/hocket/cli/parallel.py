"""``hocket parallel``: choose data, tensor and pipeline parallelism for training on a cluster.

Up to `MOST_SIMULATED` devices, candidates are simulated from captured ops. Larger clusters and
other training programs are predicted by a closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.options import ModelOptions, On, Output
from hocket.cli.output import console, emit, fail, say, working
from hocket.cli.sources import is_graph_file, load_graph, recorded_step, say_joining
from hocket.cli.written import beside, require_folder

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.planners.candidates import Comparison
    from hocket.transformer import Transformer

MAX_BATCH = 2**24
OWN_SOFTWARE = "hocket"
_LEAST_STATE_BYTES = 8
"""Bytes per parameter that every configuration keeps on devices: float32 value and gradient."""
_AMP = {"bfloat16": "bf16", "float16": "fp16"}
"""Name of autocast for each 16-bit arithmetic type."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options that define a training: model, cluster, batch and settings of the training
    program."""

    model: Annotated[str, argument("MODEL")]
    on: On
    batch: Annotated[
        int | None, option("Sequences per step.", type=click.IntRange(1, MAX_BATCH))
    ] = None
    seq: Annotated[
        int | None,
        option("Tokens per sequence. [default: the model's]", type=click.IntRange(1, 2**24)),
    ] = None
    dtype: Annotated[
        Literal["float16", "bfloat16", "float8"] | None,
        "Arithmetic of matrix products. [default: the software's]",
    ] = None
    software: Annotated[
        str,
        option(
            "The training program; only what it can run is tried. hocket list programs names them.",
            metavar="NAME",
        ),
    ] = OWN_SOFTWARE
    options: Annotated[
        tuple[str, ...],
        option(
            "Settings of the training program: async-tp, async-ep, compiled, eager, "
            "float8=rowwise, graphs, hsdp=N, offload, selective=ops.",
            metavar="NAME[=VALUE],...",
        ),
    ] = ()
    coefficients: Annotated[Path | None, "Fitted coefficients from hocket calibrate parallel."] = (
        None
    )
    fixed: Annotated[
        tuple[str, ...],
        option(
            "Try only this value of a degree or mode: tensor=8,recompute=full.",
            "--fix",
            metavar="NAME=VALUE,...",
        ),
    ] = ()

    @property
    def has_settings(self) -> bool:
        """True if there are options that only the closed form of a program understands."""
        return bool(self.options or self.coefficients or self.dtype == "float8")


@declare("parallel")
def command(
    *,
    request: Request,
    top: Annotated[int, option("Candidates to show.", type=click.IntRange(1, 200))] = 10,
    output: Output = None,
    as_json: bool,
) -> None:
    """Choose data, tensor and pipeline parallelism for training MODEL on a cluster.

    MODEL is a preset such as gpt3-175b, a TOML file with a transformer's shape, a config.json, a
    captured graph or package.module:function. The step of hocket itself is predicted: up to 64
    devices by simulating the captured ops, with the answer of hocket plan; above by a closed form
    that is fitted to such simulations. Other programs are predicted by their closed forms.
    """
    is_simulated = _is_simulated(request)
    if output is None and not as_json:
        output = Path("plan.json")
    if output is not None:
        require_folder(output)
    if is_simulated:
        _refuse_too_large(request)
        comparison = _simulated(request, request.on, request.batch, top)
    else:
        comparison = _by_closed_form(request)
    _answer(comparison, top, output, as_json)


def _is_simulated(request: Request) -> bool:
    """True if captured ops are simulated: the program is hocket and the cluster is small enough."""
    from hocket.base.errors import UsageError
    from hocket.plan.make import find_cluster
    from hocket.planners.parallel.pools import accelerators
    from hocket.planners.parallel.simulated_calibration import MOST_SIMULATED
    from hocket.transformer.files import is_shape

    is_own = request.software == OWN_SOFTWARE
    if request.batch is None and not (is_own and recorded_step(request.model)):
        raise UsageError(
            "--batch N is missing",
            hint="hocket parallel gpt3-175b --on 512xdgx-a100-80g --batch 1536",
        )
    is_few = len(accelerators(find_cluster(request.on))) <= MOST_SIMULATED
    is_only_shape = request.model.endswith(".toml")
    if not is_own or is_only_shape or (is_shape(request.model) and not is_few):
        return False
    if request.has_settings:
        raise UsageError(
            "--options, --coefficients and float8 are settings of a program's closed form; the "
            "captured ops are simulated as they are",
            hint="leave these out, or name another program: --software megatron-core",
        )
    return True


def _refuse_too_large(request: Request) -> None:
    """Refuse a model whose parameters alone exceed the cluster's memory, before it is captured."""
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.base.units import format_bytes
    from hocket.plan.make import find_cluster
    from hocket.transformer.counts import parameter_counts
    from hocket.transformer.files import find_model, is_shape

    if not is_shape(request.model):
        return
    cluster = find_cluster(request.on)
    least_bytes = _LEAST_STATE_BYTES * parameter_counts(find_model(request.model)).total
    capacity_bytes = sum(device.memory_bytes for device in cluster.devices)
    if least_bytes > capacity_bytes:
        raise NoFeasiblePlanError(
            f"nothing fits {cluster.name}: parameters and gradients take "
            f"{format_bytes(least_bytes)}, all devices have {format_bytes(capacity_bytes)}",
            hint="use more or larger devices; hocket fit streams parameters from the host",
        )


def _simulated(
    request: Request, on: Any, batch: int | None, top: int = 20, layers: int | None = None
) -> Comparison:
    """Compare simulated candidates, as ``hocket plan`` does."""
    from hocket.api.planners import compare_candidates
    from hocket.base.errors import UsageError
    from hocket.plan.make import make_problem
    from hocket.planners.parallel.compare import can_split_batch
    from hocket.planners.parallel.constraints import parse_constraints

    # Constraints of hocket plan are written with a blank: --fix data=2 becomes "data 2".
    fixed = ",".join(request.fixed).replace("=", " ").split(",")
    must = parse_constraints([part for part in fixed if part.strip()])
    options = ModelOptions(
        batch=None if is_graph_file(request.model) else batch,
        seq=request.seq, dtype=None, optimizer=None, layers=layers,
        amp=None if request.dtype is None else _AMP[request.dtype],
    )  # fmt: skip
    graph, _ = load_graph(request.model, options, check=True)
    problem = make_problem(graph, on)
    recorded = graph.other_batch
    if recorded is None or not can_split_batch(problem):
        raise UsageError(
            f"the batch of {graph.name} cannot be split",
            hint="capture a training step with hocket capture MODEL --batch N",
        )
    if batch not in (None, recorded.num_samples):
        raise UsageError(
            f"{graph.name} was captured with {recorded.num_samples} samples, not {batch}",
            hint=f"capture it with --batch {batch}, or name a program with --software",
        )
    with working("searching"):
        return compare_candidates(problem, must=must, num_degrees=top)


def _by_closed_form(request: Request) -> Comparison:
    """Compare configurations of a transformer's shape by the closed form of a program."""
    from hocket.api.planners import compare_candidates

    problem = _shape_problem(request)
    with working("searching"):
        return compare_candidates(problem)


def _shape_problem(request: Request) -> Problem:
    """Problem for a transformer's shape; hocket's own closed form is fitted to simulated steps."""
    from dataclasses import replace

    from hocket.api.parallel_configs import limited
    from hocket.planners.parallel.simulated_calibration import (
        MOST_LAYERS,
        calibrated,
        part_batch,
        part_of,
    )
    from hocket.transformer.files import check_model, find_model, preset_names

    assert request.batch is not None
    shape = find_model(request.model)
    if request.seq is not None:
        shape = replace(shape, sequence=request.seq)
        check_model(shape)
    problem = limited(
        _make_training(
            shape,
            request.on,
            request.batch,
            request.dtype,
            (request.software, *request.options),
            request.coefficients,
        ),
        ",".join(request.fixed),
    )
    if request.software != OWN_SOFTWARE or request.model.endswith(".toml") or request.coefficients:
        return problem
    part = part_of(problem.cluster)
    batch = part_batch(request.batch, problem.cluster, part)
    # Capturing and simulating every layer of a large preset would take long; fewer layers calibrate
    # the closed form as well.
    layers = min(shape.layers, MOST_LAYERS) if request.model in preset_names() else shape.layers
    sized = replace(request, fixed=(), seq=shape.sequence)
    return calibrated(problem, _simulated(sized, part, batch, layers=layers), layers)


def _answer(comparison: Comparison, top: int, output: Path | None, as_json: bool) -> None:
    """Print the candidates and write the winner's files; exit with code 4 if nothing fits."""
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.planners.parallel.transformer_search import plan_of
    from hocket.view.comparison import answered_by, elsewhere
    from hocket.view.parallel import forecasts_data
    from hocket.view.parallel_text import comparison_table

    result = forecasts_data(comparison, top) | {
        "answered_by": answered_by(comparison), "elsewhere": elsewhere(comparison),
    }  # fmt: skip
    if not as_json:
        console().print(comparison_table(comparison, top))
        say(answered_by(comparison))
        if other := elsewhere(comparison):
            say(other)
    try:
        plan = plan_of(comparison)
    except NoFeasiblePlanError as error:
        raise SystemExit(fail(error, as_json=as_json, extra=result)) from None
    written = [] if output is None else _save(comparison, plan, output)
    if as_json:
        emit({**result, "written": written})
    elif written:
        following = f" — next: hocket show {output}, hocket run {output}"
        say(f"wrote {', '.join(path.name for path in written)}{following}")


def _save(comparison: Comparison, plan: Plan, output: Path) -> list[Path]:
    from hocket.api.parallel_configs import save_winner

    report = beside(output, "report.html")
    save_winner(comparison, plan, output, report)
    return [output, report]


def _make_training(
    model: Transformer,
    on: str,
    batch: int,
    dtype: str | None,
    software: tuple[str, ...],
    coefficients: Path | None,
) -> Problem:
    """Make the training problem; print a note if the cluster lacks the program's usual dtype."""
    from hocket.api.parallel_configs import make_training
    from hocket.cost.parallel.coefficients import read_coefficients
    from hocket.cost.parallel.options import with_options
    from hocket.cost.parallel.softwares import find_software

    name, *options = software
    program = with_options(find_software(name), options)
    say_joining(on)
    with working(f"reading {on}"):
        problem = make_training(
            model,
            on,
            batch,
            program=program,
            dtype=dtype,
            coefficients=read_coefficients(coefficients) if coefficients else None,
        )
    usual, taken = program.dtype, problem.training.software.dtype
    if dtype is None and taken != usual:
        say(f"{problem.cluster.name} has no {usual} everywhere: {taken} is taken")
    return problem
