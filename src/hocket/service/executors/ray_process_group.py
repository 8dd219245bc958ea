"""One attempt on Ray: a placement group on exactly its nodes, and an actor on each that works.

Each action is written to the attempt's folder before it is done, so that the next driver goes on
where the last one was killed:

    placed.json   the nodes; placement group and actors may exist from now on
    sent.json     the actors may have been asked to begin; without this file nothing has run

An attempt whose actors are gone though they were asked to begin is lost: it is never begun again.
The placement group reserves the devices, so two attempts on one device could not both be placed
even if they were asked for.
"""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.service.executors import attempt_folder as files
from hocket.service.executors.attempt_folder import AttemptOrder, Result
from hocket.service.executors.executor import RUNNING, STARTING, Phase
from hocket.service.executors.ray_nodes import GPU, NODE_ID_LABEL, RayBundle
from hocket.service.executors.ray_supervisor import Supervisor

PLACED = "placed.json"
SENT = "sent.json"

OTHERS_GRACE_S = 5.0
"""For the other nodes of a gang when one of them failed."""
ACTOR_DELAY_S = 15.0
"""An actor that has not ended its part so long after the grace is killed."""


@dataclass
class NodePart:
    """Part of an attempt on one node."""

    actor: Any = None
    port: int | None = None
    """Known once the actor is up."""
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)
    """Calls without an answer yet, by method, with their arguments."""
    result: Result | None = None

    def call(self, method: str, *arguments: Any) -> None:
        """Ask the actor; every method of it may be called again without harm."""
        self.calls[method] = (getattr(self.actor, method).remote(*arguments), arguments)


class RayProcessGroup:
    """The parts of one attempt, from their reservation to their end."""

    def __init__(
        self, folder: Path, order: AttemptOrder, bundles: list[RayBundle], namespace: str
    ) -> None:
        self.folder = folder
        self._order = order
        self._bundles = bundles
        self._namespace = namespace
        # One process sees the whole gang: then the other nodes are only reserved.
        num_working = len(bundles) if order.processes == "per-device" else 1
        self._parts = [NodePart() for _ in range(num_working)]
        self._results: list[Result] = []
        """Of parts, in the order in which they ended."""
        self._grace_s = float("inf")
        self._kill_at_s = float("inf")
        sent = files.read_json(folder / SENT)
        self._is_sent = sent is not None
        if sent is None:
            self._make_actors()
        else:
            self._find_actors()
            self._begin(sent["address"], sent["port"])

    @property
    def phase(self) -> Phase:
        """True if its commands run."""
        is_begun = self._is_sent and not any("begin" in part.calls for part in self._parts)
        return RUNNING if is_begun else STARTING

    def calls(self) -> dict[Any, tuple[NodePart, str]]:
        """Calls to wait for."""
        return {
            reference: (part, method)
            for part in self._parts
            for method, (reference, _) in part.calls.items()
        }

    def take(self, part: NodePart, method: str) -> None:
        """An answer is there, or the news that there will be none."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        reference, arguments = part.calls.pop(method)
        try:
            value = ray.get(reference)
        except ActorUnavailableError:
            # A connection broke; whether the actor lives is not known yet.
            part.call(method, *arguments)
        except RayError as error:
            self._lose(part, _cause(error))
        else:
            if method == "meet":
                part.port = value
            elif method == "ended":
                self._end(part, Result(*value))

    def react(self, living: set[str]) -> Result | None:
        """Do what is due; the result once nothing runs any more."""
        return self._go_on() if self._is_sent else self._wait_for_nodes(living)

    def release(self) -> None:
        """Give actors and devices back to Ray; the result is stored."""
        for part in self._parts:
            kill(part.actor)
        remove_group(_group_name(self.folder.name, self._namespace))

    # ── before anything runs ──

    def _make_actors(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self._placement_group()
        for index, part in enumerate(self._parts):
            resources = dict(self._bundles[index].reserved)
            actor = ray.remote(Supervisor).options(
                name=_actor_name(self.folder.name, index),
                namespace=self._namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                num_cpus=0,
                num_gpus=resources.pop(GPU, None),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            part.actor = actor.remote(self._order_of(index))
            part.call("meet")

    def _placement_group(self) -> Any:
        import ray

        name = _group_name(self.folder.name, self._namespace)
        try:
            return ray.util.get_placement_group(name)
        except ValueError:
            return ray.util.placement_group(
                [dict(bundle.reserved) for bundle in self._bundles],
                # Each bundle has a node of its own; STRICT_PACK ignored labels in older Rays.
                strategy="PACK",
                name=name,
                lifetime="detached",
                bundle_label_selector=[{NODE_ID_LABEL: each.node_id} for each in self._bundles],
            )

    def _is_placed_as_asked(self) -> bool:
        import ray

        group = ray.util.placement_group_table(self._placement_group())
        nodes: dict[int, str] = group["bundles_to_node_id"]
        return [nodes[at] for at in sorted(nodes)] == [each.node_id for each in self._bundles]

    def _order_of(self, index: int) -> dict[str, Any]:
        """Order for one node."""
        order = self._order
        if order.processes != "per-device":
            return order._asdict()
        service_state = {
            "WORLD_SIZE": str(len(order.devices)),
            "GROUP_RANK": str(index),
            "GROUP_WORLD_SIZE": str(len(self._bundles)),
        }
        bundle = self._bundles[index]
        part = order._replace(
            devices=list(bundle.devices),
            first_rank=bundle.first_rank,
            environment=service_state | order.environment,
        )
        return part._asdict()

    def _wait_for_nodes(self, living: set[str]) -> Result | None:
        if files.asked_grace_s(self.folder) is not None:
            return Result(-signal.SIGTERM, "stopped before it began")
        if self._results:
            return self._verdict()
        if any(bundle.node_id not in living for bundle in self._bundles):
            return _lost("a node of its devices died before it began")
        ports = [part.port for part in self._parts if part.port is not None]
        if len(ports) == len(self._parts):
            if not self._is_placed_as_asked():
                return _lost("Ray placed it on other nodes than those of its devices")
            address = self._bundles[0].address
            files.write_json(self.folder / SENT, {"address": address, "port": ports[0]})
            self._is_sent = True
            self._begin(address, ports[0])
        return None

    # ── afterwards ──

    def _find_actors(self) -> None:
        import ray

        for index, part in enumerate(self._parts):
            try:
                part.actor = ray.get_actor(_actor_name(self.folder.name, index), self._namespace)
            except ValueError:
                self._end(part, _lost("its supervisor is gone"))

    def _begin(self, address: str, port: int) -> None:
        for part in self._running():
            part.call("begin", (address, port))
            part.call("ended")

    def _running(self) -> list[NodePart]:
        return [part for part in self._parts if part.result is None]

    def _go_on(self) -> Result | None:
        if not self._running():
            return self._verdict()
        asked_s = files.asked_grace_s(self.folder)
        if any(_is_bad(result) for result in self._results):
            asked_s = min(OTHERS_GRACE_S, OTHERS_GRACE_S if asked_s is None else asked_s)
        if asked_s is not None:
            self._stop(asked_s)
        return None

    def _stop(self, grace_s: float) -> None:
        now_s = time.monotonic()
        if grace_s < self._grace_s:
            self._grace_s = grace_s
            self._kill_at_s = min(self._kill_at_s, now_s + grace_s + ACTOR_DELAY_S)
            for part in self._running():
                part.call("stop", grace_s)
        if now_s > self._kill_at_s:
            # The kernel ends what runs below an actor; Ray reports when the actor is dead.
            for part in self._running():
                kill(part.actor)

    def _lose(self, part: NodePart, cause: str) -> None:
        kill(part.actor)
        part.calls.clear()
        self._end(part, _lost(cause))

    def _end(self, part: NodePart, result: Result) -> None:
        if part.result is None:
            part.result = result
            self._results.append(result)

    def _verdict(self) -> Result:
        """The result to report: a loss before a failure, and the first failure before later ones,
        which it may have caused."""
        lost = [result for result in self._results if result.is_lost]
        bad = [result for result in self._results if _is_bad(result)]
        return (lost or bad or self._results)[0]


def release_others(namespace: str, wanted: set[str]) -> None:
    """Give back to Ray what it still holds for attempts of a fleet other than those wanted."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == namespace and name.rpartition(".")[0] not in wanted:
            with contextlib.suppress(ValueError):
                kill(ray.get_actor(name, namespace))
    for group in ray.util.placement_group_table().values():
        fleet, _, attempt = group["name"].rpartition("/")
        if fleet == namespace and attempt not in wanted:
            remove_group(group["name"])


def kill(actor: Any) -> None:
    """End an actor, if there is one."""
    import ray

    if actor is not None:
        ray.kill(actor)


def remove_group(name: str) -> None:
    """Free what is reserved under a name, if anything is."""
    import ray

    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def _actor_name(attempt: str, index: int) -> str:
    return f"{attempt}.{index}"


def _group_name(attempt: str, namespace: str) -> str:
    return f"{namespace}/{attempt}"


def _is_bad(result: Result) -> bool:
    return result.is_lost or result.exit_code != 0


def _lost(detail: str) -> Result:
    return Result(-signal.SIGKILL, detail, is_lost=True)


def _cause(error: Exception) -> str:
    """Ray's reason of a death, in one line."""
    text = " ".join(str(error).split())
    _, _, reason = text.rpartition("The actor died because ")
    return f"Ray lost its supervisor: {reason[:300]}"
