"""``hocket launch``: run a training script in one process per device of a plan.

With ``--profile`` the plan is computed again with op times that the first rank has measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.options import ADDRESS
from hocket.cli.output import emit

if TYPE_CHECKING:
    from hocket.plan.files import SavedPlan
    from hocket.runtime.launch import Machines

GIVEN = "-"
"""Value of PLAN that means the plan named by HOCKET_PLAN."""


@declare(
    "launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def command(
    *,
    nodes: Annotated[int, option("Machines that take part.", type=click.IntRange(1, 4096))] = 1,
    node_rank: Annotated[
        int, option("Number of this machine, from 0.", type=click.IntRange(0, 4095))
    ] = 0,
    address: Annotated[
        tuple[str, int] | None,
        option("Where ranks of several machines meet: the first one, a free port.", type=ADDRESS),
    ] = None,
    profile: Annotated[
        Path | None, option("Time one early step, and plan again with its times.", metavar="FILE")
    ] = None,
    plan: Annotated[Path, argument()],
    script: Annotated[Path, argument()],
    arguments: Annotated[tuple[str, ...], argument(nargs=-1, type=click.UNPROCESSED)],
    as_json: bool,
) -> None:
    """Run SCRIPT with ARGUMENTS in one process per device of PLAN, as torchrun does.

    In SCRIPT hocket.prepare finds its part of PLAN. A rank that is killed or fails is named, and
    all end with it (exit 5). What ranks print comes out line by line, with the rank before each
    line where there are several; with --json all of it on standard error. Options of hocket come
    before PLAN; what follows SCRIPT is the script's. On several machines start it on each, with the
    same PLAN and --address: each runs the devices of one host of PLAN. PLAN may be - for the plan
    that HOCKET_PLAN names, as a fleet sets it for its jobs.
    """
    from hocket.base.config import given_plan
    from hocket.base.extras import require

    machines = _machines(nodes, node_rank, address)
    require("torch", "training")
    from hocket.api.planned import require_single_ops
    from hocket.plan.files import read_plan
    from hocket.runtime.launch import launch

    if str(plan) == GIVEN:
        plan = Path(given_plan())
    saved = read_plan(plan)
    if profile is not None:
        require_single_ops(saved)
    num_ranks = launch(
        plan, saved, script, arguments,
        machines=machines, shows_stdout=not as_json, profile=profile,
    )  # fmt: skip
    # Only the first machine plans again; the others have no profile of rank 0.
    asks = profile is not None and node_rank == 0
    refined = {"refined": _refined(plan, saved, profile)} if asks and profile else {}
    if as_json:
        emit({"plan": plan, "script": script, "ranks": num_ranks, **refined})


def _refined(plan: Path, saved: SavedPlan, profile: Path) -> dict[str, Any] | None:
    """Plan again with the op times that the first rank has written, and report the difference.

    Returns the file and step time of the new plan; None if no times were written.
    """
    from hocket.api.planned import planned_again
    from hocket.base.units import format_seconds
    from hocket.cost.profile import read_profile

    if not profile.exists():
        click.echo(
            "no step was timed: ranks that are replicas time their ops in their fourth step; "
            "stages of a pipeline and placements do not",
            err=True,
        )
        return None
    better = planned_again(saved, read_profile(profile))
    path = plan.with_suffix(".refined.json")
    better.save(path)
    click.echo(
        f"wrote {profile} and {path}: planned again with measured times, a step takes "
        f"{format_seconds(better.step_s)} ({format_seconds(saved.predicted_step_s or 0)} were "
        f"predicted for {plan})",
        err=True,
    )
    return {"plan": path, "step_s": better.step_s, "profile": profile}


def _machines(nodes: int, node_rank: int, address: tuple[str, int] | None) -> Machines:
    from hocket.base.errors import UsageError
    from hocket.runtime.launch import Machines

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
    return Machines(count=nodes, index=node_rank, address=address[0], port=address[1])
