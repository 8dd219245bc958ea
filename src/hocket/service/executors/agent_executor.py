"""Runs attempts on other machines, each with an agent that polls this service.

An agent calls repeatedly (`AgentExecutor.sync`): it reports its attempts, and the response lists
all attempts that it should start, stop and forget. No single call matters: orders are repeated
until a report shows their effect, and the name of an attempt makes them idempotent on the agent,
which runs a `LocalExecutor`.

A call renews a lease on both sides. The agent counts from when it sent the call, this side from
when the call arrived, so the agent's lease always expires first. Its supervisors then end their
attempts by themselves, even if the agent is dead. Only after its own, longer time does this side
give up the agent, its devices and attempts. So no attempt runs twice. Assignments are on disk, and
after a restart nothing is given up before a lease has passed.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hocket.base.errors import RunError
from hocket.fleet.rounds.state import FleetDevice
from hocket.service.errors import ConflictError
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.attempts import CANNOT_START
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    STARTING,
    Assignment,
    AttemptName,
    Poll,
    Status,
)

LEASE_S = 45.0
"""Seconds without a call after which an agent counts as lost."""
ENDS_AFTER = 0.5
"""Fraction of the lease after which attempts without contact are stopped."""
GRACE = 0.2
"""Fraction of the lease that stopped attempts get to end; the rest is margin for slow machines."""
GANG_GRACE_S = 5.0
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_AGENTS, _ASSIGNED = "agents.json", "assigned"


@dataclass
class _Agent:
    """Last known state of an agent."""

    identity: str
    address: str
    devices: tuple[FleetDevice, ...]
    heard_s: float
    """Monotonic time of its last call; before the first call, the start time of this service."""
    attempts: dict[AttemptName, Status] = field(default_factory=dict)


class _AgentPart(NamedTuple):
    """Part of an attempt that one agent runs."""

    agent: str
    assignment: dict[str, Any]


class AgentExecutor:
    """An `Executor` whose machines call the service; jobs report to ``url`` with
    ``fingerprint``."""

    def __init__(
        self, folder: Path, url: str, fingerprint: str, *, lease_s: float = LEASE_S
    ) -> None:
        self.lease_s = lease_s
        self._folder = folder
        self._environment = {"HOCKET_URL": url, "HOCKET_FINGERPRINT": fingerprint}
        self._changing = threading.Lock()
        self._agents: dict[str, _Agent] = {}
        self._parts: dict[AttemptName, tuple[_AgentPart, ...]] = {}
        self._stops: dict[AttemptName, float] = {}
        self._forgets: set[AttemptName] = set()
        self._seen: set[tuple[str, AttemptName]] = set()
        """Parts that their agents have reported; a part that is no longer reported is lost."""
        self._lost: dict[tuple[str, AttemptName], str] = {}
        self._refused: dict[AttemptName, str] = {}
        self._load()

    # ── what the daemon asks ──

    def start(self, assignment: Assignment) -> None:
        """Have the agents of the devices begin their parts of an attempt."""
        name = assignment.name
        with self._changing:
            if name in self._parts or name in self._refused:
                return
            parts = self._split(assignment)
            if isinstance(parts, str):
                self._refused[name] = parts
                return
            content = {"name": list(name), "parts": [part._asdict() for part in parts]}
            try:
                files.write_json(self._folder / _ASSIGNED / f"{name}.json", content)
            except OSError as error:
                raise RunError(f"cannot start attempt {name}: {error}") from None
            self._parts[name] = parts

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """End an attempt on all its agents; one that has not begun never will."""
        with self._changing:
            self._stops[name] = min(self._stops.get(name, grace_s), grace_s)

    def kill(self, name: AttemptName) -> None:
        """End an attempt now."""
        self.stop(name, 0.0)

    def poll(self) -> Poll:
        """Last reports of the agents; agents that have not called for too long are given up."""
        with self._changing:
            self._give_up_silent()
            names = {name for agent in self._agents.values() for name in agent.attempts}
            found = [self._status(name) for name in sorted(names | self._parts.keys())]
            refused = [
                Status(name=name, phase=EXITED, exit_code=CANNOT_START, detail=why)
                for name, why in self._refused.items()
            ]
            devices = tuple(one for agent in self._agents.values() for one in agent.devices)
        return Poll(attempts=[*refused, *found], devices=devices)

    def forget(self, name: AttemptName) -> None:
        """Drop an attempt that has ended, here and on its agents."""
        with self._changing:
            self._refused.pop(name, None)
            self._parts.pop(name, None)
            self._stops.pop(name, None)
            self._seen = {one for one in self._seen if one[1] != name}
            self._lost = {key: why for key, why in self._lost.items() if key[1] != name}
            (self._folder / _ASSIGNED / f"{name}.json").unlink(missing_ok=True)
            if any(name in agent.attempts for agent in self._agents.values()):
                self._forgets.add(name)

    def close(self) -> None:
        """Do nothing: agents continue without this executor."""

    # ── what agents ask ──

    def sync(
        self,
        agent_name: str,
        identity: str,
        address: str,
        devices: Sequence[tuple[str, str]],
        statuses: Sequence[Status],
    ) -> dict[str, Any]:
        """Store the report of an agent and return its orders.

        Raises `ConflictError` if another agent of this name has a lease.
        """
        with self._changing:
            self._give_up_silent()
            agent = self._agents.get(agent_name)
            if agent is not None and agent.identity != identity:
                hint = "give each machine a token and so a name of its own, or wait for its lease"
                raise ConflictError(f"another agent named {agent_name!r} holds a lease", hint=hint)
            named = tuple(
                FleetDevice(
                    name=f"{agent_name}/{device}", device_type=device_type, server=agent_name
                )
                for device, device_type in devices
            )
            if agent is None or agent.devices != named or agent.address != address:
                agent = _Agent(identity, address, named, time.monotonic())
                self._agents[agent_name] = agent
                self._store_agents()
            agent.heard_s = time.monotonic()
            agent.attempts = {one.name: one for one in statuses}
            self._note_parts(agent_name, agent)
            return self._orders(agent_name, agent)

    def log_file(self, agent_name: str, name: AttemptName) -> Path | None:
        """Log file of an agent's part of an attempt; None if the agent has no such part."""
        with self._changing:
            parts = self._parts.get(name, ())
        for at, part in enumerate(parts):
            if part.agent == agent_name:
                path = Path(part.assignment["log_file"])
                # Other parts of a gang have their own files, because the outputs of two parts in
                # one file would mix.
                return path if at == 0 else path.with_name(f"{path.stem}.{at}.log")
        return None

    def has_part(self, agent_name: str, job: int) -> bool:
        """True if an attempt of a job is assigned to an agent."""
        with self._changing:
            return any(
                name.job == job and part.agent == agent_name
                for name, parts in self._parts.items()
                for part in parts
            )

    def _orders(self, agent_name: str, agent: _Agent) -> dict[str, Any]:
        mine = {
            name: part
            for name, parts in self._parts.items()
            for part in parts
            if part.agent == agent_name
        }
        starts = [
            part.assignment
            for name, part in mine.items()
            if name not in agent.attempts
            and (agent_name, name) not in self._seen
            and name not in self._stops
        ]
        stops = {name: self._stops[name] for name in (mine.keys() | agent.attempts.keys())
                 if name in self._stops}  # fmt: skip
        self._forgets = {
            name
            for name in self._forgets
            if any(name in one.attempts for one in self._agents.values())
        }
        return {
            "lease_s": self.lease_s,
            "ends_after_s": self.lease_s * ENDS_AFTER,
            "grace_s": self.lease_s * GRACE,
            "starts": starts,
            "stops": [[*name, grace_s] for name, grace_s in stops.items()],
            "forgets": [list(name) for name in self._forgets if name in agent.attempts],
        }

    def _note_parts(self, agent_name: str, agent: _Agent) -> None:
        for name in agent.attempts.keys() & self._parts.keys():
            self._seen.add((agent_name, name))
        for key in self._seen:
            if key[0] == agent_name and key[1] not in agent.attempts and key not in self._lost:
                self._lost[key] = f"agent {agent_name} no longer has it"

    # ── leases ──

    def _give_up_silent(self) -> None:
        now_s = time.monotonic()
        silent = [
            name for name, agent in self._agents.items() if now_s - agent.heard_s > self.lease_s
        ]
        for agent_name in silent:
            del self._agents[agent_name]
            for name, parts in self._parts.items():
                if any(part.agent == agent_name for part in parts):
                    why = f"no contact with agent {agent_name} for {self.lease_s:.0f} s"
                    self._lost[agent_name, name] = why
        if silent:
            self._store_agents()

    # ── statuses ──

    def _status(self, name: AttemptName) -> Status:
        if name not in self._parts:
            # An attempt of an earlier state: the daemon will end or forget it.
            return next(
                agent.attempts[name] for agent in self._agents.values() if name in agent.attempts
            )
        found = [self._part_status(name, part.agent) for part in self._parts[name]]
        over = [one for one in found if one.phase in (EXITED, LOST)]
        bad = next((one for one in over if one.phase == LOST or one.exit_code != 0), None)
        if len(over) == len(found):
            return next((one for one in over if one.phase == LOST), bad or over[0])
        if bad is not None:
            # A gang that has lost a rank does no useful work any more.
            self._stops[name] = min(self._stops.get(name, GANG_GRACE_S), GANG_GRACE_S)
        is_running = any(one.phase == RUNNING for one in found)
        return Status(name=name, phase=RUNNING if is_running else STARTING)

    def _part_status(self, name: AttemptName, agent_name: str) -> Status:
        if (agent_name, name) in self._lost:
            return Status(name=name, phase=LOST, detail=self._lost[agent_name, name])
        agent = self._agents.get(agent_name)
        if agent is None:
            return Status(name=name, phase=LOST, detail=f"agent {agent_name} is not connected")
        if name in agent.attempts:
            return agent.attempts[name]
        return Status(name=name, phase=STARTING)

    # ── parts ──

    def _split(self, assignment: Assignment) -> tuple[_AgentPart, ...] | str:
        """Split an attempt over agents; returns the reason as text if that is impossible."""
        by_agent: dict[str, list[str]] = {}
        for device in assignment.devices:
            agent_name, _, local = device.partition("/")
            by_agent.setdefault(agent_name, []).append(local)
        missing = [one for one in by_agent if one not in self._agents]
        if missing:
            return f"agent {missing[0]} is not connected"
        if len(by_agent) > 1 and assignment.processes == "one":
            return (
                'one process cannot use devices of several machines; write processes = "per-device"'
            )
        shared = {**assignment.environment, **self._environment}
        shared.pop("HOCKET_ENDPOINT", None)
        if len(by_agent) > 1:
            digest = hashlib.sha256(str(assignment.name).encode()).digest()
            shared["MASTER_ADDR"] = self._agents[next(iter(by_agent))].address
            shared["MASTER_PORT"] = str(_FIRST_PORT + int.from_bytes(digest[:4]) % _NUM_PORTS)
            shared["WORLD_SIZE"] = str(len(assignment.devices))
        parts, first_rank = [], 0
        for agent_name, devices in by_agent.items():
            own = assignment._replace(
                environment=shared, devices=tuple(devices), first_rank=first_rank
            )
            parts.append(_AgentPart(agent_name, own.to_data()))
            first_rank += len(devices)
        return tuple(parts)

    # ── the folder ──

    def _load(self) -> None:
        try:
            (self._folder / _ASSIGNED).mkdir(mode=0o700, parents=True, exist_ok=True)
            now_s = time.monotonic()
            for name, content in (files.read_json(self._folder / _AGENTS) or {}).items():
                devices = tuple(FleetDevice(**one) for one in content.pop("devices"))
                self._agents[name] = _Agent(devices=devices, heard_s=now_s, **content)
            for path in sorted((self._folder / _ASSIGNED).glob("*.json")):
                content = json.loads(path.read_text())
                parts = tuple(_AgentPart(**one) for one in content["parts"])
                self._parts[AttemptName(*content["name"])] = parts
        except (OSError, *files.DAMAGED) as error:
            raise RunError(f"cannot read the orders to agents: {error}") from None

    def _store_agents(self) -> None:
        content = {
            name: {
                "identity": agent.identity,
                "address": agent.address,
                "devices": [asdict(device) for device in agent.devices],
            }
            for name, agent in self._agents.items()
        }
        try:
            files.write_json(self._folder / _AGENTS, content)
        except OSError as error:
            raise RunError(f"cannot store the list of agents: {error}") from None
