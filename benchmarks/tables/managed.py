"""Matrix factorisation over tables on shaped links: BSP, SSP, ESSP and managed communication.

Four workers with their users' factors at home and the items' factors in a table on a fifth host;
every host is a network namespace whose link is held to a rate (benchmarks/testbed.py). A clock is
one pass over a worker's ratings in eight parts; computing is paced by sleeping, so that one machine
stands for five. The loss is the workers' squared error, each with the rows that it sees.

sudo python benchmarks/tables/managed.py [--mbit 1 3 10 100] [--rates 0.02 ...] [--clocks 16]
     [--json results.json] [--report report.html]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hocket.kernels import kernel
from hocket.tables import Layout, Node, ShardServer, TableSpec, Worker

WORKERS, RANK, PARTS = 4, 16, 8
USERS, ITEMS, RATINGS = 400, 1000, 40_000
"""Times `--scale`."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "BSP": {"mode": "essp", "staleness": 0},
    "SSP": {"mode": "ssp", "staleness": 1},
    "ESSP": {"mode": "essp", "staleness": 1},
    "managed, fifo": {"mode": "managed", "staleness": 1, "order": "fifo"},
    "managed, random": {"mode": "managed", "staleness": 1, "order": "random"},
    "managed, magnitude": {"mode": "managed", "staleness": 1, "order": "magnitude"},
}
FIRST_PORT = 7000


@kernel
def sgd_pass(users, items, values, start, stop, W, H, rate, decay):
    """Plain SGD over ratings start..stop; the squared error before each step."""
    error_sum = 0.0
    for n in range(start, stop):
        u, i = users[n], items[n]
        error = values[n]
        for k in range(W.shape[1]):
            error -= W[u, k] * H[i, k]
        error_sum += error * error
        for k in range(W.shape[1]):
            w = W[u, k]
            W[u, k] += rate * (error * H[i, k] - decay * w)
            H[i, k] += rate * (error * w - decay * H[i, k])
    return error_sum


def ratings(worker: int, scale: int, skew: float) -> tuple[Any, ...]:
    """A worker's users, items (popular ones far more often) and ratings, around zero.

    Which items are popular is shuffled: an order by the rows' numbers must not be one by use.
    """
    num_users, num_items, num = USERS * scale, ITEMS * scale, RATINGS * scale
    truth = np.random.default_rng(1)
    hidden_items = truth.normal(size=(num_items, 8)) / 8**0.25
    weights = truth.permutation(1 / np.arange(1, num_items + 1) ** skew)
    random = np.random.default_rng(100 + worker)
    hidden_users = random.normal(size=(num_users, 8)) / 8**0.25
    users = random.integers(0, num_users, num)
    items = random.choice(num_items, num, p=weights / weights.sum())
    values = (hidden_users[users] * hidden_items[items]).sum(axis=1)
    return users, items, (values + random.normal(size=num) * 0.3).astype(np.float32)


def layout_of(run: dict[str, Any]) -> Layout:
    """The items' table of one run."""
    table = TableSpec("items", ITEMS * run["scale"], RANK, **SYSTEMS[run["system"]])
    return Layout((table,), 1, WORKERS)


def work(number: int, plan: dict[str, Any]) -> None:
    """A worker: all runs, one after another; a line of results for each."""
    from hocket.tables.transports.zeromq import ZeroMqClientPort

    users, items, values = ratings(number, plan["scale"], plan["skew"])
    num_users, num_items = USERS * plan["scale"], ITEMS * plan["scale"]
    warm = np.zeros((num_users, RANK), np.float32), np.zeros((num_items, RANK), np.float32)
    sgd_pass(users, items, values, 0, 1, *warm, np.float32(0.0), np.float32(0.0))
    for place, run in enumerate(plan["runs"]):
        port = ZeroMqClientPort(number, [f"tcp://{plan['server']}:{FIRST_PORT + place}"])
        node = Node(layout_of(run), number, port, timeout_s=120)
        rows: list[Any] = []
        with node:
            W = (
                np.random.default_rng(number).normal(size=(num_users, RANK)).astype(np.float32)
                * 0.2
            )
            (worker,) = node.workers
            table = worker["items"]
            fill(worker, number)
            H = np.zeros((num_items, RANK), np.float32)
            started_s, idle_s = time.monotonic(), node.blocked_s
            for _ in range(plan["clocks"]):
                error = 0.0
                for part in range(PARTS):
                    bounds = len(values) * part // PARTS, len(values) * (part + 1) // PARTS
                    seen = np.unique(items[slice(*bounds)])
                    before = H[seen] = table.get(seen)
                    error += sgd_pass(users, items, values, *bounds, W, H,
                                      np.float32(run["rate"]), np.float32(0.02))  # fmt: skip
                    table.inc(seen, H[seen] - before)
                    time.sleep(plan["clock_s"] / PARTS)
                worker.clock()
                rows.append([time.monotonic() - started_s, error if np.isfinite(error) else None])
        print(json.dumps({"rows": rows, "blocked_s": node.blocked_s - idle_s,
                          "sent_bytes": node.routes[0].budget.sent_bytes}), flush=True)  # fmt: skip


def fill(worker: Worker, number: int) -> None:
    """The first worker gives the items their start; all go on when everybody has it."""
    table = worker["items"]
    every = np.arange(table.spec.num_rows)
    table.get(every)
    if number == 0:
        start = np.random.default_rng(7).normal(size=(len(every), RANK)) * 0.2
        table.inc(every, start.astype(np.float32))
    for _ in range(int(table.spec.staleness) + 1):
        worker.clock()
    table.get(every)


def serve(plan: dict[str, Any]) -> None:
    """The shards of all runs, one after another."""
    from hocket.tables.address import shard_port

    print("ready", flush=True)
    active: list[tuple[ShardServer, float]] = []
    for place, run in enumerate(plan["runs"]):
        layout = layout_of(run)
        server = ShardServer(layout, 0, shard_port(layout, 0, f"tcp://*:{FIRST_PORT + place}"))
        last = plan["clocks"] + SYSTEMS[run["system"]]["staleness"] + 1
        while server.states[0].clocks.min() < last:
            server.turn(0.005)
            for earlier, until_s in active:  # its workers may still wait for their last answers
                if time.monotonic() < until_s:
                    earlier.turn(0)
        active = [*active, (server, time.monotonic() + 30)][-2:]
    while time.monotonic() < active[-1][1]:
        active[-1][0].turn(0.005)


def measure(mbit: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All systems at all step sizes over links of one rate."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from testbed import Shape, Testbed

    shape = Shape(mbit * 1e6 / 8)
    hosts = {"server": shape} | {f"worker{n}": shape for n in range(WORKERS)}
    runs = [{"system": s, "rate": r, "scale": options.scale} for _ in range(options.repeats)
            for s in options.systems for r in options.rates]  # fmt: skip
    results = []
    with Testbed(hosts) as bed:
        plan = {"server": bed.address("server"), "runs": runs, "clocks": options.clocks,
                "clock_s": options.clock_s, "skew": options.skew,
                "scale": options.scale}  # fmt: skip
        base = [sys.executable, __file__, "--plan", json.dumps(plan), "--role"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = bed.start("server", [*base, "server"], **pipes)
        server.stdout.readline()
        workers = [bed.start(f"worker{n}", [*base, str(n)], **pipes) for n in range(WORKERS)]
        for run in runs:
            found = [json.loads(process.stdout.readline()) for process in workers]
            results.append({"mbit": mbit, **run, **combined(found, options.scale)})
            print(summary(results[-1]), file=sys.stderr, flush=True)
    return results


def combined(found: list[dict[str, Any]], scale: int) -> dict[str, Any]:
    """Loss and time after each clock over all workers; None from where one diverged."""
    losses: list[float | None] = []
    for at_clock in zip(*(each["rows"] for each in found), strict=True):
        errors = [error for _, error in at_clock]
        lost = None in errors or None in losses[-1:]
        losses.append(None if lost else float(np.sqrt(sum(errors) / (WORKERS * RATINGS * scale))))
    times = [max(t for t, _ in each) for each in zip(*(f["rows"] for f in found), strict=True)]
    return {"loss": losses, "time_s": times,
            "blocked_s": float(np.mean([f["blocked_s"] for f in found])),
            "sent_bytes": sum(f["sent_bytes"] for f in found)}  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    """One line of a run."""
    last = result["loss"][-1]
    loss = "diverged" if last is None else f"{last:.4f}"
    return (f"{result['mbit']:g} Mbit, {result['system']}, rate {result['rate']:g}: {loss} after "
            f"{result['time_s'][-1]:.1f} s, blocked {result['blocked_s']:.1f} s, "
            f"{result['sent_bytes'] / 1e6:.1f} MB up")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=float, nargs="+", default=[1, 3, 10, 100])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.01, 0.02, 0.04, 0.06])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--clocks", type=int, default=16)
    parser.add_argument("--clock_s", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scale", type=int, default=1, help="as many times the users and items")
    parser.add_argument(
        "--skew", type=float, default=0.5, help="items by popularity: rank ** -skew"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "server":
        serve(json.loads(options.plan))
    elif options.role:
        work(int(options.role), json.loads(options.plan))
    else:
        results = [each for mbit in options.mbit for each in measure(mbit, options)]
        if options.json:
            options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
