"""Gradients by priority against wait-free FIFO on shaped links, rounds interleaved.

    sudo python benchmarks/communication/priority.py --mbit 200

Ranks are network namespaces on a star (benchmarks/testbed.py). The model has the gradient sizes of
VGG-19 (divided by 32) or of a ResNet-like net; computing is emulated by sleeping in forward and
backward, as an accelerator beside the processor computes, so that it takes as long as communication
(--ratio 1). ``wait-free`` sends layers in the order of backward and waits for all when the
optimizer steps; ``priority`` is `hocket.priority`. Same executor, trees and slices (whole layers
would not fill the pipeline of a tree and take three times as long).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testbed import drive_or_follow

_VGG19 = [1.7, 37, 74, 148, 295, 590, 590, 590, 1180, 2360, 2360, 2360, 2360, 2360, 2360, 2360,
          102_760, 16_777, 4_097]  # fmt: skip
"""Thousands of parameters of each layer of VGG-19."""
_RESNET = [9.4, *(75, 70, 70) * 1, *(280, 280, 280, 280), *(1100,) * 6, *(4400,) * 3, 2048]
MODELS = {
    "vgg": [max(16, int(1000 * k / 32)) for k in _VGG19],
    "resnet": [max(16, int(1000 * k / 16)) for k in _RESNET],
}
WAYS: dict[str, dict[str, Any] | None] = {
    "computing alone": None,
    "communication alone": {"crosses": False, "is_backward_order": True},
    "wait-free": {"crosses": False, "is_backward_order": True},
    "priority": {"crosses": True},
    "as it pays": {"crosses": None},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="vgg")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--ratio", type=float, default=1.0, help="computing / communication")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    drive_or_follow(parser, _drive, _rank)


def _drive(options: argparse.Namespace) -> None:
    import numpy as np
    from testbed import Shape, Testbed

    from hocket.hardware.files import cluster_to_toml
    from hocket.hardware.probed import Rates, cluster_of
    from hocket.planners.communication.priority import choose_propagation
    from hocket.simulate.gradients import GradientChannel, LayerWork

    count, rate_bps = options.ranks, options.mbit * 1e6 / 8
    each = np.full((count, count), rate_bps)
    np.fill_diagonal(each, 0.0)
    cluster = cluster_of(Rates(each, each / (count - 1), np.full(each.shape, 1e-4)))
    sizes = [4 * k for k in MODELS[options.model]]
    # A star lets all-reduce through at half of a port, times n / (n - 1).
    sums_bps = rate_bps / 2 * count / (count - 1)
    communicates_s = sum(sizes) / sums_bps
    # As of a convolution net: computing is spread evenly, parameters are not.
    part_s = options.ratio * communicates_s / 3 / len(sizes)
    layers = [LayerWork(part_s, 2 * part_s, size) for size in sizes]
    predicted = choose_propagation(layers, GradientChannel(sums_bps, 1e-4, 1e-3))
    shape = Shape(rate_bps, burst_bytes=100_000)
    names = [f"r{n}" for n in range(count)]
    with tempfile.TemporaryDirectory() as folder, Testbed(dict.fromkeys(names, shape)) as bed:
        file, links = Path(folder) / "task.json", Path(folder) / "links.toml"
        links.write_text(cluster_to_toml(cluster))
        file.write_text(json.dumps({
            "sizes": MODELS[options.model], "forward_s": part_s, "rounds": options.rounds,
            "steps": options.steps, "count": count, "master": bed.address("r0"),
        }))  # fmt: skip
        processes = [
            bed.start(name, [sys.executable, "-W", "ignore", __file__, "--rank", str(file)],
                      stdout=subprocess.PIPE, text=True,
                      env={**os.environ, "RANK": str(number), "OMP_NUM_THREADS": "1",
                           "HOCKET_CLUSTER": str(links)})
            for number, name in enumerate(names)
        ]  # fmt: skip
        found = json.loads(processes[0].communicate(timeout=580)[0])
    alone = [statistics.median(found[f"{part} alone"]) for part in ("computing", "communication")]
    bound_s = max(alone)
    print(f"{options.model}, {count} ranks, {options.mbit:g} Mbit/s, computing / communication "
          f"{options.ratio:g}: nominal bound {predicted.lower_bound_s:.3f} s; predicted wait-free "
          f"{predicted.offer('wait-free').step_s:.3f}, priority "
          f"{predicted.offer('priority, slices').step_s:.3f} s")  # fmt: skip
    base = statistics.median(found["wait-free"])
    for way, seconds in found.items():
        middle = statistics.median(seconds)
        print(
            f"{way:19} {middle:.3f} [{min(seconds):.3f}-{max(seconds):.3f}] s a step, "
            f"{100 * (middle / bound_s - 1):+.0f} % over the longer, {base / middle:.2f}x wait-free"
        )


def _rank(file: Path) -> None:
    import torch
    import torch.distributed as dist

    from hocket.plan.make import find_cluster
    from hocket.runtime.collectives.priority_sync import Propagation
    from hocket.runtime.collectives.tree_thread import TreeThread

    task = json.loads(file.read_text())
    rank, count = int(os.environ["RANK"]), task["count"]
    os.environ |= {"MASTER_ADDR": task["master"], "GLOO_SOCKET_IFNAME": "eth0"}
    store = dist.TCPStore(task["master"], 29500, count, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    spent = {way: [] for way in WAYS}
    trained = {}
    for way, options in WAYS.items():
        forward_s = 0.0 if way == "communication alone" else task["forward_s"]
        net = _slow_net(torch, task["sizes"], forward_s, float(rank))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if options is None:
            trained[way] = (net, optimizer, None)
            continue
        known = dist.PrefixStore(way, store)
        cluster = find_cluster(os.environ["HOCKET_CLUSTER"])
        exchange = TreeThread(known, rank, count, lambda cluster=cluster: cluster)
        exchange.open()
        wrapped = Propagation(net, optimizer, exchange, **options)
        trained[way] = (net, optimizer, wrapped)
    for number in range(task["rounds"] + 1):
        for way, (net, optimizer, _) in trained.items():
            dist.barrier()
            for step in range(task["steps"] + 2):
                if step == 2:  # the first ones lay out and fill the pipe
                    start_s = time.monotonic()
                net(torch.zeros(1, requires_grad=True)).sum().backward()
                optimizer.step()
            took_s = (time.monotonic() - start_s) / task["steps"]
            net.state_dict()
            if number:
                spent[way].append(took_s)
    if rank == 0:
        print(json.dumps(spent), flush=True)
    dist.barrier()
    for _, _, wrapped in trained.values():
        if wrapped is not None:
            wrapped.close()
    dist.destroy_process_group()


def _slow_net(torch: Any, sizes: list[int], forward_s: float, slope: float) -> Any:
    """Layers that sleep, and whose gradients are constants."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.size = len(weight)
            time.sleep(forward_s)
            return x + 0

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            time.sleep(2 * forward_s)
            return gradients[0], torch.full((ctx.size,), slope)

    class Layer(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(size))

        def forward(self, x: Any) -> Any:
            return Slow.apply(x, self.weight)

    return torch.nn.Sequential(*map(Layer, sizes))


if __name__ == "__main__":
    main()
