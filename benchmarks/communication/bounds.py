"""Collectives on every class of a DGX-1, the machines that come with hocket, and topology files.

    python benchmarks/communication/bounds.py [--data FOLDER] [-o results.json]

For each: rate against bound (exact fractions, verified, certificate checked), trees, processor time
(the median of three), and how much longer the best plain way takes than the chosen one, at least,
from 1 KB to 1 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from math import prod
from pathlib import Path

from hocket.hardware.shorthand import cluster_from_text
from hocket.planners.communication.classes import connected_classes
from hocket.planners.communication.collective import plan_collective
from hocket.planners.communication.fabric import fabric_of
from hocket.planners.communication.schedule import best_schedule

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from planners.certificate_checker import check_certificate

COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
MACHINES = ("dgx2", "dgx-a100-40g", "dgx-h100", "mi250x16", "mi300x8")
SIZES = (*(10**3 * 4**n for n in range(10)), 10**9)


def measured(cluster, fabric, collective) -> dict[str, object]:
    """A row: exact or not, trees, seconds."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        found = best_schedule(fabric, collective, 0)
        seconds.append(time.process_time() - start)
    found.section.require_legal(cluster)
    check_certificate(fabric, collective, 0, found.certificate)
    rate = found.section.rate_bps(cluster)
    return {
        "collective": collective,
        "rate_bps": float(rate),
        "is_optimal": rate == found.certificate.bound * fabric.unit_bps,
        "trees": len(found.section.trees),
        "cpu_s": statistics.median(seconds),
    }


def least_ratio(cluster, ranks, links) -> float:
    """The least (best plain time) / (chosen time), over collectives and sizes."""
    worst = float("inf")
    for collective in COLLECTIVES:
        plan = plan_collective(cluster, collective, ranks, links=links)
        for size in SIZES:
            packed_s, *plain_s = (offer.times.time_s(size) for offer in plan.offers)
            worst = min(worst, min(plain_s) / min(packed_s, *plain_s))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("-o", "--output", type=Path, default=None)
    options = parser.parse_args()
    cases = []
    for name in ("dgx1-v100", "dgx1-p100"):
        cluster = cluster_from_text(name)
        for fabric, _ in connected_classes(cluster, range(3, 9)):
            cases.append((f"{name} {','.join(fabric.places)}", cluster, fabric, "peer"))
    others = list(MACHINES)
    if options.data is not None:
        others += [str(path) for path in sorted((options.data / "rccl_topo_models").glob("*.xml"))]
    for name in others:
        cluster = cluster_from_text(name)
        fabric = fabric_of(cluster, cluster.device_names)
        cases.append((Path(name).name, cluster, fabric, "auto"))
    best_schedule(cases[0][2], "allgather", 0)
    best_schedule(cases[-1][2], "allgather", 0)
    rows, ratio, gains = [], float("inf"), []
    for label, cluster, fabric, links in cases:
        found = {c: measured(cluster, fabric, c) for c in COLLECTIVES}
        rows += [{"case": label, **row} for row in found.values()]
        if label.startswith("dgx1-v100"):
            gains.append(2 * found["allreduce"]["rate_bps"] / found["allgather"]["rate_bps"])
        if fabric.num_ranks <= 8 and not label.endswith(".xml"):
            ranks = fabric.places[: fabric.num_ranks]
            ratio = min(ratio, least_ratio(cluster, ranks, links))
    seconds = sorted(row["cpu_s"] for row in rows)
    one_root = [row["cpu_s"] for row in rows if row["collective"] == "broadcast"]
    reduced = [row for row in rows if row["case"].startswith("dgx1-v100")
               and row["collective"] == "allreduce"]  # fmt: skip
    summary = {
        "cases": len(cases),
        "schedules": len(rows),
        "optimal": sum(row["is_optimal"] for row in rows),
        "cpu_s_median": statistics.median(seconds),
        "cpu_s_max": seconds[-1],
        "broadcast_cpu_s_max": max(one_root),
        "dgx1_v100_allreduce_over_two_phases_geomean": prod(gains) ** (1 / len(gains)),
        "dgx1_v100_classes_with_at_most_6_trees": sum(row["trees"] <= 6 for row in reduced),
        "least_plain_time_over_chosen_1KB_to_1GB": ratio,
    }
    print(json.dumps(summary, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
