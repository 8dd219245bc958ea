"""``hocket launch``: a training script, once per device of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.cli.output import emit, json_option

if TYPE_CHECKING:
    from hocket.api.launching import Machines


@click.command(
    "launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("--nodes", type=click.IntRange(1, 4096), default=1, help="Machines that take part.")
@click.option("--node-rank", type=click.IntRange(0, 4095), default=0,
              help="Number of this machine, from 0.")  # fmt: skip
@click.option("--address", metavar="HOST:PORT", default=None,
              help="Where ranks of several machines meet: the first one, a free port.")  # fmt: skip
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
def command(
    nodes: int,
    node_rank: int,
    address: str | None,
    plan: Path,
    script: Path,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run SCRIPT with ARGUMENTS in one process per device of PLAN, as torchrun does.

    In SCRIPT hocket.prepare finds its part of PLAN. A rank that is killed or fails is named, and
    all end with it (exit 5). What ranks print comes out as they print it, line by line; with
    --json all of it on standard error. Options of hocket stand before PLAN; what follows SCRIPT is
    the script's. On several machines start it on each, with the same PLAN and --address: each
    carries the devices of one host of PLAN.
    """
    from hocket.base.extras import require

    machines = _machines(nodes, node_rank, address)
    require("torch", "training")
    from hocket.api.launching import launch
    from hocket.api.plans import read_plan

    num_ranks = launch(
        plan, read_plan(plan), script, arguments, machines=machines, shows_stdout=not as_json
    )
    if as_json:
        emit({"plan": str(plan), "script": str(script), "ranks": num_ranks})


def _machines(nodes: int, node_rank: int, address: str | None) -> Machines:
    from hocket.api.launching import Machines
    from hocket.base.errors import UsageError

    if node_rank >= nodes:
        raise UsageError(
            f"machine {node_rank} of {nodes}", hint="machines count from 0: --node-rank 0, 1, …"
        )
    if address is None:
        if nodes > 1:
            raise UsageError(
                "several machines need a place to meet",
                hint="name the first machine and a free port: --address 10.0.0.1:29500",
            )
        return Machines()
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"{address!r} is no HOST:PORT", hint="such as --address 10.0.0.1:29500")
    return Machines(count=nodes, index=node_rank, address=host.strip("[]"), port=int(port))
