"""Start a user's script once per device of a plan, as torchrun does, and supervise the ranks.

The script calls `hocket.prepare`, which reads its rank and the path of the plan from environment
variables. If a rank fails or is killed, the error names it and all other ranks are ended. On
several machines ``hocket launch`` runs on each one and starts the ranks of that machine; all ranks
rendezvous at the address of the first machine.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.base.config import PLAN_VARIABLE
from hocket.base.errors import UsageError
from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import WorkerGroup
from hocket.runtime.ranks import LOOPBACK, MeetingStore

PROFILE_VARIABLE = "HOCKET_PROFILE"


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a run, as seen by one of them."""

    count: int = 1
    index: int = 0
    """Index of this machine."""
    address: str = LOOPBACK
    """Address of the first machine, where all ranks rendezvous."""
    port: int = 0
    """Port of the rendezvous; 0 means any free port, which works only with one machine."""


def launch(
    plan: Path,
    saved: SavedPlan,
    script: Path,
    arguments: Sequence[str],
    *,
    machines: Machines = Machines(),  # noqa: B008 - frozen
    shows_stdout: bool = True,
    profile: Path | None = None,
) -> int:
    """Run ``script`` in one process per used device; return the number of ranks on this machine.

    With ``shows_stdout=False`` the standard output of ranks goes to standard error. The first rank
    writes the times of one early step to ``profile``. Raises `RunError` if a rank fails, once all
    ranks of this machine have ended.
    """
    if not script.is_file():
        raise UsageError(f"{str(script)!r} is not a file", hint="name the script that trains")
    names = used_devices(saved.problem, saved.plan)
    own = _own_ranks(saved, names, machines)
    profiled = {} if profile is None else {PROFILE_VARIABLE: str(profile.resolve())}
    if profile is not None:
        profile.unlink(missing_ok=True)  # else an earlier run's times could pass for this one's
    holds_store = machines.index == 0
    store = MeetingStore(machines.address, machines.port) if holds_store else None
    try:
        specs = [
            WorkerSpec(
                name=f"rank {rank} ({names[rank]})",
                module="hocket.runtime.rank_script",
                arguments=(str(script), *arguments),
                environment=profiled
                | _variables(
                    rank, own, len(names), store.port if store else machines.port, machines, plan
                ),
                shows_output=True,
                has_our_stdout=shows_stdout,
            )
            for rank in own
        ]
        with WorkerGroup(specs) as group:
            for _ in group.messages():
                pass
    finally:
        if store is not None:
            store.close()
    return len(own)


def used_devices(problem: Problem, plan: Plan) -> list[str]:
    """Return the names of the devices that a plan uses, in the order of their ranks."""
    parallel = plan.get(Parallel)
    if parallel is not None and parallel.layers is None:
        return list(parallel.devices)
    if parallel is not None:
        return [name for names in parallel.rank_devices for name in names]
    if plan.device_of is None:
        raise UsageError(
            "the plan neither places ops nor splits the batch or the model",
            hint="make one with hocket plan or hocket parallel",
        )
    known = problem.cluster.device_names
    return [known[device] for device in sorted(set(plan.device_of.tolist())) or [0]]


def _own_ranks(saved: SavedPlan, names: Sequence[str], machines: Machines) -> list[int]:
    """Return the ranks of this machine: one host of the plan, or an equal part of all ranks."""
    if machines.count == 1:
        return list(range(len(names)))
    host_of = {device.name: device.host for device in saved.problem.cluster.devices}
    hosts = list(dict.fromkeys(host_of[name] for name in names))
    if len(hosts) == machines.count:
        return [rank for rank, n in enumerate(names) if host_of[n] == hosts[machines.index]]
    if len(names) % machines.count:
        raise UsageError(
            f"the plan uses {len(names)} devices of {len(hosts)} hosts, which {machines.count} "
            "machines cannot share",
            hint=f"start it with --nodes {len(hosts)}",
        )
    each = len(names) // machines.count
    return list(range(machines.index * each, (machines.index + 1) * each))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _variables(
    rank: int, own: Sequence[int], num_ranks: int, port: int, machines: Machines, plan: Path
) -> dict[str, str]:
    """Return the environment variables of a rank: the variables of torchrun, and the plan."""
    threads = max(1, (os.cpu_count() or 1) // len(own))
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": str(own.index(rank)),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(len(own)),
        "GROUP_RANK": str(machines.index),
        "MASTER_ADDR": machines.address,
        "MASTER_PORT": str(port),
        # Rank 0 then connects to the launcher's store instead of opening one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads),
        PLAN_VARIABLE: str(plan.resolve()),
    }
    if _is_loopback(machines.address):
        # By default gloo uses the interface that the host name resolves to, not loopback.
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found
