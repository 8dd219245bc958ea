"""``hocket collective``: plan a collective over given links, with a proven bound of its rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.cli.options import FILE, ModelOptions, size_option_value
from hocket.cli.output import console, emit, json_option, say, working
from hocket.cli.sources import load_graph
from hocket.cli.written import require_folder

if TYPE_CHECKING:
    from hocket.api.collectives import CollectiveRequest
    from hocket.planners.communication.collective import CollectivePlan
    from hocket.planners.communication.priority import PropagationChoice


def _collective(_: click.Context, __: click.Parameter, text: str) -> str:
    """A name of a collective, also as ``all-reduce`` or ``all_reduce``."""
    from hocket.base.errors import unknown_name
    from hocket.plan.sections.communication import COLLECTIVES

    name = text.lower().replace("-", "").replace("_", "")
    if name not in COLLECTIVES:
        raise unknown_name("collective", text, COLLECTIVES)
    return name


@click.command("collective")
@click.argument("collective", callback=_collective, metavar="COLLECTIVE")
@click.option("--on", required=True, metavar="CLUSTER",
              help="A TOML file, a preset, shorthand, NCCL's topology XML, the matrix of "
              "nvidia-smi topo -m (.txt), JSON, or 'auto' for this machine.")  # fmt: skip
@click.option("--gpus", metavar="LIST",
              help="Devices of the job, in the order of the ranks: 0,1,2,4 or 0-3 or names. "
              "[default: all]")  # fmt: skip
@click.option("--size", "size_bytes", callback=size_option_value, metavar="SIZE",
              help="Bytes of the message, such as 64MiB; decides by time.")  # fmt: skip
@click.option("--root", metavar="DEVICE", help="Of broadcast and reduce. [default: the best]")
@click.option("--relay", is_flag=True, help="Let devices that are not in the job forward.")
@click.option("--links", type=click.Choice(["auto", "peer", "all"]), default="auto",
              help="Links between devices alone where they suffice, or those "
              "of the hosts as well.")  # fmt: skip
@click.option("--trees", "max_trees", type=click.IntRange(1, 10_000),
              help="Keep at most so many trees of an all-reduce, the heaviest.")  # fmt: skip
@click.option("--blink", "with_blink", is_flag=True,
              help="Also: the trees of Blink's multiplicative weights.")  # fmt: skip
@click.option("-o", "--output", type=FILE, help="Schedule to write.")
@click.option("--report", type=FILE, help="HTML report to write.")
@click.option("--export", "export", type=FILE,
              help="Program to write: NAME.json for MSCCL++, NAME.graph.xml for NCCL (rings and "
              "chains only).")  # fmt: skip
@click.option("--bound", "bound_only", is_flag=True,
              help="The bound alone, for clusters of any size.")  # fmt: skip
@click.option("--gradients", "model", metavar="MODEL",
              help="Also: a data-parallel step of this model (or file of a graph), its gradients "
              "sent in several orders.")  # fmt: skip
@json_option
def command(
    collective: str,
    on: str,
    gpus: str | None,
    size_bytes: int | None,
    root: str | None,
    relay: bool,
    links: str,
    max_trees: int | None,
    with_blink: bool,
    output: Path | None,
    report: Path | None,
    export: Path | None,
    bound_only: bool,
    model: str | None,
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
    request = CollectiveRequest(
        on=find_cluster(on), collective=collective, gpus=gpus, root=root, size_bytes=size_bytes,
        relay=relay, links=links,
    )  # fmt: skip
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
        emit({**view.as_dict(plan), **gradients, "written": [str(path) for path in written]})
        return
    console().print(view.offers_table(plan))
    click.echo(f"{view.why(plan)}; {view.limit(plan)}")
    if plan.fabric.is_peer_only:
        click.echo("links of the hosts are not used; --links all adds them")
    if travel is not None:
        click.echo()
        console().print(view.propagation_table(travel))
        click.echo(view.propagation_why(travel))
    if written:
        say(f"wrote {', '.join(path.name for path in written)}")


def _show_bound(request: CollectiveRequest, as_json: bool) -> None:
    from hocket.base.units import format_rate

    found = request.bound()
    if as_json:
        emit(found)
        return
    click.echo(f"no {request.collective} is faster than {format_rate(found['bound_bps'], 'B/s')}")
    click.echo(f"proven by {found['certificate']['kind']}, which --json shows")
