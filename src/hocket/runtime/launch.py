"""Start a person's script once per device of a plan, as torchrun does, and watch over the ranks.

The script calls `hocket.prepare`, which finds its part of the plan by the variables that it is
started with. A rank that is killed or fails is named, and all end with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hocket.base.errors import UsageError
from hocket.plan.files import SavedPlan
from hocket.processes.crew import Crew
from hocket.processes.member import ProcessSpec
from hocket.runtime.connect import MeetingStore
from hocket.runtime.options import OnStart

PLAN_VARIABLE = "HOCKET_PLAN"


def launch(
    plan: Path,
    saved: SavedPlan,
    script: Path,
    arguments: Sequence[str],
    *,
    on_start: OnStart = lambda process_ids: None,
) -> int:
    """Run ``script`` in one process per used device, until all are done; the number of ranks.

    Raises `RunError` where one fails, when all are gone.
    """
    if not script.is_file():
        raise UsageError(f"{str(script)!r} is not a file", hint="name the script that trains")
    if saved.plan.device_of is None:
        raise UsageError("the plan does not say where ops run", hint="run a placement planner")
    used = sorted(set(saved.plan.device_of.tolist())) or [0]
    names = saved.problem.cluster.device_names
    store = MeetingStore()
    try:
        specs = [
            ProcessSpec(
                name=f"rank {rank} ({names[device]})",
                module="hocket.runtime.launched",
                arguments=(str(script), *arguments),
                environment=_variables(rank, len(used), store.port, plan),
                shows_output=True,
            )
            for rank, device in enumerate(used)
        ]
        with Crew(specs) as crew:
            on_start(crew.process_ids)
            for _ in crew.messages():
                pass
    finally:
        store.close()
    return len(used)


def _variables(rank: int, num_ranks: int, port: int, plan: Path) -> dict[str, str]:
    """Those of torchrun, whose agent holds the store that ranks meet at; and the plan."""
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads),
        PLAN_VARIABLE: str(plan.resolve()),
    }
