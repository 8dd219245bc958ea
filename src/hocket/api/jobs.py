"""Job specifications; a job that names a model is planned for every device type it may use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.base.errors import NoFeasiblePlanError
from hocket.service.spec import JobSpec, on_gang, read_spec

if TYPE_CHECKING:
    from hocket.graph.graph import Graph
    from hocket.planners.candidates import Candidate, Comparison

__all__ = [
    "JobSpec",
    "planned_job",
    "read_spec",
]


def planned_job(spec: JobSpec, graph: Graph, kinds: Sequence[str], folder: Path) -> JobSpec:
    """The job with a plan in ``folder`` for its gangs on each kind, and the speed of that plan.

    A kind that is a machine of unequal devices is planned whole, as a gang of one. Gangs for which
    nothing fits are not allowed; raises `NoFeasiblePlanError` where that is all.
    """
    from hocket.fleet.throughputs.planned import plan_gangs
    from hocket.fleet.throughputs.servers import find_servers
    from hocket.plan.files import write_plan

    gangs = sorted(set(spec.gangs or (spec.gang,)))
    servers = [find_servers(kind, is_unequal_allowed=True) for kind in kinds]
    speeds: dict[str, float] = {}
    plans: dict[str, str] = {}
    why = ""
    for planned in plan_gangs(graph, servers, gangs):
        chosen = _on_all(planned.comparison, planned.gang)
        if chosen is None or chosen.plan is None or not chosen.step_s:
            why = planned.comparison.why
            continue
        name = on_gang(spec, planned.gang, planned.servers.name)
        folder.mkdir(parents=True, exist_ok=True)
        # Kinds are named by who serves the fleet; without odd letters two may be alike.
        file = folder / f"{len(plans)}-{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.json"
        write_plan(file, planned.comparison.problem, chosen.plan)
        speeds[name], plans[name] = 1 / chosen.step_s, str(file.resolve())
    if not plans:
        sizes = " or ".join(map(str, gangs))
        raise NoFeasiblePlanError(
            f"{graph.name} fits no {sizes} devices of one kind of this fleet: {why}",
            hint="ask for a larger gang, or a smaller batch",
        )
    is_spread = max(gangs) > 1
    return spec.model_copy(update={
        "throughputs": speeds, "plans": plans,
        "processes": "per-device" if is_spread else spec.processes,
    })  # fmt: skip


def _on_all(comparison: Comparison, gang: int) -> Candidate | None:
    """The fastest candidate that uses every device of the gang, a process for each."""
    from hocket.plan.sections import Parallel

    if gang == 1:
        return comparison.winner

    def uses_all(candidate: Candidate) -> bool:
        shares = None if candidate.plan is None else candidate.plan.get(Parallel)
        return shares is not None and len(shares.devices) == gang

    fitting = [c for c in comparison.candidates if c.step_s is not None and uses_all(c)]
    return min(fitting, key=lambda c: c.step_s or 0.0, default=None)
