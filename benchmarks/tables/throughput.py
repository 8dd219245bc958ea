"""Rows per second: through one TCP connection, through a local socket, and from the node's cache.

A shard in a process of its own, 100,000 rows of 32 floats. `get` asks for rows that are not in the
cache (each clock makes all of them old, mode ssp with staleness 0); `inc` changes 100,000 rows, or
makes ten calls, with a clock after each, and waits until the shard has all; `cache` reads and
changes rows that are there. Best of several repeats, wall time, beside CPU time of this process.

python benchmarks/tables/throughput.py [--rows 10000] [--repeats 30]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hocket.tables import Layout, Node, TableSpec
from hocket.tables.address import client_port

NUM_ROWS, WIDTH = 100_000, 32


def best(repeats: int, work) -> tuple[float, float]:
    """The shortest time of a call, and the CPU time of that call."""
    times = []
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        work()
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    return min(times)


@contextmanager
def served(address: str) -> Iterator[str]:
    """A shard in a process of its own; its address."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(f'[[table]]\nname = "t"\nrows = {NUM_ROWS}\nwidth = {WIDTH}\n'
                   'staleness = 0\nmode = "ssp"\n')  # fmt: skip
        file.flush()
        command = [sys.executable, "-m", "hocket", "tables", "serve", file.name, "--json"]
        shard = subprocess.Popen([*command, "--at", address], stdout=subprocess.PIPE, text=True)
        assert shard.stdout is not None
        try:
            lines = list(iter(shard.stdout.readline, "}\n"))
            yield json.loads("".join([*lines, "}"]))["address"]
        finally:
            shard.kill()
            shard.wait()


def measure(address: str, num: int, repeats: int) -> None:
    layout = Layout((TableSpec("t", NUM_ROWS, WIDTH, staleness=0, mode="ssp"),))
    random = np.random.default_rng(0)
    rows = random.permutation(NUM_ROWS)[:num]
    changes = random.normal(size=(num, WIDTH)).astype(np.float32)
    name = address.partition(":")[0]
    with served(address) as at, Node(layout, 0, client_port(layout, 0, [at])) as node:
        (worker,) = node.workers
        table = worker["t"]

        def get() -> None:
            table.get(rows)

        def aged_get() -> float:
            worker.clock()
            node.flush()
            start = time.perf_counter()
            get()
            return time.perf_counter() - start

        shortest = min(aged_get() for _ in range(repeats))
        print(f"{name} get: {num} rows a call, {num / shortest / 1e6:.2f} M rows/s")

        batches = max(10, 100_000 // num)

        def inc() -> None:
            for _ in range(batches):
                table.inc(rows, changes)
                worker.clock()
            node.flush()

        wall, cpu = best(max(3, repeats // 10), inc)
        rows_m = batches * num / 1e6
        print(f"{name} inc: {num} rows a call, {rows_m / wall:.2f} M rows/s "
              f"({rows_m / cpu:.2f} M per CPU second here)")  # fmt: skip
        get()
        wall, _ = best(repeats, get)
        print(f"cache get: {num} rows a call, {num / wall / 1e6:.2f} M rows/s")
        wall, _ = best(repeats, lambda: table.inc(rows, changes))
        print(f"cache inc: {num} rows a call, {num / wall / 1e6:.2f} M rows/s")
        single = rows[:1]

        def one_by_one() -> None:
            for _ in range(1000):
                table.get(single)

        wall, _ = best(5, one_by_one)
        print(f"cache get: 1 row a call, {1e-3 / wall:.3f} M rows/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    for num in options.rows:
        measure("tcp://127.0.0.1:0", num, options.repeats)
        with tempfile.TemporaryDirectory() as folder:
            measure(f"ipc://{Path(folder)}/shard", num, options.repeats)


if __name__ == "__main__":
    main()
