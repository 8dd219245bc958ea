"""How long graphs take to generate, write and read, and how large they are.

    .venv/bin/python benchmarks/graph/graph.py [NUM_OPS ...]

Each row is a process of its own, so that its peak memory is its own too. Times are processor time:
all of this is work on one core, and other processes on the machine do not disturb the figures.
"""

from __future__ import annotations

import multiprocessing
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path

from hocket.graph import FAMILIES, generate, read_graph, write_graph


def measured(family: str, num_ops: int, folder: str) -> dict[str, float]:
    path = Path(folder) / "graph.json.gz"
    times = {}
    start_s = time.process_time()
    graph = generate(family, num_ops, seed=1)
    times["generate_s"] = time.process_time() - start_s
    start_s = time.process_time()
    write_graph(graph, path)
    times["write_s"] = time.process_time() - start_s
    del graph
    start_s = time.process_time()
    graph = read_graph(path)
    times["read_s"] = time.process_time() - start_s
    return {
        "ops": graph.num_ops,
        "tensors": graph.num_tensors,
        **times,
        "file_mb": path.stat().st_size / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    sizes = [int(text) for text in sys.argv[1:]] or [10_000, 100_000, 1_000_000]
    print(f"{platform.machine()}, Python {platform.python_version()}")
    print(f"{'family':16}{'ops':>9}{'tensors':>9}  generate    write     read  file.gz     peak")
    spawn = multiprocessing.get_context("spawn")
    for num_ops in sizes:
        for family in FAMILIES:
            with tempfile.TemporaryDirectory() as folder, spawn.Pool(1) as pool:
                row = pool.apply(measured, (family, num_ops, folder))
            print(
                f"{family:16}{row['ops']:9}{row['tensors']:9}"
                f"{row['generate_s']:8.2f} s{row['write_s']:7.2f} s{row['read_s']:7.2f} s"
                f"{row['file_mb']:6.1f} MB{row['peak_mb']:6.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
