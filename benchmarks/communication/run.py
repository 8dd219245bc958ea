"""Planned trees, rings and gloo on shaped links: what each carries, repetitions interleaved.

    sudo python benchmarks/communication/run.py --gpus 0,1,2,4 --unit 3.75 --repeat 7

Every rank is a network namespace (benchmarks/testbed.py), every NVLink of the DGX-1 a cable of
``--unit`` MB/s per link, PCIe a star of 12/25 of that. All but gloo use the same executor, so that
only the plan differs. Prints, per way, the median rate with its range over the repetitions (the
slowest rank counts), the predicted rate, and the ratios, beside ``gloo`` (its own all_reduce).
``--unit 0`` runs on the loopback without namespaces: there the processor is the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testbed import drive_or_follow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", default="dgx1-v100")
    parser.add_argument("--gpus", default="0,1,2,4")
    parser.add_argument("--unit", type=float, default=3.75, help="MB/s of the slowest NVLink")
    parser.add_argument("--mib", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--ways", default="gloo,packed trees,ring,ring over PCIe")
    parser.add_argument("--json", action="store_true")
    drive_or_follow(parser, _drive, _rank)


def _drive(options: argparse.Namespace) -> None:
    from testbed import Loopback, of_cluster

    from hocket.api.collectives import plan_collective
    from hocket.plan.make import find_cluster

    cluster = find_cluster(options.on)
    size = int(options.mib * 2**20) // 4 * 4
    # Links in the plan have the latency of a message here, not that of NVLink.
    unit = min(k.bandwidth_bps for k in cluster.links if set(k.ends) <= set(cluster.device_names))
    scale = (options.unit or 1000) * 1e6 / unit
    plan = plan_collective(cluster, "allreduce", gpus=options.gpus)
    ranks = plan.chosen.section.ranks
    ways, task = options.ways.split(","), {}
    for offer in plan.offers:
        if offer.name in ways:
            task[offer.name] = {
                "section": offer.section.to_data(), "rate_bps": float(offer.rate_bps) * scale,
            }  # fmt: skip
    order = [way for way in ways if way in task or way == "gloo"]
    made = of_cluster(cluster, ranks, scale) if options.unit else Loopback()
    with tempfile.TemporaryDirectory() as folder, made as bed:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps({
            "ways": order, "plans": task, "size": size, "repeat": options.repeat,
            "count": len(ranks), "master": bed.address(ranks[0]), "cluster": options.on,
            "fastest_bps": 2e6 * options.unit or 1e12,
            "interface": "eth0" if options.unit else "lo",
        }))  # fmt: skip
        processes = [
            bed.start(rank, [sys.executable, "-W", "ignore", __file__, "--rank", str(file)],
                      stdout=subprocess.PIPE, text=True,
                      env={**os.environ, "RANK": str(number), "OMP_NUM_THREADS": "1"})
            for number, rank in enumerate(ranks)
        ]  # fmt: skip
        text = processes[0].communicate(timeout=580)[0]
        for process in processes[1:]:
            process.wait(timeout=30)
    found = {way: [size / s / 1e6 for s in spent] for way, spent in json.loads(text).items()}
    if options.json:
        print(json.dumps({"gpus": options.gpus, "rates_MBps": found}))
    _show(options, found, task)


def _show(options: argparse.Namespace, found: dict, task: dict) -> None:
    print(f"all-reduce of {options.mib:g} MiB, {options.on} {options.gpus}, "
          f"{options.unit:g} MB/s per link, {options.repeat} repetitions")  # fmt: skip
    trees = statistics.median(found.get("packed trees", [0.0]))
    for way, rates in found.items():
        middle = statistics.median(rates)
        promised = task[way]["rate_bps"] / 1e6 if way in task else 0.0
        share = (
            f"  predicted {promised:6.2f} ({100 * middle / promised:3.0f} %)" if promised else ""
        )
        count = f", {len(task[way]['section']['trees'])} trees" if way in task else ""
        print(f"{way:16} {middle:7.2f} [{min(rates):.2f}-{max(rates):.2f}] MB/s{share}{count}"
              f"  trees/this {trees / middle:.2f}")  # fmt: skip


def _rank(file: Path) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from hocket.plan.make import find_cluster
    from hocket.plan.problem import Problem
    from hocket.plan.sections.communication import Communication
    from hocket.runtime.collectives.peer_sockets import AHEAD_S, connect_all
    from hocket.runtime.collectives.rank_tables import tables_of
    from hocket.runtime.collectives.tree_executor import Connections, RunState, TreeRun

    task = json.loads(file.read_text())
    rank, count = int(os.environ["RANK"]), task["count"]
    os.environ |= {"MASTER_ADDR": task["master"], "GLOO_SOCKET_IFNAME": task["interface"]}
    store = dist.TCPStore(task["master"], 29500, count, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    sockets = connect_all(
        store, rank, count, "bench", patience_s=10, ahead_bytes=AHEAD_S * task["fastest_bps"]
    )
    links = Connections([-1 if s is None else s.fileno() for s in sockets])
    problem = Problem(work=None, cluster=find_cluster(task["cluster"]))
    sections = {
        way: (Communication.from_data(plan["section"], problem), plan["rate_bps"])
        for way, plan in task["plans"].items()
    }
    given = np.random.default_rng(rank).integers(-99, 99, task["size"] // 4).astype(np.float32)
    wanted = torch.from_numpy(given.copy())
    dist.all_reduce(wanted)
    spent: dict[str, list[float]] = {way: [] for way in task["ways"]}
    sequence = 0
    for repeat in range(task["repeat"] + 1):
        for way in task["ways"]:
            data = given.copy()
            dist.barrier()
            time.sleep(0.15)  # buckets fill again
            start_s = time.monotonic()
            if way == "gloo":
                dist.all_reduce(torch.from_numpy(data))
            else:
                section, rate_bps = sections[way]
                tables = tables_of(section, rank, data.size, 4, rate_bps)
                run = TreeRun(tables, links, data, sequence=sequence)
                assert run.advance(120.0) == RunState.DONE
                sequence += 1
            took = torch.tensor([time.monotonic() - start_s])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            assert np.array_equal(data, wanted.numpy()), way
            if repeat:
                spent[way].append(float(took))
    if rank == 0:
        print(json.dumps(spent), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
