"""kill -9 of random nodes of a Ray cluster under a loaded fleet, through the real service.

    python benchmarks/fleet/ray_nodes.py [--trials 100] [--seed 0]

Starts a real Ray cluster (a head without devices and three nodes with two each) and
``hocket fleet serve --on ray``, keeps more jobs than devices alive, kills the raylet of a random
node that works at a random moment and starts a new node of that name; again and again. Checked in
the end: every accepted job succeeded, no device and no job was held by two, no attempt ran twice,
nothing is left running, and how much work was lost.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trials import Fleet, Load, report, wait_until

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from service.ray_cluster import RayCluster, ray_cluster

LOAD = Load(round_s=10.0, step_s=0.1, save_s=1.0, num_steps=100, num_live_jobs=7)
NODES = {"a": {"v100": 2}, "b": {"v100": 2}, "c": {"p100": 2}}


def trial(fleet: Fleet, cluster: RayCluster, chance: random.Random) -> list[dict[str, Any]]:
    """Kill a node; what became of the attempts on it."""
    nodes: list[str] = []
    while not nodes:
        fleet.keep_busy()
        time.sleep(chance.uniform(0.0, 4.0))
        running = [job for job in fleet.live_jobs() if job["status"] in ("starting", "running")]
        nodes = sorted({device.split("/")[0] for job in running for device in job["devices"]})
    node = chance.choice(nodes)
    # A node that came back before Ray gave up its predecessor has its id in its name.
    raylet = node.split("-")[0]
    struck = [
        {"job": job["id"], "attempt": job["attempt"], "reached": fleet.progress(job["id"])}
        for job in running
        if any(device.startswith(f"{node}/") for device in job["devices"])
    ]
    began_s = time.monotonic()
    cluster.kill(raylet)
    for one in struck:
        one["at_s"] = time.time()
        fleet.wait_for_end(one["job"], one["attempt"])
        one["over_s"] = time.monotonic() - began_s
    cluster.add(raylet, **NODES[raylet])
    return struck


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    struck: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ray_cluster() as cluster:
        for node, devices in NODES.items():
            cluster.add(node, **devices)
        options = ["--on", "ray", "--device-types", "v100,p100", "--tls", "127.0.1.1:0"]
        fleet = Fleet(Path(name), LOAD, [*options, "--agent-lease", "6"])
        try:
            for number in range(1, arguments.trials + 1):
                struck += trial(fleet, cluster, chance)
                print(f"trial {number} of {arguments.trials}", file=sys.stderr, flush=True)
            wait_until(lambda: not fleet.live_jobs(), "all jobs ended")
            jobs, ledger, num_left = fleet.jobs(), fleet.ledger(), fleet.processes_left()
        finally:
            fleet.close()
    heading = ("nodes killed, attempts on them", f"{arguments.trials}, {len(struck)}")
    report(heading, struck, jobs, ledger, num_left, LOAD)


if __name__ == "__main__":
    main()
