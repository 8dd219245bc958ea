"""``hocket plan``: compare strategies for a model on a cluster and write the best plan.

Also compares changed clusters (``--what-if``, ``--budget``), writes the report and the trace, and
prints the 80 % range of the predicted step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hocket.cli.declare import declare, option
from hocket.cli.fit import answer_budget, is_one_device
from hocket.cli.options import MONEY, SIZE, ModelOn, Output, Transfers
from hocket.cli.output import console, emit, fail, say, working
from hocket.cli.sources import announce_compilation, load_graph, make_problem, named_cluster
from hocket.cli.written import beside, named_graph, require_folder

if TYPE_CHECKING:
    from hocket.api.planned import Planned
    from hocket.plan.problem import Problem
    from hocket.planners.candidates import Comparison
    from hocket.planners.communication.priority import PropagationChoice
    from hocket.planners.goal import Goal
    from hocket.planners.parallel.scenarios import ChangedCluster

LARGE_TRACE_OPS = 20_000
"""Number of ops above which the trace is written gzipped."""
NUM_KERNELS = 25
"""Approximate number of kernels that a fresh installation compiles to compare placements.

Fewer are compiled if splitting the batch wins in any case, so that no placement is searched.
"""
AUTO = "auto"
"""Name of the planner that tries a portfolio of planners."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ModelOn):
    """Options of one plan: planners, objective, constraints and changed clusters."""

    planners: Annotated[
        tuple[str, ...],
        option(
            "Place the ops of the full batch by this planner only; may be given several times; "
            "auto tries a portfolio, A+B runs B on the plan of A, expert:FILE reads a placement. "
            "[default: all strategies, where the batch can be split]",
            "--planner",
            metavar="NAME",
        ),
    ] = ()
    transfers: Annotated[
        Transfers,
        "Contention: simultaneous transfers share links, queue, or do not disturb each other.",
    ] = "shared"
    objective: Annotated[
        Literal["step", "cost", "memory", "throughput"],
        "The shortest step, the least money per step (device time where a price is unknown), "
        "the most free memory, or throughput: the smallest load of the busiest device, for "
        "work that is pipelined over many batches.",
    ] = "step"
    contiguous: Annotated[
        bool, "No path of forward ops may leave a device and come back to it."
    ] = False
    headroom_bytes: Annotated[
        int | None,
        option(
            "Memory that every device keeps free for context, workspaces and fragmentation, such "
            "as 2GiB or 0B. [default: that of the device type]",
            "--headroom",
            type=SIZE,
        ),
    ] = None
    limits: Annotated[
        tuple[str, ...],
        option(
            "A constraint: 'devices 2', 'step 500ms', 'cost $3' per million samples, 'data 2' "
            "replicas, 'pipeline 4' stages, 'tensor 2' shards of each matrix; may be given "
            "several times.",
            "--must",
            metavar="LIMIT",
        ),
    ] = ()
    changes: Annotated[
        tuple[str, ...],
        option(
            "Also plan for another cluster: +1xrtx4090 added, -titanx removed, 4xl4 instead; may "
            "be given several times.",
            "--what-if",
            metavar="CHANGE",
        ),
    ] = ()
    budget: Annotated[
        float | None,
        option(
            "Also find the devices to add or to rent instead for so much money per hour, such as "
            "$5/h.",
            type=MONEY,
        ),
    ] = None
    check: Annotated[
        bool,
        option(
            "Check on a small copy of the model that a split batch trains as the full one does; "
            "where it does not, the batch is not split.",
            "--check/--no-check",
        ),
    ] = True


@declare("plan")
def command(
    *,
    request: PlanRequest,
    output: Output = None,
    as_json: bool,
) -> None:
    """Plan MODEL_OR_GRAPH on a cluster: compare the candidates, write the best.

    MODEL_OR_GRAPH is a graph file, a model of hocket list models, or package.module:function. For
    transformers on thousands of devices hocket parallel answers from their shape alone.
    """
    from hocket.api.planned import best_of
    from hocket.api.planners import compare_candidates, compare_changes
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.hardware.changed import changed_cluster
    from hocket.planners import find_planner
    from hocket.planners.communication.priority import choose_for_replicas
    from hocket.planners.goal import GOALS
    from hocket.planners.parallel.constraints import parse_constraints
    from hocket.view.comparison import answered_by, comparison_data
    from hocket.view.step_inputs import step_data, step_text

    for name in request.planners:
        find_planner(name)
    must = parse_constraints(_with_memory(request.limits, request.memory_bytes))
    if output is None and not as_json:
        output = Path("plan.json")
    if output is not None:
        require_folder(output)
    # On one device the memory decides, so the answer is that of hocket fit.
    if request.memory_bytes is not None and is_one_device(request.on):
        answer_budget(request, output, as_json=as_json)
        return
    # Raises for a wrong cluster before the model is captured, which may take a minute.
    named_cluster(request.on)
    graph, graph_file = load_graph(
        request.source, request.options, check=request.check and not request.planners
    )
    load_only = request.objective == "throughput"
    problem = make_problem(
        graph, request, transfers=request.transfers, contiguous=request.contiguous,
        objective="throughput" if load_only else "latency", headroom_bytes=request.headroom_bytes,
    )  # fmt: skip
    for change in request.changes:  # a wrong one is refused before anything is planned
        changed_cluster(problem.cluster, change)
    announce_compilation(
        about=NUM_KERNELS if not request.planners or AUTO in request.planners else 1
    )
    with working("planning"):
        wanted = GOALS[request.objective]
        comparison = compare_candidates(problem, request.planners, wanted, must)
        variants = None
        if request.changes or request.budget is not None:
            variants = compare_changes(
                problem, request.changes, request.budget, wanted, must, request.planners
            )
    if not as_json:
        say(f"{step_text(graph)}; {answered_by(comparison)}")
        _print(comparison, variants, wanted)
    try:
        planned = best_of(comparison, is_limited=bool(must))
    except NoFeasiblePlanError as error:
        raise SystemExit(fail(error, as_json=as_json, extra=comparison_data(comparison))) from None
    expected = _range_data(problem, planned.plan.claims.step_s)
    if expected is not None and not as_json:
        say(_range_text(expected))
    written = _write(planned, output, graph_file) if output is not None else []
    travel = choose_for_replicas(problem, planned.plan)
    if as_json:
        emit({**_data(comparison, variants, travel, written), "training": step_data(graph),
              "step_range": expected})  # fmt: skip
    else:
        _say_what_follows(problem, travel, written)


def _with_memory(limits: tuple[str, ...], memory_bytes: int | None) -> tuple[str, ...]:
    """Add the memory budget to the constraints; refuse it among them, because ``--memory`` sets
    it."""
    from hocket.base.errors import UsageError

    for limit in limits:
        if limit.split()[:1] == ["fit"]:
            raise UsageError(
                f"--must {limit!r} has an option of its own", hint=f"--memory {limit[3:].strip()}"
            )
    return limits if memory_bytes is None else (*limits, f"fit {memory_bytes}B")


def _range_data(problem: Problem, step_s: float | None) -> dict[str, Any] | None:
    """The 80 % range of the predicted step and its source; None if costs are stated in the
    graph."""
    from hocket.cost.ranges import source_of, step_range

    if step_s is None or problem.graph.stated is not None:
        return None
    found, source = step_range(problem.costs), source_of(problem.costs.settings)
    accelerators = [kind for kind in problem.cluster.kinds if not kind.is_cpu]
    # A data sheet states no launch overhead; a device type has one (dispatch_s) once hocket detect
    # has measured it.
    is_assumed = source in ("datasheet", "runs") and not all(
        kind.dispatch_s for kind in accelerators
    )
    return {
        "low_s": found.low * step_s, "high_s": found.high * step_s, "source": source,
        "rows": found.rows,
        "host_time": None if not accelerators else "assumed" if is_assumed else "measured",
    }  # fmt: skip


def _range_text(expected: dict[str, Any]) -> str:
    from hocket.base.units import format_seconds

    low, high = (format_seconds(expected[key]) for key in ("low_s", "high_s"))
    if expected["source"] == "runs":
        runs = f"{expected['rows']} run{'s' * (expected['rows'] > 1)}"
        return f"80 % range of the step: {low} to {high} (data sheet corrected by {runs})"
    is_assumed = expected["host_time"] == "assumed"
    host = "; host time assumed, hocket detect measures it" if is_assumed else ""
    return (
        f"80 % range of the step: {low} to {high} ({expected['source']} costs, "
        f"{expected['rows']} steps measured on one H200{host})"
    )


def _print(comparison: Comparison, variants: Sequence[ChangedCluster] | None, goal: Goal) -> None:
    from hocket.view.comparison import comparison_table, elsewhere

    console().print(comparison_table(comparison))
    if other := elsewhere(comparison):
        say(other)
    if variants is not None:
        from hocket.view.variants import variants_table

        console().print(variants_table(comparison, variants, goal))


def _data(
    comparison: Comparison,
    variants: Sequence[ChangedCluster] | None,
    travel: PropagationChoice | None,
    written: Sequence[Path],
) -> dict[str, Any]:
    """The result as ``--json`` prints it."""
    from hocket.view.comparison import comparison_data

    data = comparison_data(comparison)
    if variants is not None:
        from hocket.view.variants import variants_data

        data["what_if"] = variants_data(variants)
    if travel is not None:
        from hocket.view.collective import propagation_as_dict

        data["gradients"] = propagation_as_dict(travel)
    return {**data, "written": written}


def _say_what_follows(
    problem: Problem, travel: PropagationChoice | None, written: Sequence[Path]
) -> None:
    if travel is not None and travel.chosen.how.crosses:
        from hocket.view.collective import propagation_why

        say(f"gradients by priority: {propagation_why(travel)}")
    if not written:
        return
    names = ", ".join(path.name for path in written)
    meta = problem.graph.meta
    # Graphs of other levels have no ops that could be executed.
    can_run = "model" in meta and meta.get("level", "op") == "op"
    commands = ["show", "explain"] + ["run"] * can_run
    following = ", ".join(f"hocket {command} {written[0]}" for command in commands)
    say(f"wrote {names} — next: {following}")


def _write(planned: Planned, output: Path, graph_file: Path | None) -> list[Path]:
    report, graph = beside(output, "report.html"), planned.problem.graph
    # A trace takes about 500 bytes per op; Perfetto opens gzipped files too.
    packed = ".gz" if graph.num_ops > LARGE_TRACE_OPS else ""
    trace = beside(output, f"trace.json{packed}")
    planned.save(output, report=report, trace=trace, graph_file=named_graph(graph, graph_file))
    return [output, report, trace]
