"""Blink's headline table: speed-up over NCCL's rings on all allocation classes of a DGX-1.

Run: python benchmarks/systems/blink.py

Simulated. NCCL is modelled as its rings: as many link-disjoint NVLink rings as fit, or one ring
over PCIe where the GPUs close no NVLink ring. Newer versions of NCCL also use chains; the last
column compares with the better of both. Blink's published figures (8-GPU DGX-1V unless noted):
all-reduce up to 8x, 2x in the geometric mean; broadcast up to 6x and 2x; DGX-1P up to 3x and 1.6x.
"""

from __future__ import annotations

import time
from statistics import geometric_mean

from hocket.api.collectives import collective_classes, plan_collective
from hocket.plan.make import find_cluster

SIZE_BYTES = 500 * 2**20
PUBLISHED = {
    ("allreduce", "dgx1-v100"): "2x, 8x",
    ("broadcast", "dgx1-v100"): "2x, 6x",
    ("allreduce", "dgx1-p100"): "1.6x, 3x",
    ("broadcast", "dgx1-p100"): "-",
}


def gains(collective: str, machine: str) -> dict[str, list[float]]:
    """Speed-ups on all classes, over rings and over the better of rings and chains."""
    found = collective_classes(machine, collective, size_bytes=SIZE_BYTES)
    keys = ("speedup_over_rings", "speedup_over_rings_and_chains")
    return {key: [entry[key] for entry in found] for key in keys}


def ours() -> str:
    """The figures of the row in docs/systems.md: largest and geometric mean, over rings."""
    allreduce, broadcast = (
        gains(name, "dgx1-v100")["speedup_over_rings"] for name in ("allreduce", "broadcast")
    )
    return (
        f"simulated: all-reduce {max(allreduce):.1f}x, mean {geometric_mean(allreduce):.1f}x; "
        f"broadcast {max(broadcast):.1f}x, mean {geometric_mean(broadcast):.2f}x"
    )


def print_call_times() -> None:
    """Processor seconds of whole calls on 16 GPUs, bound, ring and chain baselines included."""
    print("\n| 16 GPUs | collective | servers | CPU s of a call |")
    print("|---|---|---|---|")
    for machine, servers in (("dgx2", 1), ("2xdgx1-v100", 2)):
        cluster = find_cluster(machine)
        for collective in ("allreduce", "broadcast"):
            start_s = time.process_time()
            plan_collective(cluster, collective, size_bytes=SIZE_BYTES)
            spent_s = time.process_time() - start_s
            print(f"| {machine} | {collective} | {servers} | {spent_s:.2f} |")


def main() -> None:
    print("| collective | machine | classes | published | over rings | and chains | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for (collective, machine), published in PUBLISHED.items():
        start_s = time.process_time()
        found = list(gains(collective, machine).values())
        cells = [f"{geometric_mean(each):.2f}x, {max(each):.1f}x" for each in found]
        spent_s = time.process_time() - start_s
        print(
            f"| {collective} | {machine} | {len(found[0])} | {published} | {cells[0]} | {cells[1]} "
            f"| {spent_s:.1f} |"
        )
    print_call_times()


if __name__ == "__main__":
    main()
