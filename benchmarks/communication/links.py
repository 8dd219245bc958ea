"""A cable cut to a quarter, then another one gone, under ``init_process_group("hocket")``.

    sudo [MIB=16] python benchmarks/communication/links.py

Ranks 0-3 of a DGX-1V in network namespaces (benchmarks/testbed.py) sum 4 MiB again and again; each
line is one phase: the rate, the bound of the links as they are in truth, and the longest
all-reduce, which noticed, measured, planned anew and was done again.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
UNIT, STEPS = 7.5e6, 9
NUMBERS = 2**18 * int(os.environ.get("MIB", "4"))


def main() -> None:
    if len(sys.argv) > 1:
        _rank(sys.argv[1])
        return
    from testbed import link_shape, of_cluster

    from hocket.api import find_cluster

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cluster = find_cluster("dgx1-v100")
    ranks, scale = cluster.device_names[:4], UNIT / 25e9
    with of_cluster(cluster, ranks, scale) as bed:
        environment = {
            **os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": bed.address(ranks[0]),
            "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        processes = [
            bed.start(rank, [sys.executable, "-W", "ignore", __file__, rank],
                      # They are killed one after the other, and say so.
                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                      env={**environment, "RANK": str(number)})
            for number, rank in enumerate(ranks)
        ]  # fmt: skip
        lines = processes[0].stdout
        next(lines)
        _phase("as planned", cluster, ranks, scale, lines, 0.0, 0)
        since_s = time.monotonic()
        bed.shape("gpu0", "gpu3", link_shape(UNIT / 2))
        cluster = _changed(cluster, "gpu0-gpu3", 12.5e9)
        _phase("gpu0-gpu3 at a quarter", cluster, ranks, scale, lines, since_s, 1)
        since_s = time.monotonic()
        bed.cut("gpu1", "gpu2")
        cluster = _changed(cluster, "gpu1-gpu2", None)
        _phase("gpu1-gpu2 gone", cluster, ranks, scale, lines, since_s, 2)


def _changed(cluster: Any, name: str, rate_bps: float | None) -> Any:
    links = [
        link if link.name != name else replace(link, bandwidth_bps=rate_bps)
        for link in cluster.links
        if link.name != name or rate_bps is not None
    ]
    return replace(cluster, links=tuple(links))


def _phase(
    name: str, cluster: Any, ranks: Any, scale: float, lines: Any, since_s: float, num_mended: int
) -> None:
    from hocket.planners.communication.collective import plan_collective

    bound = float(plan_collective(cluster, "allreduce", ranks).bound_bps) * scale
    # What ended before belongs to the phase before.
    fresh = (p for p in map(str.split, lines) if float(p[2]) + float(p[0]) > since_s)
    found = list(islice(fresh, STEPS))
    while int(found[-1][1]) < num_mended:
        found += islice(fresh, 1)  # it has not been noticed yet
    found += islice(fresh, STEPS)
    spent = [float(line[0]) for line in found]
    settled = spent[-STEPS:]
    rate = 4 * NUMBERS / statistics.median(settled)
    print(f"{name:24} {rate / 1e6:6.2f} MB/s of {bound / 1e6:.2f} ({100 * rate / bound:.0f} %), "
          f"longest {max(spent):.2f} s, mended {found[-1][1]} times; links {found[-1][3]}",
          flush=True)  # fmt: skip


def _rank(name: str) -> None:
    import torch
    import torch.distributed as dist

    import hocket.torch_backend  # noqa: F401

    dist.init_process_group("hocket")
    data = torch.ones(NUMBERS)
    dist.all_reduce(data)
    while True:
        data.fill_(1.0)
        began_s = time.monotonic()
        dist.all_reduce(data)
        spent_s = time.monotonic() - began_s
        assert bool((data == 4).all())
        if name == "gpu0":
            worker = dist.group.WORLD.worker
            links = ",".join(
                f"{link.name.replace('rank', '')}:{link.bandwidth_bps / 1e6:g}"
                for link in worker.cluster.links
            )
            print(f"{spent_s:.3f} {worker.num_mended} {began_s:.3f} {links}", flush=True)


if __name__ == "__main__":
    main()
