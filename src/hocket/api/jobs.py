"""Plan a fleet job that names a model, for every device type that the job may use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hocket.base.errors import NoFeasiblePlanError
from hocket.fleet.throughputs.planned import plan_gangs
from hocket.fleet.throughputs.servers import find_servers
from hocket.graph.graph import Graph
from hocket.plan.files import write_plan
from hocket.plan.sections import Parallel
from hocket.planners.candidates import Candidate, Comparison
from hocket.service.spec import JobSpec, on_gang


def planned_job(spec: JobSpec, graph: Graph, device_types: Sequence[str], folder: Path) -> JobSpec:
    """Write plans of a job for each gang size and device type; return the job with plans and
    throughputs.

    A device type that is a machine of unequal devices is planned as a gang of one. Gangs on which
    the model does not fit are excluded; raises `NoFeasiblePlanError` if no gang remains.
    """
    gangs = sorted(set(spec.gangs or (spec.gang,)))
    servers = [find_servers(device_type, is_unequal_allowed=True) for device_type in device_types]
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
        # Names of device types may differ only in characters that are replaced here, so a number
        # makes file names unique.
        file = folder / f"{len(plans)}-{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.json"
        write_plan(file, planned.comparison.problem, chosen.plan)
        speeds[name], plans[name] = 1 / chosen.step_s, str(file.resolve())
    if not plans:
        sizes = " or ".join(map(str, gangs))
        raise NoFeasiblePlanError(
            f"{graph.name} fits no gang of {sizes} devices of one type of this fleet: {why}",
            hint="request a larger gang, or a smaller batch",
        )
    return spec.model_copy(update={
        "throughputs": speeds, "plans": plans,
        "processes": "per-device" if max(gangs) > 1 else spec.processes,
    })  # fmt: skip


def _on_all(comparison: Comparison, gang: int) -> Candidate | None:
    """Return the fastest candidate that runs one process on every device of the gang."""
    if gang == 1:
        return comparison.winner

    def uses_all(candidate: Candidate) -> bool:
        split = None if candidate.plan is None else candidate.plan.get(Parallel)
        return split is not None and len(split.devices) == gang

    fitting = [c for c in comparison.candidates if c.step_s is not None and uses_all(c)]
    return min(fitting, key=lambda c: c.step_s or 0.0, default=None)
