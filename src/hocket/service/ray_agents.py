"""Runs jobs on a Ray cluster: an agent on each of its nodes joins the service as on any machine.

`RayDriver` is the daemon's side. It keeps a process alive that talks to Ray (``python -m
hocket.service.ray_agents``), because Ray ends its clients when the head of the cluster dies. That
process starts a detached actor on each node that offers devices. The actor reserves all of them, so
that Ray gives them to nobody else, and runs an `Agent`. Actors outlive driver and service, and end
themselves after `PATIENCE_S` without an answer of the service.

A node offers devices by custom resources ``accel_<type>``, or by Ray's resource ``GPU`` with a
label for their device type.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from hocket.base.config import fleet_folder
from hocket.base.errors import HocketError, MissingExtraError, RunError
from hocket.fleet.rounds.state import FleetDevice
from hocket.processes.start import start_module
from hocket.service.agent import Agent, AgentClient
from hocket.service.client import FleetClient, find_service

LOOK_S = 1.0
"""Interval at which the nodes of the cluster are compared with the agents."""
RESTART_S = 2.0
"""Time before a driver that died is started again."""
JOIN_S = 90.0
"""Time within which the driver must reach the cluster when the service starts."""
PATIENCE_S = 600.0
"""An agent whose service has not answered for so long gives the devices back to Ray."""
# Log of the driver process, in the state folder.
DRIVER_LOG = "ray-driver.log"
GPU = "GPU"
# Custom resources whose names begin so stand for devices.
_PREFIX = "accel_"
# Labels of a node that name its device type; the first one that is set counts.
_TYPE_LABELS = ("hocket/device-type", "ray.io/accelerator-type")
# Printed by the driver process once it has joined the cluster.
_JOINED = b"joined\n"


class RayDriver:
    """Keeps the driver process alive until `close`; agents continue to run after that."""

    def __init__(self, address: str, folder: Path, url: str, fingerprint: str) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingExtraError("Ray is not installed", hint="pip install 'hocket[ray]'")
        self._arguments = (address, str(folder), url, fingerprint)
        self._log = folder / DRIVER_LOG
        self._is_closing = threading.Event()
        self._driver = self._start()
        self._wait_until_joined()
        self._watcher = threading.Thread(target=self._watch, name="ray-driver", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End the driver process."""
        self._is_closing.set()
        self._watcher.join()
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._log, "wb") as log:
            return start_module(
                "hocket.service.ray_agents",
                self._arguments,
                output=subprocess.PIPE,
                errors=log,
                stdin=subprocess.PIPE,
                folder="/",
            )

    def _wait_until_joined(self) -> None:
        timer = threading.Timer(JOIN_S, self._driver.kill)
        timer.start()
        assert self._driver.stdout is not None
        has_joined = self._driver.stdout.readline() == _JOINED
        timer.cancel()
        if not has_joined:
            self._end()
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise RunError(
                f"cannot join the Ray cluster {self._arguments[0]!r}: "
                f"{lines[-1][:500] if lines else 'no answer'}",
                hint="give the address that 'ray start --head' printed, and make this machine"
                " a node of the cluster with 'ray start --address=HOST:PORT'",
            )

    def _watch(self) -> None:
        while not self._is_closing.wait(RESTART_S):
            if self._driver.poll() is not None:
                self._end()
                self._driver = self._start()

    def _end(self) -> None:
        driver = self._driver
        driver.kill()
        driver.wait()
        for pipe in (driver.stdin, driver.stdout):
            if pipe is not None:
                pipe.close()


# ── the driver process ───────────────────────────────────────────────────────────────────────────


class RayNode(NamedTuple):
    """A living node that offers devices."""

    node_id: str
    name: str
    num_devices: Mapping[str, int]
    """Number of devices by device type."""
    num_gpus: int
    resources: Mapping[str, float]
    """Custom resources of Ray that stand for the devices."""


def read_nodes(rows: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """The living nodes of ``ray.nodes()`` that offer devices; names are unique among them."""
    nodes = [node for row in rows if row["Alive"] and (node := _read_node(row)).num_devices]
    count = Counter(node.name for node in nodes)
    return [
        node if count[node.name] == 1 else node._replace(name=f"{node.name}-{node.node_id[:8]}")
        for node in nodes
    ]


def _read_node(row: Mapping[str, Any]) -> RayNode:
    resources: Mapping[str, float] = row["Resources"]
    num_gpus = int(resources.get(GPU, 0))
    custom = {
        name: amount
        for name, amount in resources.items()
        if name.startswith(_PREFIX) and name != _PREFIX and amount >= 1
    }
    num_devices = {name.removeprefix(_PREFIX): int(amount) for name, amount in custom.items()}
    labels: Mapping[str, str] = row.get("Labels") or {}
    label = next((labels[name] for name in _TYPE_LABELS if labels.get(name)), "")
    if not num_devices and num_gpus and label:
        num_devices = {label.lower(): num_gpus}
    name = (row.get("NodeName") or row["NodeManagerAddress"]).replace("/", "-")
    return RayNode(row["NodeID"], name, num_devices, num_gpus, custom)


class NodeAgent:
    """Actor that runs the agent of one node; its process ends with the agent."""

    def __init__(
        self,
        name: str,
        device_types: list[str],
        address: tuple[str, str, str],
        namespace: str,
    ) -> None:
        import ray

        url, token, fingerprint = address
        # Ray names the GPUs that it reserved for this actor; other devices are only counted.
        gpus = ray.get_runtime_context().get_accelerator_ids().get(GPU, [])
        numbers = (
            gpus if len(gpus) == len(device_types) else [str(at) for at in range(len(device_types))]
        )
        devices = tuple(
            FleetDevice(name=f"{device_type}-{number}", device_type=device_type)
            for device_type, number in zip(device_types, numbers, strict=True)
        )
        folder = fleet_folder().parent / namespace / name
        agent = Agent(folder, devices, AgentClient(url, token, fingerprint, name))
        threading.Thread(target=_run, args=(agent,), name="agent", daemon=True).start()


def _run(agent: Agent) -> None:
    try:
        agent.run(lambda: None, lambda trouble: None, PATIENCE_S)
    finally:
        # The driver starts another actor while the node is there.
        os._exit(1)


def start_agents(client: FleetClient, url: str, fingerprint: str, namespace: str) -> None:
    """Start an agent on each node that has none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    rows: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    for node in read_nodes(rows):
        actor_name = f"agent-{node.node_id}"
        with contextlib.suppress(ValueError):
            ray.get_actor(actor_name, namespace)
            continue
        token = _new_token(client, node.name)
        device_types = [
            device_type
            for device_type, count in sorted(node.num_devices.items())
            for _ in range(count)
        ]
        ray.remote(NodeAgent).options(
            name=actor_name,
            namespace=namespace,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            num_gpus=node.num_gpus or None,
            resources=dict(node.resources),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        ).remote(node.name, device_types, (url, token, fingerprint), namespace)


def _new_token(client: FleetClient, name: str) -> str:
    """A new token for the agent of a node; the one of an earlier agent opens nothing any more."""
    roles = {one["name"]: one["role"] for one in client.get("/v1/tokens")["tokens"]}
    if roles.get(name, "agent") != "agent":
        raise RunError(f"node {name!r} has the name of a user", hint="start it with --node-name")
    if name in roles:
        client.delete(f"/v1/tokens/{quote(name, safe='')}")
    return str(client.post("/v1/tokens", {"name": name, "role": "agent"})["token"])


def _end_with_input() -> None:
    """End with the daemon, even while a call to Ray does not return."""
    # Not sys.stdin, whose lock would block the exit of the interpreter.
    while os.read(0, 1024):
        pass
    os._exit(0)


def main(address: str, folder: str, url: str, fingerprint: str) -> None:
    """Keep an agent on every node of the cluster until the daemon ends."""
    import ray

    threading.Thread(target=_end_with_input, daemon=True).start()
    namespace = f"hocket-{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}"
    ray.init(address=address, namespace=namespace, log_to_driver=False)
    os.write(1, _JOINED)
    client = find_service(Path(folder))
    trouble = ""
    while True:
        try:
            start_agents(client, url, fingerprint, namespace)
        except HocketError as error:
            if str(error) != trouble:
                trouble = str(error)
                sys.stderr.write(f"{trouble}\n")
        time.sleep(LOOK_S)


if __name__ == "__main__":
    # By its importable name, so that Ray finds the class of the actor on other nodes.
    from hocket.service import ray_agents

    ray_agents.main(*sys.argv[1:])
