"""``hocket fit``: fit a training step into a memory budget on one GPU.

`answer_budget` also answers ``hocket plan`` on one device with ``--memory``. ``--max`` searches the
largest batch, number of layers or sequence length that fits.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hocket.cli.declare import declare, option
from hocket.cli.options import SIZE, ModelOn, Output
from hocket.cli.output import console, emit, fail, say, working
from hocket.cli.sources import (
    announce_compilation,
    is_graph_file,
    load_graph,
    make_problem,
    named_cluster,
)
from hocket.cli.written import beside, named_graph, require_folder

if TYPE_CHECKING:
    from hocket.graph.graph import Graph
    from hocket.plan.problem import Problem
    from hocket.planners.memory.budget import BudgetFit

# Upper ends of the search, far above what one GPU holds, so that the search always stops.
MOST = {"batch": 2**20, "seq": 2**20, "layers": 1024}
START = {"batch": 8, "seq": 512, "layers": 4}


@declare("fit")
def command(
    *,
    request: ModelOn,
    host_bytes: Annotated[
        int | None,
        option(
            "Host memory that offloaded tensors may take. [default: no limit]",
            "--host-memory",
            type=SIZE,
        ),
    ] = None,
    async_update: Annotated[
        bool,
        "Let updates on the host run into the next step, as hocket.prepare(async_update=True).",
    ] = False,
    grows: Annotated[
        Literal["batch", "layers", "seq"] | None,
        option(
            "Find the largest batch, number of layers or sequence length that fits, and plan that.",
            "--max",
        ),
    ] = None,
    output: Output = None,
    as_json: bool,
) -> None:
    """Fit a training step of MODEL_OR_GRAPH into a memory budget on one GPU.

    Compares the plain step, full recompute, offloading everything and the fastest plan within the
    budget: which blocks are saved on the device, offloaded or recomputed, and which parameters are
    streamed from the host. Exit code 4 where nothing fits, with the smallest budget that would.
    """
    if output is None and not as_json:
        output = Path("fit.json")  # not the name of a plan for several devices
    limit_bytes = inf if host_bytes is None else host_bytes
    answer_budget(
        request, output, grows=grows, host_bytes=limit_bytes, async_update=async_update,
        as_json=as_json,
    )  # fmt: skip


def is_one_device(on: str) -> bool:
    """True if the cluster is known before capture and has exactly one device."""
    cluster = named_cluster(on)
    return cluster is not None and cluster.num_devices == 1


def answer_budget(
    request: ModelOn,
    output: Path | None,
    *,
    grows: str | None = None,
    host_bytes: float = inf,
    async_update: bool = False,
    as_json: bool,
) -> None:
    """Find the fastest plan within a budget, print it and write it; exit with code 4 if none fits.

    With ``grows`` first find the largest batch, sequence length or number of layers that fits.
    """
    from hocket.api.memory import fit_problem
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.planners.memory.given_budget import (
        require_memory,
        require_one_device,
        unusable_note,
    )
    from hocket.view import fit as view
    from hocket.view.step_inputs import step_data, step_text

    on, memory_bytes = request.on, request.memory_bytes
    if output is not None:
        require_folder(output)
    # Checked before capture, which may take a minute, so that a wrong budget is reported at once.
    if cluster := named_cluster(on):
        require_one_device(cluster)
        if memory_bytes is not None:
            require_memory(cluster.devices[0], memory_bytes)
    announce_compilation()
    found: dict[str, Any] = {}
    graph_file: Path | None = None
    if grows is not None:
        size, graph, least = _largest(request, grows, host_bytes)
        if graph is None:
            raise SystemExit(_none_fits(grows, memory_bytes, least, as_json=as_json))
        found = {f"max_{grows}": size}
        # Printed at once, because planning a step with many ops may take minutes.
        beyond = ", and no larger one is tried" if size == MOST[grows] else ""
        say(f"the largest {grows} that fits is {size}{beyond}")
    else:
        device = _recorded_for(on)
        graph, graph_file = load_graph(
            request.source, request.options, device=device, at_sizes=False
        )
    problem = make_problem(graph, request)
    with working(f"planning {graph.num_ops:,} ops"):
        fitted = fit_problem(
            problem, memory_bytes, host_bytes=host_bytes, async_update=async_update
        )
    if not as_json:
        if note := unusable_note(problem, fitted.budget_bytes):
            say(f"warning: {note}")
        # The table is printed before plan() raises, so that the user sees how far each strategy is
        # from fitting.
        say(step_text(graph))
        console().print(view.fit_table(fitted))
    try:
        fitted.plan()
    except NoFeasiblePlanError as error:
        raise SystemExit(fail(error, as_json=as_json, extra=view.data(fitted))) from None
    written = [] if output is None else _write(fitted, output, graph_file)
    if as_json:
        paths = written
        emit({**view.data(fitted), **found, "training": step_data(graph), "written": paths})
    elif written:
        names = ", ".join(path.name for path in written)
        memory = _typed(fitted.budget_bytes)
        say(f"wrote {names} — next: hocket show {written[0]}, or train with "
            f"hocket.prepare(model, optimizer, batch, memory={memory})")  # fmt: skip


def _typed(memory_bytes: int) -> str:
    """Format a memory budget as Python source: a text with a unit if that is exact, else an
    integer.
    """
    from hocket.base.units import parse_bytes, typed_bytes

    text = typed_bytes(memory_bytes)
    return f'"{text}"' if parse_bytes(text) == memory_bytes else str(memory_bytes)


def _recorded_for(on: str) -> str:
    """Device type to capture for, because on a CPU some attention kernels are computed op by op."""
    from hocket.plan.make import ON_FILE, find_cluster

    if on == ON_FILE:
        return "accelerator"
    return "cpu" if find_cluster(on).devices[0].kind.is_cpu else "accelerator"


def _largest(request: ModelOn, grows: str, host_bytes: float) -> tuple[int, Graph | None, int]:
    """Find the largest size that fits.

    Returns the size, its captured step (0 and None if no size fits), and the bytes that the
    smallest tried size needs.
    """
    from hocket.api.memory import largest_that_fits
    from hocket.base.errors import UsageError
    from hocket.base.units import format_bytes
    from hocket.cost.calibrate import read_calibration
    from hocket.cost.profile import read_profile
    from hocket.plan.make import find_cluster, make_problem
    from hocket.transformer.files import require_depth

    source, options = request.source, request.options
    if is_graph_file(source):
        raise UsageError(
            f"--max {grows} captures the model again for each try, and a graph file is what it is",
            hint="name the model instead of the file",
        )
    # A factory (module:function) may accept a number of layers, but a zoo model must have a depth.
    if grows == "layers" and ":" not in source:
        require_depth(source)

    device = _recorded_for(request.on)
    # Detecting this machine takes seconds, so the cluster is found once.
    cluster = find_cluster(request.on)
    profile = read_profile(request.profile) if request.profile else None
    calibration = read_calibration(request.calibration) if request.calibration else None

    def make(size: int) -> Problem:
        sized = options.having(grows, size)
        graph, _ = load_graph(source, sized, device=device, at_sizes=False)
        return make_problem(graph, cluster, profile=profile, calibration=calibration)

    needs: dict[int, int] = {}

    def tell(size: int, num_bytes: int, fits: bool) -> None:
        needs[size] = num_bytes
        say(f"{grows} {size} {'fits' if fits else 'does not fit'}: {format_bytes(num_bytes)}")

    size, problem = largest_that_fits(
        make, request.memory_bytes, start=START[grows], most=MOST[grows],
        host_bytes=host_bytes, on_try=tell,
    )  # fmt: skip
    return size, None if problem is None else problem.graph, needs[min(needs)]


def _none_fits(grows: str, memory_bytes: int | None, least_bytes: int, *, as_json: bool) -> int:
    """Print the budget that the smallest size would need; return the exit code."""
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.base.units import format_bytes, typed_bytes

    budget = "this device" if memory_bytes is None else format_bytes(memory_bytes)
    error = NoFeasiblePlanError(
        f"not even {grows} 1 fits into {budget}: its minimum-memory plan needs "
        f"{format_bytes(least_bytes)}",
        hint=f"give it {typed_bytes(least_bytes)}",
    )
    extra = {"feasible": False, "budget_bytes": memory_bytes,
             "smallest_budget_bytes": least_bytes, f"max_{grows}": 0}  # fmt: skip
    return fail(error, as_json=as_json, extra=extra)


def _write(fitted: BudgetFit, output: Path, graph_file: Path | None) -> list[Path]:
    from hocket.api.memory import save_fit

    report, graph = beside(output, "report.html"), fitted.frontier.problem.graph
    save_fit(fitted, output, report=report, graph_file=named_graph(graph, graph_file))
    return [output, report]
