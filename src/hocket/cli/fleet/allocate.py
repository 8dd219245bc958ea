"""``hocket fleet allocate``: compute the share of time that each job gets on each device type."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hocket.cli.declare import argument, declare
from hocket.cli.output import console, emit, say

if TYPE_CHECKING:
    from hocket.fleet.allocation import Allocation
    from hocket.fleet.cluster_snapshot import ClusterSnapshot

_MAX_SHOWN = 50
# A tiny problem, solved first so that compiled kernels and scipy are loaded before the time is
# measured.
_TINY = {
    "devices": {"a": 1, "b": 1},
    "jobs": [
        {"id": "1", "throughputs": {"a": 2, "b": 1}, "remaining_steps": 1},
        {"id": "2", "throughputs": {"a": 3, "b": 1}, "remaining_steps": 1},
        {"id": "3", "throughputs": {"a": 1, "b": 1}, "remaining_steps": 1},
    ],
}


@declare("allocate")
def command(
    *,
    problem: Annotated[Path, argument()],
    policy: Annotated[str, "Scheduling policy."] = "las",
    as_json: bool,
) -> None:
    """Share the devices of PROBLEM, a JSON file of devices and jobs, by a policy.

    \b
    las                          equal normalised throughput for all
    finish-time-fairness         nobody ends much later than on an equal part
    makespan                     the last job ends as early as can be
    hierarchical[-fifo]          teams by weight; fair, or a queue, inside
    max-throughput, min-cost     most steps, most steps for their price
    min-cost-slo                 the same with deadlines
    fifo[-strict], shortest-job-first, *-agnostic
    """
    from hocket.fleet.policies import find_policy
    from hocket.fleet.problem_file import parse_problem, read_problem
    from hocket.fleet.solve.check import verify_allocation
    from hocket.fleet.solve.prices import kernels_are_compiled as prices_are_compiled
    from hocket.view.fleet_data import allocation_data

    solve = find_policy(policy)
    snapshot = read_problem(problem)
    if not prices_are_compiled():
        say("compiling the kernels of the price search (once, some seconds)")
    # The solve time that is printed must not contain the loading of scipy and of compiled kernels.
    solve(parse_problem(_TINY))
    start_s = time.process_time()
    answer = solve(snapshot)
    solve_seconds = time.process_time() - start_s
    verify_allocation(snapshot, answer)
    if as_json:
        emit(allocation_data(snapshot, answer, solve_seconds))
    else:
        _print(snapshot, answer, solve_seconds)


def _print(snapshot: ClusterSnapshot, answer: Allocation, solve_seconds: float) -> None:
    from rich.text import Text

    from hocket.base.units import format_seconds
    from hocket.fleet.solve.check import throughputs
    from hocket.view.fleet_data import allocation_notes
    from hocket.view.names import inert
    from hocket.view.table import FittedTable, name, number

    steps = throughputs(snapshot, answer)
    rows = [
        [
            inert(snapshot.ids[job], 80),
            *(f"{share:.1%}" if share > 0 else "–" for share in answer.shares[job]),
            f"{steps[job]:.4g}",
        ]
        for job in range(min(snapshot.num_jobs, _MAX_SHOWN))
    ]
    columns = (
        name("job"),
        *(number(inert(device_type, 24)) for device_type in snapshot.device_types),
        number("steps/s"),
    )
    out = console()
    out.print(FittedTable(columns=columns, rows=rows))
    if snapshot.num_jobs > _MAX_SHOWN:
        out.print(f"  … and {snapshot.num_jobs - _MAX_SHOWN} more jobs; --json has all of them")
    for note, value in allocation_notes(snapshot, answer).items():
        out.print(Text(f"  {note}: {inert(value, 400)}"))
    out.print(
        f"  {answer.policy}: objective {answer.objective:.6g}, gap {answer.gap:.1e}, "
        f"solved in {format_seconds(solve_seconds)}"
    )
