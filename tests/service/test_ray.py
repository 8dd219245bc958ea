"""A real Ray cluster: a head, and nodes a and b with two V100 each; b has a P100, too."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from patience import wait_until
from service.ray_cluster import RayCluster, processes_with, ray_cluster

from hocket.base.errors import RunError
from hocket.processes import system
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    STARTING,
    Assignment,
    AttemptName,
    Executor,
    Status,
)
from hocket.service.executors.ray_executor import RayExecutor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

NUM_DEVICES = 5
OFFSETS = itertools.count(10, 10)

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
COUNT = """
import os, time
with open(os.environ["PLACE"] + "/runs", "a") as file:
    file.write(os.environ["LABEL"] + " ")
time.sleep(0.5)
"""


@dataclass
class Lab:
    """An executor, and jobs of one test: their numbers count from 1 here."""

    engine: Executor
    cluster: RayCluster
    place: Path
    offset: int

    def name(self, job: int) -> AttemptName:
        return AttemptName(self.offset + job, 1)

    def order(self, job: int, script: str, *devices: str, **fields) -> Assignment:
        (self.place / "work").mkdir(exist_ok=True)
        return Assignment(
            name=self.name(job),
            command=(sys.executable, "-c", script),
            environment={"PLACE": str(self.place), "LABEL": str(job)},
            work_folder=self.place / "work",
            log_file=self.place / f"{job}.log",
            devices=devices,
            kind=devices[0].split("/")[1],
            **fields,
        )

    def start(self, job: int, script: str, *devices: str, **fields) -> None:
        self.engine.start(self.order(job, script, *devices, **fields))

    def stop(self, job: int, grace_s: float) -> None:
        self.engine.stop(self.name(job), grace_s)

    def status(self, job: int) -> Status | None:
        found = (each for each in self.engine.poll().attempts if each.name == self.name(job))
        return next(found, None)

    def until(self, job: int, *phases: str) -> Status:
        return wait_until(
            lambda: ((found := self.status(job)) and (found.phase in phases and found)) or None
        )

    def ended(self, job: int) -> Status:
        return self.until(job, EXITED, LOST)

    def printed(self, job: int) -> str:
        path = self.place / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def running(self) -> list[str]:
        """Jobs of this test's processes."""
        environments = [process.environ() for process in processes_with(str(self.place))]
        mine = [each for each in environments if each.get("PLACE") == str(self.place)]
        return sorted(each["LABEL"] for each in mine)

    def clear(self) -> None:
        for status in self.engine.poll().attempts:
            self.engine.kill(status.name)
        wait_until(
            lambda: all(each.phase in (EXITED, LOST) for each in self.engine.poll().attempts)
        )
        for status in self.engine.poll().attempts:
            self.engine.forget(status.name)
        assert self.running() == []

    def folders_on_nodes(self) -> list[Path]:
        """What supervisors keep on their nodes."""
        return list(self.cluster.folder.glob("hocket-attempt-*"))


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as started:
        started.add("a", v100=2)
        started.add("b", v100=2, p100=1)
        yield started


@pytest.fixture(scope="module")
def engine(cluster, tmp_path_factory):
    engine = RayExecutor(cluster.address, tmp_path_factory.mktemp("ray"))
    wait_until(lambda: len(engine.poll().devices) == NUM_DEVICES)
    yield engine
    engine.close()


@pytest.fixture
def lab(engine, cluster, tmp_path):
    lab = Lab(engine, cluster, tmp_path, next(OFFSETS))
    yield lab
    lab.clear()


def test_runs_on_the_node_of_its_device_and_tells_the_exit_code(lab, cluster):
    # Above a command are its supervisor, the actor, and the raylet of the node.
    script = """
import os
pid = os.getpid()
for _ in range(3):
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
print(pid, os.environ["HOCKET_DEVICES"], os.environ["HOCKET_KIND"], flush=True)
raise SystemExit(7)
"""
    jobs = {1: "b/p100/0", 2: "a/v100/1"}
    for job, device in jobs.items():
        lab.start(job, script, device)
    for job, device in jobs.items():
        assert lab.ended(job).exit_code == 7
        node, kind, _ = device.split("/")
        assert lab.printed(job).split() == [str(cluster.raylets[node]), device, kind]
    lab.engine.forget(lab.name(1))
    assert lab.status(1) is None
    lab.start(1, script, "b/p100/0")
    assert "ended before" in lab.status(1).detail


def test_gang_over_nodes_has_ranks_and_meets_at_the_first_node(lab):
    names = "RANK WORLD_SIZE LOCAL_RANK GROUP_RANK MASTER_ADDR MASTER_PORT HOCKET_DEVICES"
    script = f"""
import json, os, sys
# In one piece: print writes the end of the line on its own, and others write meanwhile.
facts = json.dumps([os.environ[name] for name in "{names}".split()])
sys.stdout.write(facts + " " + os.getcwd() + chr(10))
"""
    lab.start(1, script, "b/v100/0", "b/v100/1", "a/v100/0", processes="per-device")
    assert lab.ended(1).exit_code == 0
    lines = sorted(lab.printed(1).splitlines())
    assert {line.rpartition(" ")[2] for line in lines} == {str(lab.place / "work")}
    facts = [json.loads(line.rpartition(" ")[0]) for line in lines]
    port = facts[0][5]
    assert facts == [
        ["0", "3", "0", "0", "127.0.1.3", port, "b/v100/0,b/v100/1"],
        ["1", "3", "1", "0", "127.0.1.3", port, "b/v100/0,b/v100/1"],
        ["2", "3", "0", "1", "127.0.1.3", port, "a/v100/0"],
    ]


def test_a_gang_fails_as_a_whole(lab):
    script = "import os, time; os.environ['RANK'] == '2' and os._exit(3); time.sleep(600)"
    lab.start(1, script, "a/v100/0", "a/v100/1", "b/v100/0", processes="per-device")
    assert lab.ended(1).exit_code == 3
    assert lab.running() == []


def test_a_device_is_reserved_until_its_attempt_has_ended(lab):
    for job in (1, 2):
        lab.start(job, SLEEP, "b/p100/0")
    wait_until(lambda: RUNNING in (lab.status(1).phase, lab.status(2).phase))
    time.sleep(1.0)
    first, second = sorted((1, 2), key=lambda job: lab.status(job).phase != RUNNING)
    assert lab.status(second).phase == STARTING
    assert lab.printed(second) == ""
    lab.stop(first, 10.0)
    lab.until(second, RUNNING)
    assert lab.status(first).exit_code == -signal.SIGTERM


def test_stop_gives_time_to_save_and_kills_what_takes_longer(lab):
    polite = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(0)))
print("up", flush=True)
time.sleep(600)
"""
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    lab.start(1, polite, "a/v100/0")
    lab.start(2, stubborn, "b/v100/0")
    wait_until(lambda: all("up" in lab.printed(job) for job in (1, 2)))
    lab.stop(1, 60.0)
    lab.stop(2, 0.5)
    assert lab.ended(1).exit_code == 0
    assert lab.ended(2).exit_code == -signal.SIGKILL
    assert "saved" in lab.printed(1)
    assert lab.running() == []


def test_stopped_before_it_began_it_never_begins(lab):
    lab.stop(1, 5.0)
    lab.start(1, COUNT, "a/v100/0")
    lab.start(2, COUNT, "a/v100/1")
    lab.stop(2, 5.0)
    for job in (1, 2):
        assert lab.ended(job).phase == EXITED
    assert not (lab.place / "runs").exists()


def test_what_cannot_be_run_is_told(lab):
    odd = ("/no/such/program", "; touch x", "$(id)")
    lab.engine.start(replace(lab.order(1, "", "a/v100/0"), command=odd))
    lab.start(2, SLEEP, "z/v100/0")
    assert lab.ended(1).exit_code == 127
    assert "/no/such/program" in lab.status(1).detail
    assert lab.ended(2).phase == LOST
    assert "z/v100/0" in lab.status(2).detail


def test_killed_drivers_neither_lose_an_attempt_nor_run_it_twice(cluster, tmp_path):
    """The driver is killed at several moments of the start, and orders are given again."""
    devices = ("a/v100/0", "a/v100/1", "b/v100/0", "b/v100/1")
    for wait_s in (0.3, 1.0, None):
        lab = Lab(RayExecutor(cluster.address, tmp_path / "ray"), cluster, tmp_path, 0)
        for job, device in enumerate(devices):
            lab.start(job, COUNT, device)
        if wait_s is not None:
            time.sleep(wait_s)
            os.kill(lab.engine._driver.pid, signal.SIGKILL)
            lab.engine.close()
    for job in range(len(devices)):
        assert lab.ended(job).exit_code == 0
    lab.clear()
    lab.engine.close()
    assert sorted((tmp_path / "runs").read_text().split()) == ["0", "1", "2", "3"]


def test_a_driver_that_dies_is_replaced(lab):
    lab.start(1, SLEEP, "a/v100/0")
    lab.until(1, RUNNING)
    os.kill(lab.engine._driver.pid, signal.SIGKILL)
    assert len(lab.engine.poll().devices) == NUM_DEVICES
    lab.start(2, COUNT, "b/v100/0")
    assert lab.ended(2).exit_code == 0
    assert lab.status(1).phase == RUNNING
    assert lab.printed(1) == "up\n"


def test_a_new_executor_finds_what_runs_and_what_ended_meanwhile(cluster, tmp_path):
    lab = Lab(RayExecutor(f"ray://{cluster.address}", tmp_path / "ray"), cluster, tmp_path, 0)
    lab.start(1, SLEEP, "a/v100/0")
    lab.start(2, COUNT, "b/v100/0")
    lab.until(1, RUNNING)
    lab.until(2, RUNNING, EXITED)
    lab.engine.close()
    time.sleep(1.0)
    # Without an address: the one that Ray finds on this machine.
    lab.engine = RayExecutor(None, tmp_path / "ray")
    assert lab.ended(2).exit_code == 0
    lab.until(1, RUNNING)
    assert lab.printed(1) == "up\n"
    lab.clear()
    lab.engine.close()


def test_a_killed_node_takes_its_devices_and_processes_with_it(lab, cluster):
    before = set(lab.folders_on_nodes())
    forks = "import subprocess\nsubprocess.Popen(['setsid', 'sleep', '600'])\n" + SLEEP
    lab.start(1, forks, "b/v100/0", "a/v100/0", processes="per-device")
    lab.start(2, SLEEP, "a/v100/1")
    wait_until(lambda: lab.printed(1).count("up") == 2 and "up" in lab.printed(2))
    assert len(set(lab.folders_on_nodes()) - before) == 3
    cluster.kill("b")
    assert lab.ended(1).phase == LOST
    assert "node" in lab.status(1).detail
    assert lab.running() == ["2"]
    wait_until(lambda: len(lab.engine.poll().devices) == NUM_DEVICES - 3)
    assert not any(device.server == "b" for device in lab.engine.poll().devices)
    assert lab.status(2).phase == RUNNING
    # The next node of this name offers the same devices.
    cluster.add("b", v100=2, p100=1)
    wait_until(lambda: len(lab.engine.poll().devices) == NUM_DEVICES)
    lab.start(3, COUNT, "b/v100/0")
    assert lab.ended(3).exit_code == 0


def test_what_killed_nodes_left_is_removed_by_the_next_attempt(lab, cluster):
    forgotten = cluster.folder / f"hocket-attempt-{os.getpid()}-1-forgotten"
    linked = cluster.folder / f"hocket-attempt-{os.getpid()}-1-linked"
    mine = cluster.folder / f"hocket-attempt-{own_identity()}-mine"
    (forgotten / "deep").mkdir(parents=True)
    mine.mkdir()
    linked.symlink_to(lab.place)
    lab.start(1, COUNT, "a/v100/0")
    assert lab.ended(1).exit_code == 0
    wait_until(lambda: set(lab.folders_on_nodes()) == {mine, linked})
    mine.rmdir()
    linked.unlink()
    assert list(lab.place.glob("lock*")) == []


def own_identity() -> str:
    me = system.process(os.getpid())
    return f"{me.pid}-{me.start_ticks}"


def test_a_cluster_that_is_not_there_is_told_at_once(tmp_path):
    with pytest.raises(RunError, match="cannot join the Ray cluster 'nowhere'"):
        RayExecutor("ray://nowhere", tmp_path / "ray")
