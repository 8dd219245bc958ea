"""``hocket collective``: plan a collective over the links of a cluster, with a bound of its rate.

Prints the candidate schedules, writes the chosen one as a plan, report, MSCCL++ program or NCCL
graph, and optionally lists all topology classes or predicts a data-parallel step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.options import SIZE, ModelOptions
from hocket.cli.output import answer, console, emit, say, working
from hocket.cli.sources import load_graph
from hocket.cli.written import require_folder

if TYPE_CHECKING:
    from hocket.api.collectives import CollectiveRequest
    from hocket.planners.communication.collective import CollectivePlan
    from hocket.planners.communication.priority import PropagationChoice


def _collective(_: click.Context, __: click.Parameter, text: str) -> str:
    """Normalise the name of a collective; ``all-reduce`` and ``all_reduce`` are accepted too."""
    from hocket.base.errors import unknown_name
    from hocket.plan.sections.communication import COLLECTIVES

    name = text.lower().replace("-", "").replace("_", "")
    if name not in COLLECTIVES:
        raise unknown_name("collective", text, COLLECTIVES)
    return name


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """Options that define one collective: its name, ranks, links, size and root."""

    collective: Annotated[str, argument("COLLECTIVE", callback=_collective)]
    on: Annotated[
        str,
        option(
            "A TOML file, a preset, shorthand, NCCL's topology XML, the matrix of nvidia-smi topo "
            "-m (.txt), JSON, or 'auto' for this machine.",
            metavar="CLUSTER",
        ),
    ]
    gpus: Annotated[
        str | None,
        option(
            "Devices of the job, in the order of the ranks: 0,1,2,4 or 0-3 or names. [default: "
            "all]",
            metavar="LIST",
        ),
    ] = None
    size_bytes: Annotated[
        int | None,
        option("Bytes of the message, such as 64MiB; decides by time.", "--size", type=SIZE),
    ] = None
    root: Annotated[
        str | None, option("Root of a broadcast or reduce. [default: the best]", metavar="DEVICE")
    ] = None
    relay: Annotated[bool, "Let devices that are not in the job forward."] = False
    links: Annotated[
        Literal["auto", "peer", "all"],
        "Links between devices alone where they suffice, or those of the hosts as well.",
    ] = "auto"


@declare("collective")
def command(
    *,
    options: CollectiveOptions,
    max_trees: Annotated[
        int | None,
        option(
            "Keep at most so many trees of an all-reduce, the heaviest.",
            "--trees",
            type=click.IntRange(1, 10_000),
        ),
    ] = None,
    with_blink: Annotated[
        bool, option("Also: the trees of Blink's multiplicative weights.", "--blink")
    ] = False,
    output: Annotated[Path | None, option("Schedule to write.", "-o", "--output")] = None,
    report: Annotated[Path | None, "HTML report to write."] = None,
    export: Annotated[
        Path | None,
        "Program to write: NAME.json for MSCCL++, NAME.graph.xml for NCCL (rings and chains only).",
    ] = None,
    bound_only: Annotated[
        bool, option("The bound alone, for clusters of any size.", "--bound")
    ] = False,
    model: Annotated[
        str | None,
        option(
            "Also: a data-parallel step of this model (or file of a graph), its gradients sent in "
            "several orders.",
            "--gradients",
            metavar="MODEL",
        ),
    ] = None,
    classes: Annotated[
        bool, "Instead: one row per class of connected sets of devices, as in Blink's tables."
    ] = False,
    as_json: bool,
) -> None:
    """Plan a COLLECTIVE: allreduce, broadcast, reduce, allgather or reducescatter.

    Shows the bound of these links with its certificate, the best schedule, and those of other
    programs (ring, chain, trees, one hop).
    """
    from hocket.api.collectives import CollectiveRequest
    from hocket.plan.make import find_cluster

    for path in (output, report, export):
        if path is not None:
            require_folder(path)
    if classes:
        _show_classes(options, as_json)
        return
    request = CollectiveRequest(**{**vars(options), "on": find_cluster(options.on)})
    if bound_only:
        _show_bound(request, as_json)
        return
    with working("planning"):
        plan = request.plan(max_trees=max_trees, with_blink=with_blink)
    travel = None if model is None else _gradients(plan, model)
    written = _write(plan, output, report)
    if export is not None:
        written.append(_export(plan, export))
    _show(plan, written, travel, as_json)


def _gradients(plan: CollectivePlan, model: str) -> PropagationChoice:
    from hocket.api.collectives import predict_propagation
    from hocket.base.errors import UsageError

    if plan.collective != "allreduce":
        raise UsageError(
            "--gradients: gradients are summed by an allreduce", hint="plan that collective"
        )
    graph, _ = load_graph(model, ModelOptions())
    return predict_propagation(graph, plan)


def _write(plan: CollectivePlan, output: Path | None, report: Path | None) -> list[Path]:
    from hocket.base.atomic import write_together
    from hocket.plan.files import plan_bytes
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.view.collective import as_dict
    from hocket.view.collective_report import collective_report_html

    claims = as_dict(plan)
    contents: dict[str | Path, bytes] = {}
    if output is not None:
        named = ("rate", "bound", "gap", "certificate", "why", "limit")
        kept = {key: claims[key] for key in named}
        made = Plan(planner="collective", sections=(plan.chosen.section,))
        problem = Problem(work=None, cluster=plan.cluster)
        contents[output] = plan_bytes(output, problem, made.claiming(certificate=kept))
    if report is not None:
        contents[report] = collective_report_html(plan).encode()
    write_together(contents)
    return [Path(path) for path in contents]


def _export(plan: CollectivePlan, path: Path) -> Path:
    """Write the chosen schedule as a program of MSCCL++ or a graph of NCCL."""
    from hocket.base.atomic import write_atomically
    from hocket.base.errors import UsageError
    from hocket.base.jsonfile import dump_json
    from hocket.export.mscclpp import to_mscclpp
    from hocket.export.nccl_graph import to_nccl_graph

    section = plan.chosen.section
    if path.name.endswith(".graph.xml"):
        text = to_nccl_graph(section, plan.cluster).encode()
    elif path.suffix == ".json":
        text = dump_json(to_mscclpp(section))
    else:
        raise UsageError(
            f"cannot infer the format of {str(path)!r} from its name",
            hint="end it in .json (MSCCL++) or .graph.xml (NCCL)",
        )
    write_atomically(path, text)
    return path


def _show(
    plan: CollectivePlan, written: list[Path], travel: PropagationChoice | None, as_json: bool
) -> None:
    from hocket.view import collective as view

    if as_json:
        gradients = {} if travel is None else {"gradients": view.propagation_as_dict(travel)}
        emit({**view.as_dict(plan), **gradients, "written": written})
        return
    console().print(view.offers_table(plan))
    click.echo(f"{view.why(plan)}; {view.limit(plan)}")
    # Otherwise a user who knows the host links would wonder why the bound is below their rate.
    if plan.fabric.is_peer_only:
        click.echo("links of the hosts are not used; --links all adds them")
    if travel is not None:
        click.echo()
        console().print(view.propagation_table(travel))
        click.echo(view.propagation_why(travel))
    if written:
        say(f"wrote {', '.join(path.name for path in written)}")


def _show_classes(options: CollectiveOptions, as_json: bool) -> None:
    from hocket.api.collectives import collective_classes
    from hocket.base.units import format_rate
    from hocket.plan.make import find_cluster
    from hocket.view.table import FittedTable, name, number

    with working("planning all classes"):
        found = collective_classes(
            find_cluster(options.on), options.collective, size_bytes=options.size_bytes
        )
    over_rings = _summary(found, "speedup_over_rings")
    over_chains = _summary(found, "speedup_over_rings_and_chains")
    if as_json:
        summaries = {"over_rings": over_rings, "over_rings_and_chains": over_chains}
        emit({"num_classes": len(found), **summaries, "classes": found})
        return
    # The column "of bound" is the achieved share in percent, hence 100 minus the gap.
    rows = [
        [
            ",".join(rank.removeprefix("gpu") for rank in entry["ranks"]),
            str(entry["num_sets"]),
            format_rate(entry["bound_bps"], "B/s"),
            f"{100 - 100 * entry['gap']:.3g} %",
            str(entry["num_trees"]),
            "-" if (gain := entry["speedup_over_rings"]) is None else f"{gain:.2f}x",
        ]
        for entry in found
    ]
    titles = ("sets", "bound", "of bound", "trees", "over rings")
    columns = (name("GPUs"), *map(number, titles))
    console().print(FittedTable(columns=columns, rows=rows))
    click.echo(f"{len(found)} classes of connected sets of three GPUs or more (simulated)")
    for other, gains in (("NCCL's rings", over_rings), ("rings and chains", over_chains)):
        if gains is not None:
            click.echo(
                f"over {other}: geometric mean {gains['geometric_mean']:.2f}x, at most "
                f"{gains['maximum']:.1f}x"
            )


def _summary(found: list[dict[str, Any]], key: str) -> dict[str, float] | None:
    """Geometric mean and maximum of a speed-up over the classes for which it is defined."""
    from statistics import geometric_mean

    gains = [entry[key] for entry in found if entry[key] is not None]
    return {"geometric_mean": geometric_mean(gains), "maximum": max(gains)} if gains else None


def _show_bound(request: CollectiveRequest, as_json: bool) -> None:
    from hocket.base.units import format_rate

    found = request.bound()
    answer(
        as_json,
        found,
        f"no {request.collective} is faster than {format_rate(found['bound_bps'], 'B/s')}",
        f"proven by {found['certificate']['kind']}, which --json shows",
    )
