"""A service on a real Ray cluster: a head, and nodes a and b whose agents join by themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import wait_until
from service.ray_cluster import processes_with, ray_cluster

from hocket.base.errors import RunError
from hocket.service.client import find_service
from hocket.service.ray_agents import RayDriver, read_nodes

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is missing")
LEASE_S = 6.0


def row(name="a", node_id="f00", alive=True, labels=None, **resources):
    return {
        "NodeID": node_id,
        "Alive": alive,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"CPU": 8.0, "memory": 1e9, **resources},
        "Labels": labels or {},
    }


def test_custom_resources_are_devices_and_gpus_are_reserved_with_them():
    (node,) = read_nodes([row(accel_v100=2.0, accel_k80=1.0, accel_=3.0, GPU=3.0)])
    assert node.num_devices == {"v100": 2, "k80": 1}
    assert (node.num_gpus, node.resources) == (3, {"accel_v100": 2.0, "accel_k80": 1.0})


def test_a_label_names_the_type_of_gpus():
    (node,) = read_nodes([row(GPU=2.0, labels={"ray.io/accelerator-type": "A100"})])
    assert (node.num_devices, node.num_gpus) == ({"a100": 2}, 2)
    both = {"ray.io/accelerator-type": "A100", "hocket/device-type": "big"}
    assert read_nodes([row(GPU=2.0, labels=both)])[0].num_devices == {"big": 2}


def test_nodes_without_devices_and_dead_ones_are_left_out_and_names_are_unique():
    rows = [row("a/b", "f" * 12, accel_x=1.0), row("a/b", "e" * 12, accel_x=1.0),
            row("dead", alive=False, accel_x=1.0), row("head"), row("gpus", GPU=1.0)]  # fmt: skip
    assert [node.name for node in read_nodes(rows)] == ["a-b-ffffffff", "a-b-eeeeeeee"]


@pytest.mark.slow
@needs_ray
def test_a_missing_cluster_is_reported_at_the_start(tmp_path):
    with pytest.raises(RunError, match="cannot join the Ray cluster 'nowhere'"):
        RayDriver("nowhere", tmp_path, "https://x:1", "f" * 64)


class Service:
    """``hocket fleet serve --on ray`` as a process that may be killed."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.client = find_service(folder)
        self.port = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hocket", "fleet", "serve", "--on", f"ray://{self.address}",
             "--tls", f"127.0.1.1:{self.port}", "--device-types", "v100,p100", "--state",
             str(self.folder), "--round", "1", "--agent-lease", str(LEASE_S), "--json"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "}\n")
        self.port = int(json.loads("".join(lines) + "}")["secure_url"].rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def submit(self, script: str, **fields) -> int:
        spec = {"name": "t", "command": [sys.executable, "-c", script], **fields}
        return self.client.submit(spec)["id"]

    def until(self, number: int, *statuses: str):
        def reached():
            job = self.client.get_patiently(f"/v1/jobs/{number}")
            return job if job["status"] in statuses else None

        return wait_until(reached, f"job {number} is {statuses}")

    def devices(self) -> set[str]:
        found = self.client.get_patiently("/v1/devices")["devices"]
        return {one["name"] for one in found if one["is_up"]}

    def log(self, number: int) -> str:
        return b"".join(self.client.blocks(f"/v1/jobs/{number}/log")).decode()


@pytest.mark.slow
@needs_ray
def test_jobs_run_on_nodes_survive_a_restart_and_leave_a_dead_node(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    with ray_cluster() as cluster:
        cluster.add("a", v100=2)
        cluster.add("b", v100=2, p100=1)
        service = Service(cluster.address, tmp_path / "fleet")
        try:
            everything = {"a/v100-0", "a/v100-1", "b/p100-0", "b/v100-1", "b/v100-2"}
            wait_until(lambda: service.devices() == everything, "all devices")

            done = service.submit("import os; print(os.environ['HOCKET_DEVICES'])",
                                  throughputs={"p100": 1.0})  # fmt: skip
            service.until(done, "succeeded")
            assert service.log(done).strip() == "p100-0"

            script = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
            gang = service.submit(script, gang=4, processes="per-device")
            service.until(gang, "succeeded")

            slow = service.submit("import time; time.sleep(600)", gang=1,
                                  throughputs={"p100": 1.0}, preemptible=True)  # fmt: skip
            service.until(slow, "running")
            service.kill()
            service.start()
            assert service.until(slow, "running")["attempt"] == 1

            (driver,) = [one for one in processes_with("hocket.service.ray_agents")
                         if one.ppid() == service.process.pid]  # fmt: skip
            os.kill(driver.pid, signal.SIGKILL)
            cluster.kill("b")
            on_a = {"a/v100-0", "a/v100-1"}
            wait_until(lambda: service.devices() == on_a, "the devices of b are lost")
            assert service.client.get(f"/v1/jobs/{slow}")["status"] == "queued"
            wait_until(lambda: not processes_with("time.sleep(600)"), "nothing of b runs")

            cluster.add("b", v100=2, p100=1)
            wait_until(lambda: service.devices() == everything, "b is back")
            assert service.until(slow, "running")["attempt"] == 2
            service.client.delete(f"/v1/jobs/{slow}")
            service.until(slow, "cancelled")
        finally:
            service.kill()
