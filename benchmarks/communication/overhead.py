"""What propagation by priority costs where it is left off: processor time of a rank's main thread.

    python benchmarks/communication/overhead.py

Two ranks on this machine train eight layers; communication is short beside computing, so that
``crosses=None`` keeps the barrier. Steps without communication, with DistributedDataParallel and
with `hocket.priority` are interleaved; processor time does not count what others do.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time

ROUNDS, STEPS = 4, 5


def _steps(model, optimizer, batch, count: int) -> list[float]:
    spent_s = []
    for _ in range(count):
        began_s = time.thread_time()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        spent_s.append(time.thread_time() - began_s)
    return spent_s


def _rank() -> None:
    import torch
    import torch.distributed as dist

    import hocket.priority

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(8)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(512, 10))

    models = {
        "without communication": net(),
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel(net()),
        "hocket.priority": net(),
    }
    optimizers = {name: torch.optim.SGD(m.parameters(), 0.01) for name, m in models.items()}
    wrapped = hocket.priority.wrap(models["hocket.priority"], optimizers["hocket.priority"])
    batch = torch.randn(768, 512)
    found: dict[str, list[float]] = {name: [] for name in models}
    for number in range(ROUNDS + 1):
        for name, model in models.items():
            spent_s = _steps(model, optimizers[name], batch, STEPS)
            found[name] += spent_s if number else []
            dist.barrier()
    if dist.get_rank() == 0:
        print(f"crosses: {wrapped.crosses}")
        for name, spent_s in found.items():
            print(f"{name:24} {1e3 * min(spent_s):7.2f} ms, median "
                  f"{1e3 * statistics.median(spent_s):.2f}", flush=True)  # fmt: skip
    wrapped.close()


def main() -> None:
    if "RANK" in os.environ:
        _rank()
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "HOCKET_CLUSTER": "2xv100-16g",
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", __file__]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(n)}) for n in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
