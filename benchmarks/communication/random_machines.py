"""Collectives on random machines: every schedule against its bound, and the processor time.

    python benchmarks/communication/random_machines.py [--first 0] [--count 100]

Machines of 4 to 16 GPUs: meshes of unequal links, some of them one-way, switches of unequal ports,
trees of PCIe switches, meshes over such trees, and boxes joined by a network. For each kind the
median and the most of the processor time, and all that took longer than 0.1 s.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

from hocket.hardware.cluster import Cluster
from hocket.hardware.files import cluster_from_dict
from hocket.planners.communication.fabric import fabric_of
from hocket.planners.communication.schedule import best_schedule

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from planners.certificate_checker import check_certificate

COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
KINDS = ("mesh", "one-way", "switches", "pcie", "hybrid", "boxes")
RATES = ([25.0], [25.0, 50.0], [12.5, 25.0, 50.0], [20.0, 25.0, 37.0, 100.0])
"""GB/s of one link, a machine draws from one of these."""


class Draw:
    """A machine under way."""

    def __init__(self, seed: int, kind: str) -> None:
        self.chance, self.kind = random.Random(f"{kind} {seed}"), kind
        self.gpus = [f"gpu{n}" for n in range(self.chance.randint(4, 16))]
        self.rates = self.chance.choice(RATES)
        self.switches: list[str] = []
        self.links: list[dict[str, Any]] = []

    def link(self, a: str, b: str, gbps: float | None = None, **how: str) -> None:
        rate = (gbps or self.chance.choice(self.rates)) * 1e9
        self.links.append({"ends": [a, b], "bandwidth": rate, "latency": 1e-6, **how})

    def mesh(self, gpus: list[str], links_per_gpu: float) -> None:
        for number in range(1, len(gpus)):
            self.link(gpus[number], gpus[self.chance.randrange(number)])
        for a, b in combinations(gpus, 2):
            if self.chance.random() < links_per_gpu / len(gpus):
                self.link(a, b)

    def pcie(self) -> None:
        count = -(-len(self.gpus) // self.chance.choice([2, 4]))
        self.switches = [*(f"plx{n}" for n in range(count)), "socket0", "socket1"]
        for number, gpu in enumerate(self.gpus):
            self.link(gpu, f"plx{number * count // len(self.gpus)}", 12.0)
        for number in range(count):
            self.link(f"plx{number}", f"socket{2 * number // count}", 12.0)
        self.link("socket0", "socket1", self.chance.choice([9.6, 16.0, 20.0]))

    def boxes(self) -> None:
        count, self.switches = self.chance.randint(2, 4), ["network"]
        for box in range(count):
            inside = [g for n, g in enumerate(self.gpus) if n * count // len(self.gpus) == box]
            self.mesh(inside, 3.0)
            for gpu in inside:
                if gpu == inside[0] or self.chance.random() < 0.6:
                    self.link(gpu, "network", self.chance.choice([6.25, 12.5, 25.0]))

    def cluster(self) -> Cluster:
        if self.kind in ("mesh", "one-way", "hybrid"):
            self.mesh(self.gpus, self.chance.uniform(1, 4))
        if self.kind == "one-way":
            for _ in range(self.chance.randint(1, 4)):
                self.link(*self.chance.sample(self.gpus, 2), duplex="one-way")
        if self.kind == "switches":
            self.switches = [f"switch{n}" for n in range(self.chance.randint(1, 3))]
            for gpu in self.gpus:
                for switch in self.switches:
                    if switch == "switch0" or self.chance.random() < 0.8:
                        self.link(gpu, switch)
        if self.kind in ("pcie", "hybrid"):
            self.pcie()
        if self.kind == "boxes":
            self.boxes()
        devices = [{"kind": "v100-16g", "count": len(self.gpus)}]
        return cluster_from_dict(
            {"name": self.kind, "devices": devices, "switches": self.switches, "links": self.links}
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="machines of each kind")
    options = parser.parse_args()
    every: list[float] = []
    num_exact = 0
    best_schedule(fabric_of(*_first("boxes"), links="all"), "allgather", 0)
    for kind in KINDS:
        spent: list[float] = []
        for seed in range(options.first, options.first + options.count):
            cluster = Draw(seed, kind).cluster()
            fabric = fabric_of(cluster, cluster.device_names, links="all")
            for collective in COLLECTIVES:
                start_s = time.process_time()
                found = best_schedule(fabric, collective, 0)
                spent.append(time.process_time() - start_s)
                found.section.require_legal(cluster)
                check_certificate(fabric, collective, 0, found.certificate)
                bound = found.certificate.bound * fabric.unit_bps
                num_exact += found.section.rate_bps(cluster) == bound
                if spent[-1] > 0.1:
                    print(f"  {kind} {seed}, {fabric.num_ranks} GPUs, {collective}: "
                          f"{1e3 * spent[-1]:.0f} ms", flush=True)  # fmt: skip
        every += spent
        print(f"{kind:9} {len(spent)} schedules, median {1e3 * statistics.median(spent):.1f} ms, "
              f"most {1e3 * max(spent):.0f} ms", flush=True)  # fmt: skip
    print(f"{num_exact} of {len(every)} equal to their bound, "
          f"median {1e3 * statistics.median(every):.1f} ms")  # fmt: skip


def _first(kind: str) -> tuple[Cluster, tuple[str, ...]]:
    """A machine on which kernels are loaded."""
    cluster = Draw(-1, kind).cluster()
    return cluster, cluster.device_names


if __name__ == "__main__":
    main()
