"""A real Ray cluster: a head and nodes a, b (two V100 each) and c (one P100)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time

import pytest
from service.ray_cluster import end_processes, processes_with, ray_cluster

from hocket.errors import RunError
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    STARTING,
    Assignment,
    AttemptName,
    Executor,
)
from hocket.service.executors.ray_executor import RayExecutor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

NUM_DEVICES = 5
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as started:
        started.add("a", v100=2)
        started.add("b", v100=2)
        started.add("c", p100=1)
        yield started


@pytest.fixture
def engine(cluster, tmp_path):
    engine = RayExecutor(cluster.address, tmp_path / "ray")
    until(lambda: len(engine.poll().devices) == NUM_DEVICES)
    yield engine
    for status in engine.poll().attempts:
        engine.kill(status.name)
    until(lambda: all(each.phase in (EXITED, LOST) for each in engine.poll().attempts))
    engine.close()
    # Names of the marks and logs of this test alone.
    end_processes(str(tmp_path))


def until(condition, patience_s=PATIENCE_S):
    deadline_s = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.02)
    return found


def order(tmp_path, job, script, devices, **fields):
    """An attempt whose command is a Python program; it finds ``tmp_path`` in PLACE."""
    return Assignment(
        name=AttemptName(job, 1),
        command=(sys.executable, "-c", script),
        environment={"PLACE": str(tmp_path), "HOCKET_JOB": str(job)},
        work_folder=tmp_path / "work",
        log_file=tmp_path / f"{job}.log",
        devices=devices,
        kind=devices[0].split("/")[1],
        **fields,
    )


def status(engine, job):
    return {each.name.job: each for each in engine.poll().attempts}.get(job)


def until_phase(engine, job, *phases):
    return until(lambda: (found := status(engine, job)) and found.phase in phases and found)


SLEEP = "import time; print('up', flush=True); time.sleep(600)"
COUNT = """
import os, time
with open(os.environ["PLACE"] + "/runs", "a") as file:
    file.write(os.environ["HOCKET_JOB"] + "\\n")
time.sleep(0.5)
"""
FACTS = """
import json, os
names = "RANK WORLD_SIZE LOCAL_RANK GROUP_RANK MASTER_ADDR MASTER_PORT HOCKET_DEVICES".split()
facts = {name: os.environ.get(name, "") for name in names} | {"cwd": os.getcwd()}
print(json.dumps(facts), flush=True)
"""


def printed(tmp_path, job):
    return (tmp_path / f"{job}.log").read_text()


def test_runs_on_the_node_of_its_device_and_tells_the_exit_code(engine, cluster, tmp_path):
    protocol: Executor = engine
    # Its parents are the supervisor, the actor, and the raylet of the node.
    script = """
import os, time
pid = os.getpid()
for _ in range(3):
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
print(pid, os.environ["HOCKET_DEVICES"], os.environ["HOCKET_KIND"], flush=True)
raise SystemExit(7)
"""
    jobs = {1: "c/p100/0", 2: "b/v100/1"}
    for job, device in jobs.items():
        protocol.start(order(tmp_path, job, script, (device,)))
    for job, device in jobs.items():
        assert until_phase(engine, job, EXITED, LOST).exit_code == 7
        node, kind, _ = device.split("/")
        assert printed(tmp_path, job).split() == [str(cluster.raylets[node]), device, kind]
    engine.forget(AttemptName(1, 1))
    assert [each.name.job for each in engine.poll().attempts] == [2]
    engine.start(order(tmp_path, 1, script, ("c/p100/0",)))
    assert "ended before" in status(engine, 1).detail


def test_gang_over_nodes_has_ranks_and_meets_at_the_first_node(engine, tmp_path):
    devices = ("b/v100/0", "b/v100/1", "a/v100/0")
    engine.start(order(tmp_path, 1, FACTS, devices, processes="per-device"))
    assert until_phase(engine, 1, EXITED, LOST).exit_code == 0
    facts = [json.loads(line) for line in printed(tmp_path, 1).splitlines()]
    facts.sort(key=lambda fact: fact["RANK"])
    assert [fact["RANK"] for fact in facts] == ["0", "1", "2"]
    assert {fact["WORLD_SIZE"] for fact in facts} == {"3"}
    assert [fact["LOCAL_RANK"] for fact in facts] == ["0", "1", "0"]
    assert [fact["GROUP_RANK"] for fact in facts] == ["0", "0", "1"]
    assert {fact["MASTER_ADDR"] for fact in facts} == {"127.0.1.3"}
    assert len({fact["MASTER_PORT"] for fact in facts}) == 1
    assert facts[2]["HOCKET_DEVICES"] == "a/v100/0"
    assert facts[0]["cwd"] == str(tmp_path / "work")


def test_a_gang_fails_as_a_whole(engine, tmp_path):
    script = "import os, time; os.environ['RANK'] == '2' and os._exit(3); time.sleep(600)"
    devices = ("a/v100/0", "a/v100/1", "b/v100/0")
    engine.start(order(tmp_path, 1, script, devices, processes="per-device"))
    assert until_phase(engine, 1, EXITED, LOST).exit_code == 3
    assert running(tmp_path) == []


def test_a_device_is_reserved_until_its_attempt_has_ended(engine, tmp_path):
    for job in (1, 2):
        engine.start(order(tmp_path, job, SLEEP, ("c/p100/0",)))
    until(lambda: RUNNING in (status(engine, 1).phase, status(engine, 2).phase))
    time.sleep(1.0)
    first, second = sorted((1, 2), key=lambda job: status(engine, job).phase != RUNNING)
    assert status(engine, second).phase == STARTING
    assert not (tmp_path / f"{second}.log").exists()
    engine.stop(AttemptName(first, 1), 10.0)
    until_phase(engine, second, RUNNING)
    assert status(engine, first).exit_code == -signal.SIGTERM


def test_stop_gives_time_to_save_and_kills_what_takes_longer(engine, tmp_path):
    polite = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(0)))
print("up", flush=True)
time.sleep(600)
"""
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    engine.start(order(tmp_path, 1, polite, ("a/v100/0",)))
    engine.start(order(tmp_path, 2, stubborn, ("b/v100/0",)))
    until(lambda: all(has_printed(tmp_path, job, "up") for job in (1, 2)))
    engine.stop(AttemptName(1, 1), 60.0)
    engine.stop(AttemptName(2, 1), 0.5)
    assert until_phase(engine, 1, EXITED, LOST).exit_code == 0
    assert until_phase(engine, 2, EXITED, LOST).exit_code == -signal.SIGKILL
    assert has_printed(tmp_path, 1, "saved")
    assert running(tmp_path) == []


def test_stopped_before_it_began_it_never_begins(engine, tmp_path):
    engine.stop(AttemptName(1, 1), 5.0)
    engine.start(order(tmp_path, 1, COUNT, ("a/v100/0",)))
    engine.start(order(tmp_path, 2, COUNT, ("a/v100/1",)))
    engine.stop(AttemptName(2, 1), 5.0)
    for job in (1, 2):
        assert until_phase(engine, job, EXITED, LOST).phase == EXITED
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_run_is_told(engine, tmp_path):
    odd = order(tmp_path, 1, "", ("a/v100/0",))
    odd = type(odd)(**(vars(odd) | {"command": ("/no/such/program", "; touch x", "$(id)")}))
    engine.start(odd)
    found = until_phase(engine, 1, EXITED, LOST)
    assert found.exit_code == 127
    assert "/no/such/program" in found.detail
    engine.start(order(tmp_path, 2, SLEEP, ("z/v100/0",)))
    found = until_phase(engine, 2, EXITED, LOST)
    assert found.phase == LOST
    assert "z/v100/0" in found.detail


def test_killed_drivers_neither_lose_an_attempt_nor_run_it_twice(engine, cluster, tmp_path):
    """The driver is killed at all moments of the start, and orders are given again and again."""
    orders = [
        order(tmp_path, job, COUNT, (device,))
        for job, device in enumerate(("a/v100/0", "a/v100/1", "b/v100/0", "b/v100/1"), start=1)
    ]
    for wait_s in (0.05, 0.3, 0.8, 1.2):
        for each in orders:
            engine.start(each)
        time.sleep(wait_s)
        os.kill(engine._driver.pid, signal.SIGKILL)
        engine.close()
        engine = RayExecutor(cluster.address, tmp_path / "ray")
    for each in orders:
        engine.start(each)
        assert until_phase(engine, each.name.job, EXITED, LOST).exit_code == 0
    engine.close()
    assert sorted((tmp_path / "runs").read_text().split()) == ["1", "2", "3", "4"]


def test_a_new_executor_finds_what_runs_and_what_ended_meanwhile(engine, cluster, tmp_path):
    engine.start(order(tmp_path, 1, SLEEP, ("a/v100/0",)))
    engine.start(order(tmp_path, 2, COUNT, ("b/v100/0",)))
    until_phase(engine, 1, RUNNING)
    until_phase(engine, 2, RUNNING, EXITED)
    engine.close()
    time.sleep(1.0)
    began_s = time.monotonic()
    again = RayExecutor(cluster.address, tmp_path / "ray")
    assert until_phase(again, 2, EXITED).exit_code == 0
    until_phase(again, 1, RUNNING)
    assert time.monotonic() - began_s < 20.0
    assert printed(tmp_path, 1) == "up\n"
    again.kill(AttemptName(1, 1))
    assert until_phase(again, 1, EXITED).exit_code == -signal.SIGKILL
    again.close()
    assert running(tmp_path) == []


def test_a_killed_node_takes_its_devices_and_processes_with_it(engine, cluster, tmp_path):
    forks = "import subprocess, sys\nsubprocess.Popen(['setsid', 'sleep', '600'])\n" + SLEEP
    engine.start(order(tmp_path, 1, forks, ("b/v100/0", "a/v100/0"), processes="per-device"))
    engine.start(order(tmp_path, 2, SLEEP, ("a/v100/1",)))
    until(lambda: all(has_printed(tmp_path, job, "up") for job in (1, 2)))
    cluster.kill("b")
    found = until_phase(engine, 1, LOST, EXITED)
    assert found.phase == LOST
    assert "node" in found.detail
    until(lambda: len(engine.poll().devices) == NUM_DEVICES - 2)
    assert not any(device.name.startswith("b/") for device in engine.poll().devices)
    assert status(engine, 2).phase == RUNNING
    assert [job for job, _ in running(tmp_path)] == ["2"]
    # A node of this name offers the same devices again.
    cluster.add("b", v100=2)
    until(lambda: len(engine.poll().devices) == NUM_DEVICES)
    engine.start(order(tmp_path, 3, COUNT, ("b/v100/0",)))
    assert until_phase(engine, 3, EXITED, LOST).exit_code == 0


def test_a_cluster_that_is_not_there_is_told_at_once(tmp_path, cluster):
    with pytest.raises(RunError, match="cannot join the Ray cluster 'nowhere'"):
        RayExecutor("nowhere", tmp_path / "ray")


def has_printed(tmp_path, job, text):
    path = tmp_path / f"{job}.log"
    return path.exists() and text in path.read_text()


def running(tmp_path):
    """Jobs and numbers of all processes that commands of this test started."""
    found = []
    for process in processes_with(str(tmp_path)):
        environment = process.environ()
        if environment.get("PLACE") == str(tmp_path):
            found.append((environment["HOCKET_JOB"], process.pid))
    return found
