"""The process that talks to Ray: ``python -m hocket.service.executors.ray_driver FOLDER ADDRESS``.

A process of its own, because Ray ends its drivers when the head of the cluster dies, and takes over
their signals. Its memory is the folder that it shares with `ray_executor.RayExecutor`, whose orders
it finds there as files; it can be killed and started again at any moment. It ends when its standard
input does, that is with the daemon; attempts go on.

    namespace.json   of this fleet's actors in the cluster
    nodes.json       which node has which name
    driver.lock      held by the driver as long as it lives
    news.json        what it sees: devices, and attempts that run
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hocket.base.locks import wait_for_lock
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.attempt_folder import Result
from hocket.service.executors.executor import STARTING, Phase
from hocket.service.executors.ray_nodes import (
    RayBundle,
    RayNode,
    bundles_of,
    devices_of,
    name_nodes,
    read_nodes,
)
from hocket.service.executors.ray_process_group import PLACED, RayProcessGroup, release_others

NAMESPACE = "namespace.json"
NODES = "nodes.json"
DRIVER_LOCK = "driver.lock"
NEWS = "news.json"
ATTEMPTS = "attempts"

LOOK_S = 0.1
"""Time to wait for answers before looking at the folder again."""
HEARTBEAT_S = 1.0
"""News are written at least so often."""


class Driver:
    """Makes what runs in the cluster what the folder says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._namespace = _namespace(folder)
        self._named: dict[str, RayNode] = {}
        self._process_groups: dict[str, RayProcessGroup] = {}
        self._last_news: tuple[float, Any] = (float("-inf"), None)

    def connect(self, address: str) -> None:
        """Join the cluster and remove what earlier drivers left of attempts that have ended."""
        import ray

        ray.init(address=address, namespace=self._namespace, log_to_driver=False)
        self._release_others()

    def look(self) -> None:
        """One look at cluster and folder."""
        import ray

        rows: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        self._name_nodes(read_nodes(rows))
        for folder in self._open_folders():
            if folder.name not in self._process_groups:
                self._take_on_safely(folder)
        # Before any result: who finds an attempt lost with its node finds the devices gone, too.
        self._tell()
        living = {node.node_id for node in self._named.values()}
        for name, process_group in list(self._process_groups.items()):
            result = process_group.react(living)
            if result is not None:
                files.write_result(process_group.folder, result)
                process_group.release()
                del self._process_groups[name]
        self._wait_for_answers()

    def _open_folders(self) -> list[Path]:
        """Attempts without a result, in order of their folders' names."""
        with os.scandir(self._folder / ATTEMPTS) as entries:
            folders = sorted(Path(entry.path) for entry in entries)
        return [folder for folder in folders if not (folder / files.RESULT).exists()]

    def _name_nodes(self, nodes: list[RayNode]) -> None:
        if {node.node_id for node in nodes} == {node.node_id for node in self._named.values()}:
            return
        before = files.read_json(self._folder / NODES) or {}
        self._named = name_nodes(nodes, before)
        owners = {name: node.node_id for name, node in self._named.items()}
        files.write_json(self._folder / NODES, owners)

    def _release_others(self) -> None:
        placed = {folder.name for folder in self._open_folders() if (folder / PLACED).exists()}
        release_others(self._namespace, placed)

    def _take_on_safely(self, folder: Path) -> None:
        """Start an order; one that cannot be parsed must not block the others."""
        try:
            self._take_on(folder)
        except (TypeError, ValueError, KeyError) as error:
            detail = f"it cannot be placed: {error}"
            files.write_result(folder, Result(-9, detail, is_lost=True))
            self._release_others()

    def _take_on(self, folder: Path) -> None:
        """Begin an attempt, or go on with one that an earlier driver began."""
        order = files.read_order(folder)
        placed = files.read_json(folder / PLACED)
        if placed is None and files.asked_grace_s(folder) is not None:
            files.write_result(folder, Result(-15, "stopped before it began"))
            return
        if order is None:
            return
        if placed is not None:
            bundles = [RayBundle(**content) for content in placed["bundles"]]
        else:
            found = bundles_of(order.devices, order.kind, self._named)
            if isinstance(found, str):
                gone = Result(-9, f"device {found!r} is not there any more", is_lost=True)
                files.write_result(folder, gone)
                return
            bundles = found
            files.write_json(folder / PLACED, {"bundles": [vars(each) for each in bundles]})
        self._process_groups[folder.name] = RayProcessGroup(folder, order, bundles, self._namespace)

    def _tell(self) -> None:
        phases: dict[str, Phase] = {
            name: process_group.phase for name, process_group in self._process_groups.items()
        }
        news = {
            "pid": os.getpid(),
            "devices": [vars(device) for device in devices_of(self._named)],
            "running": sorted(name for name, phase in phases.items() if phase != STARTING),
        }
        now_s = time.monotonic()
        if news != self._last_news[1] or now_s > self._last_news[0] + HEARTBEAT_S:
            self._last_news = (now_s, news)
            write_news(self._folder, news | {"told_s": now_s})

    def _wait_for_answers(self) -> None:
        import ray

        calls = {
            reference: (process_group, *what)
            for process_group in self._process_groups.values()
            for reference, what in process_group.calls().items()
        }
        if not calls:
            time.sleep(LOOK_S)
            return
        ray.wait(list(calls), num_returns=1, timeout=LOOK_S)
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for reference in answered:
            process_group, part, method = calls[reference]
            # Losing an actor answers all calls to it at once.
            if method in part.calls and part.calls[method][0] == reference:
                process_group.take(part, method)


def write_news(folder: Path, news: dict[str, Any]) -> None:
    """Replace the news; they need not outlive the machine."""
    temporary = folder / f"{NEWS}.{os.getpid()}"
    temporary.write_text(json.dumps(news))
    os.replace(temporary, folder / NEWS)


def _namespace(folder: Path) -> str:
    content = files.read_json(folder / NAMESPACE)
    if content is None:
        content = {"namespace": f"hocket-{secrets.token_hex(8)}"}
        files.write_json(folder / NAMESPACE, content)
    return str(content["namespace"])


def _end_with_input() -> None:
    """End with the daemon, even while a call to Ray does not return."""
    # Not sys.stdin, whose lock would block the exit of the interpreter.
    while os.read(0, 1024):
        pass
    os._exit(0)


def main(folder: Path, address: str) -> None:
    """Drive the cluster until the daemon ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    with open(folder / DRIVER_LOCK, "w") as lock:
        wait_for_lock(lock.fileno())
        driver = Driver(folder)
        try:
            driver.connect(address)
        except (ConnectionError, ValueError, RuntimeError) as error:
            write_news(folder, {"pid": os.getpid(), "trouble": " ".join(str(error).split())[:500]})
            raise
        while True:
            driver.look()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
