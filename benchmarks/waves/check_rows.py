"""What the simulator says of two rows that share nothing, beside what `step_kernels.py` measured.

    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/check_rows.py FOLDER    # no GPU

One microbatch alone and two of them as two rows of one graph, without a wait between them: what two
rows gain hangs on nothing but how kernels run beside each other. Ops take and fill what the replay
of one microbatch says (`hocket.cost.replayed_kernels`), as a profile on a GPU has it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hocket.api.planned import find_cluster
from hocket.cost.costs import Costs, device_rows
from hocket.cost.demand import TIMES_BESIDE
from hocket.cost.replayed_kernels import BlockRoom, InPlace, KernelRun, in_place
from hocket.graph import GraphBuilder, Stream
from hocket.plan.problem import Problem
from hocket.simulate.engine import simulate_placement

H200 = BlockRoom(132, 2048, 65536, 233472)
ALONE, BESIDE = "one wave", "two rows, nothing shared"


def step_s(form: dict[str, Any]) -> float:
    """The shorter of both ways to launch, the median row."""
    times = form["times_us"]
    return 1e-6 * min(statistics.median(times[key]) for key in ("back_to_back", "ahead"))


def ops_of(found: dict[str, Any]) -> list[InPlace]:
    """The calls of one microbatch that have kernels, each as the median of its like."""
    form, program = found["forms"][ALONE], found["programs"]["wave"]
    keys = [program["signatures"][program["signature"][op]] for _, op in form["calls"]]
    runs = []
    for kernel, start_ns, length_ns, *_ in (row for each in form["replays"] for row in each):
        _, grid, block, registers, shared, *_ = found["kernels"][kernel]
        runs.append(
            KernelRun(1e-3 * start_ns, 1e-3 * length_ns, prod(grid) if grid else 0,
                      prod(block or ()), registers or 0, shared or 0)
        )  # fmt: skip
    told = in_place(runs, len(form["replays"]), form["nodes"], keys, step_s(form), H200)
    return [told[key] for key in keys if key in told]


def two_rows_s(ops: list[InPlace]) -> float:
    """The same ops in two lanes that begin together, simulated."""
    builder = GraphBuilder("rows")
    for stream in (Stream.COMPUTE, Stream.SECOND):
        for index in range(len(ops)):
            op = builder.op(f"{stream}.{index}", "work", stream=stream)
            builder.tensor(f"made {stream}.{index}", 1, producer=op)
    graph, cluster = builder.build(), find_cluster("1xh200")
    seconds, fill = (np.tile([getattr(op, what) for op in ops], 2) for what in ("seconds", "fill"))
    ones = np.ones_like(fill)
    costs = Costs(
        kind_names=tuple(kind.name for kind in cluster.kinds), op_s=seconds[None],
        op_source=np.ones((1, len(seconds)), np.uint8), device_row=device_rows(cluster),
        routes=cluster.routes, tensor_bytes=graph.tensor_bytes, settings={},
        demand=np.stack((ones, 0 * ones, fill, TIMES_BESIDE * ones))[:, None],
    )  # fmt: skip
    problem = Problem(work=graph, cluster=cluster, op_costs=costs)
    return simulate_placement(problem, np.zeros(graph.num_ops, np.int32))[1].makespan_s


def main() -> int:
    """A line per workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(
        "| workload | one, ms | two rows / one, measured | simulated | off |\n|---|---|---|---|---|"
    )
    for path in sorted(parser.parse_args().folder.glob("*.json.gz")):
        found = json.loads(gzip.decompress(path.read_bytes()))
        if BESIDE in found["forms"]:
            ops, alone_s = ops_of(found), step_s(found["forms"][ALONE])
            measured = step_s(found["forms"][BESIDE]) / alone_s
            told = two_rows_s(ops) / sum(op.seconds for op in ops)
            print(f"| {found['workload']} | {1e3 * alone_s:.2f} | {measured:.2f} | {told:.2f} | "
                  f"{told / measured - 1:+.0%} |")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
