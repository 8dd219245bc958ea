"""A recommender whose user and item embeddings live in tables, trained by two machines.

python examples/tables_recommender.py                         one shard and two clients, here

On machines of their own (the shard on the first):

python examples/tables_recommender.py --serve tcp://*:4000
python examples/tables_recommender.py --client 0 --at tcp://10.0.0.1:4000
python examples/tables_recommender.py --client 1 --at tcp://10.0.0.1:4000

Ratings are a table user,item,rating (--ratings file.csv), or made up. Each client trains on its
part of them; rows travel as they change, under bounded staleness (--staleness 0: synchronously).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time

import numpy as np
import torch
from torch.nn import functional

from hocket.tables import Embedding, Layout, Node, ShardServer, TableOptimizer, TableSpec
from hocket.tables.address import client_port, shard_port

NUM_CLIENTS, WIDTH, BATCH = 2, 16, 512


def ratings(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items and ratings; the last tenth is kept for evaluation."""
    if options.ratings:
        found = np.loadtxt(options.ratings, delimiter=",", skiprows=1, usecols=(0, 1, 2))
        users, items = (np.unique(found[:, k], return_inverse=True)[1] for k in (0, 1))
        return users, items, found[:, 2] - found[:, 2].mean()
    rng = np.random.default_rng(7)
    left, right = rng.standard_normal((2000, 4)), rng.standard_normal((1500, 4))
    users, items = rng.integers(0, 2000, 60_000), rng.integers(0, 1500, 60_000)
    return users, items, (left[users] * right[items]).sum(1) / 2 + rng.normal(0, 0.1, len(users))


def layout_of(options: argparse.Namespace) -> Layout:
    """Two tables with AdaGrad's steps, one shard, two clients; staleness 0 adds plain gradients."""
    users, items, _ = ratings(options)
    tables = [
        TableSpec(name, int(numbers.max()) + 1, WIDTH, staleness=options.staleness,
                  is_adaptive=True, rate=0.3)
        for name, numbers in (("users", users), ("items", items))
    ]  # fmt: skip
    return Layout(tuple(tables), 1, NUM_CLIENTS)


def serve(options: argparse.Namespace) -> None:
    """Hold the tables until the program is ended."""
    port = shard_port(layout_of(options), 0, options.serve)
    print(port.address, flush=True)
    ShardServer(layout_of(options), 0, port).run(threading.Event())


def train(options: argparse.Namespace) -> None:
    """Train on every second rating, and tell the error of ratings that nobody trains on."""
    users, items, wanted = (torch.from_numpy(part) for part in ratings(options))
    wanted = wanted.float()
    split = len(wanted) * 9 // 10
    mine = torch.arange(options.client, split, NUM_CLIENTS)
    layout = layout_of(options)
    with Node(layout, options.client, client_port(layout, options.client, [options.at])) as node:
        worker = node.workers[0]
        of_users, of_items = (
            Embedding(worker[name], std=0.3, seed=number)
            for number, name in enumerate(("users", "items"))
        )
        optimizer = TableOptimizer([of_users, of_items])

        def error(part: torch.Tensor) -> torch.Tensor:
            found = (of_users(users[part]) * of_items(items[part])).sum(1)
            return functional.mse_loss(found, wanted[part], reduction="sum")

        for epoch in range(options.epochs):
            start = time.perf_counter()
            for part in mine[torch.randperm(len(mine))].split(BATCH):
                error(part).backward()
                optimizer.step()
            with torch.no_grad():
                held_out = torch.arange(split, len(wanted))
                rmse = (error(held_out) / len(held_out)).sqrt()
            print(f"client {options.client}, epoch {epoch}: RMSE {rmse:.4f} on held-out ratings, "
                  f"{time.perf_counter() - start:.1f} s", flush=True)  # fmt: skip


def here(options: argparse.Namespace) -> None:
    """Start a shard and two clients on this machine."""
    common = [sys.executable, __file__, "--epochs", str(options.epochs),
              "--staleness", str(options.staleness)]  # fmt: skip
    common += ["--ratings", options.ratings] if options.ratings else []
    shard = subprocess.Popen([*common, "--serve", "tcp://127.0.0.1:*"],
                             stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert shard.stdout is not None
        address = shard.stdout.readline().strip()
        clients = [
            subprocess.Popen([*common, "--client", str(number), "--at", address])
            for number in range(NUM_CLIENTS)
        ]
        sys.exit(max(client.wait() for client in clients))
    finally:
        shard.terminate()


def main() -> None:
    """Serve, train, or do both here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", metavar="ADDRESS")
    parser.add_argument("--client", type=int)
    parser.add_argument("--at", metavar="ADDRESS")
    parser.add_argument("--ratings", metavar="CSV")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        serve(options)
    elif options.client is not None:
        train(options)
    else:
        here(options)


if __name__ == "__main__":
    main()
