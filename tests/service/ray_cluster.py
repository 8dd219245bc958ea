"""A real Ray cluster of several nodes on this machine, on loopback addresses and with a token.

Run as a process of its own, which reads orders from its standard input and ends with it: Ray takes
its settings from the environment when it is imported, and takes over signals. Each node has an
address of its own (127.0.1.1, 127.0.1.2, …); Ray replaces 127.0.0.1 by the machine's address in the
network, where nothing shall listen.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

OBJECT_STORE_BYTES = 80 * 2**20

SETTINGS = {
    # A raylet on a busy machine waits for its agents longer than the 15 s that it allows.
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    # A node that was killed is dead for Ray after 1.5 s, not after 15.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}


class RayCluster:
    """A head without devices, and nodes that come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        token = folder / "token"
        token.write_text("0123456789abcdef" * 4)
        token.chmod(0o600)
        self.settings = SETTINGS | {"RAY_TMPDIR": str(folder), "RAY_AUTH_TOKEN_PATH": str(token)}
        self._log = open(folder / "cluster.log", "w")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | self.settings | {"TMPDIR": str(folder)},
            text=True,
            start_new_session=True,
        )
        self.address = str(self._ask({"verb": "head"}))
        self.raylets: dict[str, int] = {}

    def add(self, name: str, **num_devices: int) -> None:
        """Start a node: ``add("a", v100=2)``."""
        resources = {f"accel_{device_type}": number for device_type, number in num_devices.items()}
        self.raylets[name] = self._ask({"verb": "add", "name": name, "resources": resources})

    def kill(self, name: str) -> None:
        """SIGKILL the raylet of a node."""
        del self.raylets[name]
        self._ask({"verb": "kill", "name": name})

    def close(self) -> None:
        """End the cluster."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the cluster ended: {Path(self._log.name).read_text()}"
        return json.loads(answer)


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster with a head; all its processes are gone afterwards."""
    # Ray's sockets lie below it, and their paths may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    cluster = RayCluster(folder)
    before = {name: os.environ.get(name) for name in cluster.settings}
    os.environ.update(cluster.settings)
    try:
        yield cluster
    finally:
        cluster.close()
        for name, text in before.items():
            os.environ.pop(name)
            if text is not None:
                os.environ[name] = text
        end_processes(str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def end_processes(text: str, patience_s: float = 5.0) -> None:
    """Wait for processes with ``text`` among their arguments, and kill those that stay."""
    deadline_s = time.monotonic() + patience_s
    while left := processes_with(text):
        if time.monotonic() > deadline_s:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        time.sleep(0.1)


def processes_with(text: str) -> list[psutil.Process]:
    """Living processes with ``text`` among their arguments or in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            places = [*process.cmdline(), *process.environ().values()]
            if any(text in place for place in places):
                found.append(process)
    return found


def _serve() -> None:
    """The process of the cluster."""
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    # Ray prints on standard output.
    os.dup2(2, 1)
    cluster = Cluster(
        initialize_head=True,
        head_node_args=_node_arguments("head", 1) | {"include_dashboard": False},
    )
    nodes: dict[str, Any] = {}
    num_nodes = 1
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = cluster.address
        if order["verb"] == "add":
            num_nodes += 1
            arguments = _node_arguments(order["name"], num_nodes)
            node = cluster.add_node(**arguments, resources=order["resources"], wait=False)
            nodes[order["name"]] = node
            answer = node.all_processes["raylet"][0].process.pid
        if order["verb"] == "kill":
            (info,) = nodes.pop(order["name"]).all_processes["raylet"]
            info.process.kill()
            # A raylet that stays as a zombie is still the parent of its workers.
            info.process.wait()
        print(json.dumps(answer), file=answers, flush=True)
    cluster.shutdown()


def _node_arguments(name: str, number: int) -> dict[str, Any]:
    return {
        "num_cpus": 1,
        "node_name": name,
        "node_ip_address": f"127.0.1.{number}",
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_log_monitor": False,
    }


if __name__ == "__main__":
    _serve()
