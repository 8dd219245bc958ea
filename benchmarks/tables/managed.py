"""Time to the same loss over shaped links: BSP, SSP, ESSP and managed communication.

Four workers and a shard on a fifth host; every host is a network namespace whose link is held to a
rate (benchmarks/testbed.py). Three data sets:

ratings  matrix factorisation. Workers keep their users' factors, the items' are in the table (1,000
         rows of 16). A clock is one pass over 40,000 ratings in eight parts; computing is paced by
         sleeping (1 s per clock), so that one machine stands for five.
digits   softmax regression on scikit-learn's digits, a table of 65 rows of 10. A clock is one batch
         of 128 images and is not paced: the links are busy all the time.
clicks   softmax regression of 4 classes on 20 of 2,000 features, drawn by popularity, so that a
         clock (a batch of 64, paced to 50 ms) touches other rows than the one before. Nothing of
         managed communication was tuned on it.

The loss is the workers' mean, each with the rows that it sees. Needs root and iproute2.

python benchmarks/tables/managed.py [--data ratings digits clicks] [--mbit 1 3 10 100] [--repeats 1]
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
from hocket.tables.worker import Table

WORKERS, FIRST_PORT = 4, 7000
SYSTEMS: dict[str, dict[str, Any]] = {
    "BSP": {"mode": "essp", "staleness": 0},
    "SSP": {"mode": "ssp"},
    "ESSP": {"mode": "essp"},
    "managed, fifo": {"mode": "managed", "order": "fifo"},
    "managed, random": {"mode": "managed", "order": "random"},
    "managed": {"mode": "managed", "order": "magnitude"},
}


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


class Ratings:
    """One worker's ratings: popular items come more often, in shuffled numbering."""

    shape, staleness, clocks, rate = (1000, 16), 1, 12, 0.01
    users, count, parts, clock_s = 400, 40_000, 8, 1.0

    def __init__(self, worker: int) -> None:
        num_items = self.shape[0]
        truth = np.random.default_rng(1)
        hidden_items = truth.normal(size=(num_items, 8)) / 8**0.25
        weights = truth.permutation(1 / np.arange(1, num_items + 1) ** 0.5)
        random = np.random.default_rng(100 + worker)
        hidden_users = random.normal(size=(self.users, 8)) / 8**0.25
        self.who = random.integers(0, self.users, self.count)
        self.what = random.choice(num_items, self.count, p=weights / weights.sum())
        values = (hidden_users[self.who] * hidden_items[self.what]).sum(axis=1)
        self.values = (values + random.normal(size=self.count) * 0.3).astype(np.float32)
        rank = self.shape[1]
        self.factors = np.random.default_rng(worker).normal(size=(self.users, rank)) * 0.2
        self.factors = self.factors.astype(np.float32)
        self.rows = np.zeros(self.shape, np.float32)
        self._pass(0, 0)

    def _pass(self, start: int, stop: int) -> float:
        return sgd_pass(self.who, self.what, self.values, start, stop, self.factors, self.rows,
                        np.float32(self.rate), np.float32(0.02))  # fmt: skip

    def clock(self, table: Table) -> float:
        """One pass over the ratings; their mean squared error."""
        error = 0.0
        for part in range(self.parts):
            start, stop = (self.count * (part + k) // self.parts for k in (0, 1))
            seen = np.unique(self.what[start:stop])
            before = self.rows[seen] = table.get(seen)
            error += self._pass(start, stop)
            table.inc(seen, self.rows[seen] - before)
            time.sleep(self.clock_s / self.parts)
        return error / self.count


class Digits:
    """One worker's quarter of the digits."""

    shape, staleness, clocks, rate = (65, 10), 2, 200, 0.5

    def __init__(self, worker: int) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        mine = np.random.default_rng(0).permutation(len(labels))[worker::WORKERS]
        pixels = images[mine] / 16
        self.images = np.hstack([pixels, np.ones((len(pixels), 1))])
        self.labels, self.random = labels[mine], np.random.default_rng(worker)

    def clock(self, table: Table) -> float:
        """One step; the cross-entropy of all own images before it."""
        weights = table.get(np.arange(self.shape[0]))
        scores = self.images @ weights
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        batch = self.random.integers(0, len(self.labels), 128)
        slope = np.exp(scores[batch])
        slope[np.arange(len(batch)), self.labels[batch]] -= 1
        step = -self.rate / WORKERS / len(batch) * self.images[batch].T @ slope
        table.inc(np.arange(self.shape[0]), step.astype(np.float32))
        return float(-scores[np.arange(len(self.labels)), self.labels].mean())


class Clicks:
    """One worker's samples: few of many features each, popular ones more often."""

    shape, staleness, clocks, rate = (2000, 4), 2, 60, 1.0
    count, per_sample, clock_s = 4000, 20, 0.05

    def __init__(self, worker: int) -> None:
        num_features, num_classes = self.shape
        truth = np.random.default_rng(5)
        weights = 1 / truth.permutation(np.arange(1, num_features + 1)) ** 0.8
        hidden = truth.normal(size=self.shape)
        self.random = np.random.default_rng(200 + worker)
        self.features = self.random.choice(
            num_features, (self.count, self.per_sample), p=weights / weights.sum()
        )
        scores = hidden[self.features].sum(axis=1)
        scores += self.random.gumbel(size=(self.count, num_classes))
        self.labels = scores.argmax(axis=1)
        self.losses: list[float] = []

    def clock(self, table: Table) -> float:
        """One step on 64 samples; the cross-entropy of 256, a mean over the last 20 clocks."""
        batch = self.random.integers(0, self.count, 256)
        seen, places = np.unique(self.features[batch], return_inverse=True)
        weights = table.get(seen)
        rows = places.reshape(len(batch), self.per_sample)
        scores = weights[rows].sum(axis=1)
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        loss = float(-scores[np.arange(len(batch)), self.labels[batch]].mean())
        slope = np.exp(scores[:64])
        slope[np.arange(64), self.labels[batch[:64]]] -= 1
        step = np.zeros_like(weights)
        np.add.at(step, rows[:64].ravel(), np.repeat(slope, self.per_sample, axis=0))
        table.inc(seen, (-self.rate / WORKERS / 64 * step).astype(np.float32))
        time.sleep(self.clock_s)
        self.losses = [*self.losses[-19:], loss]
        return float(np.mean(self.losses))


DATA: dict[str, type[Ratings] | type[Digits] | type[Clicks]] = {
    "ratings": Ratings,
    "digits": Digits,
    "clicks": Clicks,
}


def layout_of(run: dict[str, Any]) -> Layout:
    """The table of one run."""
    data = DATA[run["data"]]
    options = {"staleness": data.staleness, **SYSTEMS[run["system"]]}
    return Layout((TableSpec("shared", *data.shape, **options),), 1, WORKERS)


def clocks_of(run: dict[str, Any]) -> int:
    """SSP sets the loss that the others must reach, which may take them more clocks."""
    clocks = DATA[run["data"]].clocks
    return clocks if run["system"] == "SSP" else clocks * 3 // 2


def work(number: int, plan: dict[str, Any]) -> None:
    """A worker: all runs, one after another; a line of results for each."""
    from hocket.tables.transports.zeromq import ZeroMqClientPort

    for place, run in enumerate(plan["runs"]):
        port = ZeroMqClientPort(number, [f"tcp://{plan['server']}:{FIRST_PORT + place}"])
        data, rows = DATA[run["data"]](number), []
        with Node(layout_of(run), number, port, timeout_s=120) as node:
            (worker,) = node.workers
            fill(worker, number)
            started_s, blocked_s = time.monotonic(), node.blocked_s
            for _ in range(clocks_of(run)):
                loss = data.clock(worker["shared"])
                worker.clock()
                rows.append([time.monotonic() - started_s, loss if np.isfinite(loss) else None])
            blocked_s = node.blocked_s - blocked_s
        print(json.dumps({"rows": rows, "blocked_s": blocked_s,
                          "sent_bytes": node.routes[0].budget.sent_bytes}), flush=True)  # fmt: skip


def fill(worker: Worker, number: int) -> None:
    """The first worker gives the rows their start; all go on when everybody has it."""
    table = worker["shared"]
    every = np.arange(table.spec.num_rows)
    table.get(every)
    if number == 0:
        start = np.random.default_rng(7).normal(size=(len(every), table.spec.width)) * 0.2
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
        clocks = clocks_of(run) + layout.tables[0].staleness + 1
        while server.states[0].clocks.min() < clocks * layout.ticks_per_clock:
            server.turn(0.005)
            for earlier, until_s in active:  # its workers may still wait for their last answers
                if time.monotonic() < until_s:
                    earlier.turn(0)
        active = [*active, (server, time.monotonic() + 30)][-2:]
    while time.monotonic() < active[-1][1]:
        active[-1][0].turn(0.005)


def measure(mbit: float, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs over links of one rate: loss and time after each clock over all workers."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from testbed import Shape, Testbed

    shape = Shape(mbit * 1e6 / 8)
    hosts = {"server": shape} | {f"worker{n}": shape for n in range(WORKERS)}
    results = []
    with Testbed(hosts) as bed:
        plan = {"server": bed.address("server"), "runs": runs}
        base = [sys.executable, __file__, "--plan", json.dumps(plan), "--role"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = bed.start("server", [*base, "server"], **pipes)
        server.stdout.readline()
        workers = [bed.start(f"worker{n}", [*base, str(n)], **pipes) for n in range(WORKERS)]
        for run in runs:
            found = [json.loads(process.stdout.readline()) for process in workers]
            results.append({"mbit": mbit, **run, **combined(found)})
            print(summary(results[-1]), file=sys.stderr, flush=True)
    return results


def combined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of all workers as one; None from where one diverged."""
    losses: list[float | None] = []
    for at_clock in zip(*(each["rows"] for each in found), strict=True):
        errors = [error for _, error in at_clock]
        lost = None in errors or None in losses[-1:]
        losses.append(None if lost else float(np.mean(errors)))
    times = [max(t for t, _ in each) for each in zip(*(f["rows"] for f in found), strict=True)]
    return {"loss": losses, "time_s": times,
            "blocked_s": float(np.mean([f["blocked_s"] for f in found])),
            "sent_bytes": sum(f["sent_bytes"] for f in found)}  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    """One line of a run."""
    last = result["loss"][-1]
    loss = "diverged" if last is None else f"{last:.4f}"
    return (f"{result['mbit']:g} Mbit, {result['data']}, {result['system']}: {loss} after "
            f"{result['time_s'][-1]:.1f} s, blocked {result['blocked_s']:.1f} s, "
            f"{result['sent_bytes'] / 1e6:.2f} MB up")  # fmt: skip


def time_to(result: dict[str, Any], target: float) -> float:
    """Seconds until the loss is first at most ``target``, on a straight line between clocks."""
    before: tuple[float, float] | None = None
    for at_s, loss in zip(result["time_s"], result["loss"], strict=True):
        if loss is None:
            break
        if loss <= target:
            if before is None:
                return at_s
            part = (before[1] - target) / (before[1] - loss)
            return before[0] + part * (at_s - before[0])
        before = at_s, loss
    return float("inf")


def ratios(
    results: list[dict[str, Any]], system: str = "managed"
) -> dict[tuple[str, float], float]:
    """Time of a system over SSP's, to the loss that SSP ends with; the median of the repeats."""
    found: dict[tuple[str, float], list[float]] = {}
    for base in results:
        if base["system"] != "SSP":
            continue
        for other in results:
            same = all(base[key] == other[key] for key in ("data", "mbit", "repeat"))
            if same and other["system"] == system:
                ratio = time_to(other, base["loss"][-1]) / base["time_s"][-1]
                found.setdefault((base["data"], base["mbit"]), []).append(ratio)
    return {key: float(np.median(each)) for key, each in found.items()}


def compare(
    data: list[str], mbit: list[float], systems: list[str], repeats: int
) -> list[dict[str, Any]]:
    """All systems on all data sets over links of all rates."""
    runs = [{"data": name, "system": system, "repeat": repeat} for repeat in range(repeats)
            for name in data for system in systems]  # fmt: skip
    return [result for rate in mbit for result in measure(rate, runs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--mbit", type=float, nargs="+", default=[1, 3, 10, 100])
    parser.add_argument("--systems", nargs="+", default=["SSP", "ESSP", "managed"],
                        choices=list(SYSTEMS))  # fmt: skip
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "server":
        serve(json.loads(options.plan))
    elif options.role:
        work(int(options.role), json.loads(options.plan))
    else:
        results = compare(options.data, options.mbit, options.systems, options.repeats)
        if options.json:
            options.json.write_text(json.dumps(results))
        print("| data | Mbit | system | loss at the end | s | s to SSP's loss / SSP's s |")
        print("|---|---|---|---|---|---|")
        for result in results:
            key = result["data"], result["mbit"]
            ratio = ratios([each for each in results if each["repeat"] == result["repeat"]],
                           result["system"]).get(key, float("nan"))  # fmt: skip
            loss = "diverged" if result["loss"][-1] is None else f"{result['loss'][-1]:.4f}"
            print(f"| {result['data']} | {result['mbit']:g} | {result['system']} | {loss} | "
                  f"{result['time_s'][-1]:.1f} | {ratio:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
