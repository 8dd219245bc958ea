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

from hocket import api

SIZE_BYTES = 500 * 2**20
PUBLISHED = {
    ("allreduce", "dgx1-v100"): "2x, 8x",
    ("broadcast", "dgx1-v100"): "2x, 6x",
    ("allreduce", "dgx1-p100"): "1.6x, 3x",
    ("broadcast", "dgx1-p100"): "-",
}


def main() -> None:
    print("| collective | machine | classes | published | over rings | and chains | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for (collective, machine), published in PUBLISHED.items():
        start_s = time.process_time()
        found = api.collective_classes(machine, collective, size_bytes=SIZE_BYTES)
        cells = []
        for key in ("speedup_over_rings", "speedup_over_rings_and_chains"):
            gains = [entry[key] for entry in found]
            cells.append(f"{geometric_mean(gains):.2f}x, {max(gains):.1f}x")
        spent_s = time.process_time() - start_s
        print(
            f"| {collective} | {machine} | {len(found)} | {published} | {cells[0]} | {cells[1]} "
            f"| {spent_s:.1f} |"
        )


if __name__ == "__main__":
    main()
