"""Strategies beside torch's own engines on shaped links: predicted, ours, torch's.

    sudo PYTHONPATH=src python benchmarks/runtime/strategies.py [--mbit 300] [--pairs 30]

Ranks are network namespaces (benchmarks/testbed.py), each with one thread. A pair is a few steps of
the strategy and the same steps of torch's own engine (DDP, FSDP2 or pipelining), in turns within
one run; the ratio is the median over the pairs. Predicted is the simulator's step after a profile
of the ops on all ranks at once. Prints a row per strategy as soon as it is there; ``--seconds``
ends a strategy early, with the pairs that it has.

With ``--cuda`` all ranks share the one GPU that is here and gloo moves its tensors, without shaped
links; nothing is predicted then.

    ddp        equal replicas, gradients summed in buckets beside the backward pass
    unequal    two thirds of the batch on the first rank
    priority   gradients in the order of the next forward pass (P3)
    trees      buckets over planned trees (Blink)
    fsdp       weights, gradients and optimizer states sharded (ZeRO 3), beside FSDP2
    pipeline   one stage per rank, four microbatches per stage in 1F1B, beside torch's pipelining
    budget     equal replicas, each within a memory budget of 1.5 times the plain peak, beside DDP
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
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testbed import drive_or_follow

STRATEGIES = ("ddp", "unequal", "priority", "trees", "fsdp", "pipeline", "budget")
MODELS = {
    # Inputs, outputs of each layer, samples per rank.
    "mlp": ([1024, 1024, 1024, 1024, 1024, 1024, 640], 512),
    "wide": ([256, 4096, 256, 4096, 256, 64], 1024),
    "small": ([256, 256, 256, 256], 128),
}
"""5.9, 4.2 and 0.2 million parameters."""
WARM_UP = 2
MICROBATCHES = 4
"""Per stage of a pipeline."""
KIND = """
[kinds.rank]
memory = "8GiB"
memory_bandwidth = "10GB/s"
peak = {{ float32 = "40e9FLOP/s" }}
launch = "2us"
cpu = true
host_link = {{ bandwidth = "{rate_bps:.0f}B/s", latency = "100us" }}
source = "shaped"

[[devices]]
kind = "rank"
name = "r"
count = {count}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=300)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2, help="steps of each side of a pair")
    parser.add_argument("--cuda", action="store_true", help="all ranks on one GPU, over gloo")
    parser.add_argument("--seconds", type=float, default=200, help="per strategy, at most")
    drive_or_follow(parser, _drive, _rank)


def _drive(options: argparse.Namespace) -> None:
    from testbed import Loopback, Testbed, link_shape

    where = "one GPU" if options.cuda else f"{options.mbit:g} Mbit/s"
    print(f"{options.model}, {options.ranks} ranks, {where}", flush=True)
    print("| strategy | predicted, s | ours, s | torch, s | ours / torch | pairs |")
    print("|---|---|---|---|---|---|", flush=True)
    names = [f"r{n}" for n in range(options.ranks)]
    shape = link_shape(options.mbit * 1e6 / 8)
    hosts = Loopback() if options.cuda else Testbed(dict.fromkeys(names, shape))
    with tempfile.TemporaryDirectory() as folder, hosts as bed:
        for strategy in options.strategies.split(","):
            file = Path(folder) / f"{strategy}.json"
            file.write_text(json.dumps({**vars(options), "rank": None, "strategy": strategy}))
            processes = [
                bed.start(name, [sys.executable, "-W", "ignore", __file__, "--rank", str(file)],
                          stdout=subprocess.PIPE if not number else None, text=True,
                          env={**os.environ, "RANK": str(number), "OMP_NUM_THREADS": "1",
                               "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": "0",
                               "MASTER_ADDR": bed.address("r0"), "MASTER_PORT": "29500",
                               "GLOO_SOCKET_IFNAME": "lo" if options.cuda else "eth0"})
                for number, name in enumerate(names)
            ]  # fmt: skip
            found = json.loads(processes[0].communicate(timeout=580)[0].splitlines()[-1])
            for process in processes:
                process.wait(60)
            ratio = statistics.median(
                a / b for a, b in zip(found["ours"], found["torch"], strict=True)
            )
            print(
                f"| {strategy} | {'-' if options.cuda else format(found['predicted_s'], '.3f')} | "
                f"{statistics.median(found['ours']):.4f} | "
                f"{statistics.median(found['torch']):.4f} | {ratio:.3f} | {len(found['ours'])} |",
                flush=True,
            )


def _rank(file: Path) -> None:
    import torch
    import torch.distributed as dist

    import hocket
    from hocket.simulate import simulate

    options = argparse.Namespace(**json.loads(file.read_text()))
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    sizes, samples = MODELS[options.model]
    device = "cuda" if options.cuda else "cpu"
    batch = tuple(part.to(device) for part in _batch(torch, sizes, samples * count))
    saved = _planned(torch, options, sizes, batch)
    model = _model(torch, sizes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    memory = None
    if options.strategy == "budget":
        # Gradients are held until all ranks have them, and the peak of a plan counts none of that.
        memory = int(1.5 * simulate(saved.problem, saved.plan).peak_bytes.max())
    train = hocket.prepare(model, optimizer, batch, plan=saved, forward=_loss, memory=memory)
    plain = _model(torch, sizes).to(device)
    rows = tuple(part[rank * samples : (rank + 1) * samples] for part in batch)
    if options.strategy == "unequal":
        start = [0, *_unequal(samples, count)]
        first = sum(start[: rank + 1])
        rows = tuple(part[first : first + start[rank + 1]] for part in batch)
    step_of_torch = _torch_step(torch, options.strategy, plain, rows, batch)

    def ours() -> None:
        for _ in range(options.steps):
            train.step(batch)
        if options.strategy == "priority":
            model.state_dict()  # waits for what crosses the end of the last step

    def torchs() -> None:
        for _ in range(options.steps):
            step_of_torch()

    spent: dict[str, list[float]] = {"ours": [], "torch": []}
    for side in (ours, torchs):
        for _ in range(WARM_UP):
            side()
    began_s = time.monotonic()
    for number in range(options.pairs):
        sides: list[tuple[str, Callable[[], None]]] = [("ours", ours), ("torch", torchs)]
        for name, side in sides[:: 1 if number % 2 else -1]:
            dist.barrier()
            start_s = time.monotonic()
            side()
            if options.cuda:
                torch.cuda.synchronize()
            spent[name].append((time.monotonic() - start_s) / options.steps)
        over = torch.tensor(float(time.monotonic() - began_s > options.seconds))
        dist.broadcast(over, 0)
        if over.item():
            break
    if rank == 0:
        print(json.dumps({**spent, "predicted_s": saved.plan.claims.step_s}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _torch_step(torch: Any, strategy: str, model: Any, rows: Any, batch: Any) -> Callable[[], None]:
    """A training step by torch's own engine: ``rows`` of this rank, or the whole ``batch``."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn.parallel import DistributedDataParallel

    rank, count = dist.get_rank(), dist.get_world_size()
    if strategy == "pipeline":
        layers = len(model) // count
        part = torch.nn.Sequential(*list(model)[rank * layers : (rank + 1) * layers or None])
        if rank == count - 1:
            part = torch.nn.Sequential(*list(model)[rank * layers :])
        optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
        stage = PipelineStage(part, rank, count, batch[0].device)
        schedule = Schedule1F1B(
            stage, MICROBATCHES * count, loss_fn=lambda out, y: (out - y).square().mean()
        )

        def pipelined() -> None:
            optimizer.zero_grad()
            given = (batch[0],) if rank == 0 else ()
            schedule.step(*given, target=batch[1] if rank == count - 1 else None, losses=[])
            optimizer.step()

        return pipelined
    if strategy == "fsdp":
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
        # Gloo has no reduction that averages.
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        _loss(model, rows).backward()
        optimizer.step()

    return step


def _unequal(samples: int, count: int) -> list[int]:
    first = samples * count * 2 // 3
    rest = (samples * count - first) // (count - 1)
    return [first, *[rest] * (count - 2), samples * count - first - rest * (count - 2)]


def _planned(torch: Any, options: argparse.Namespace, sizes: list[int], batch: Any) -> Any:
    """The plan of a strategy with its predicted step; all ranks have that of the first."""
    import torch.distributed as dist

    from hocket.capture.model import capture_program
    from hocket.capture.sizes import capture_sizes
    from hocket.cost.calibrate import calibrate
    from hocket.cost.measure import profile_program
    from hocket.cost.profile import profile_from_dict, profile_to_dict
    from hocket.hardware.files import cluster_from_dict
    from hocket.plan.make import make_problem
    from hocket.runtime.planned_optimizer import planned_update

    count, samples = dist.get_world_size(), batch[0].shape[0] // dist.get_world_size()
    model = _model(torch, sizes).to(batch[0].device)
    rate_bps = options.mbit * 1e6 / 8
    cluster = cluster_from_dict(
        {"name": "shaped", **tomllib.loads(KIND.format(rate_bps=rate_bps, count=count))}
    )
    kind, update = cluster.kinds[0], torch.optim.SGD(model.parameters(), lr=1e-3)
    if options.cuda:
        # Ranks share one GPU, which no cluster describes; the plan states who takes which samples.
        graph = capture_sizes(
            model, batch, forward=_loss, optimizer=planned_update(update, model), device="cuda"
        )
        problem = make_problem(graph, f"{count}xh200")
        return _as_planned(options, problem, samples)
    local = tuple(part[:samples] for part in batch)
    for _ in range(3):
        _loss(model, local).backward()
    graph, program = capture_program(model, local, forward=_loss, device="cpu", optimizer=update)
    dist.barrier()
    profile = profile_program(graph, program, kind, budget_s=8.0)
    shared = [profile_to_dict(profile)]
    dist.broadcast_object_list(shared, 0)
    profile = profile_from_dict(shared[0], "profile")
    graph = capture_sizes(
        model, batch, forward=_loss, optimizer=planned_update(update, model), device="cpu"
    )
    problem = make_problem(graph, cluster, calibration=calibrate(profile, kind))
    return _as_planned(options, problem, samples)


def _as_planned(options: argparse.Namespace, problem: Any, samples: int) -> Any:
    from hocket.plan.files import SavedPlan
    from hocket.plan.plan import Plan
    from hocket.plan.sections import Communication, Parallel, Priority, Replica
    from hocket.planners.communication.priority import choose_for_replicas
    from hocket.runtime.strategy import claimed_step_s

    count = options.ranks
    parts = _unequal(samples, count) if options.strategy == "unequal" else [samples] * count
    names = problem.cluster.device_names
    if options.strategy == "pipeline":
        parallel = _pipeline(problem, names, samples * count)
    else:
        parallel = Parallel(replicas=tuple(
            Replica(devices=(name,), microbatches=(part,))
            for name, part in zip(names, parts, strict=True)
        ), zero=3 if options.strategy == "fsdp" else 0)  # fmt: skip
    plan = Plan(planner="benchmark").having(parallel)
    step_s = claimed_step_s(problem, plan)
    if options.strategy == "priority":
        choice = choose_for_replicas(problem, plan)
        assert choice is not None
        offer = choice.offer("priority, slices")
        step_s = offer.step_s
        plan = plan.having(Priority(slice_bytes=int(offer.how.slice_bytes), crosses=True))
    if options.strategy == "trees":
        plan = plan.having(Communication("allreduce", "packed trees", names, names[0], ()))
    return SavedPlan(problem, plan.claiming(step_s=step_s))


def _pipeline(problem: Any, names: Any, samples: int) -> Any:
    """One stage per rank, cut at the layers where torch's stages are cut."""
    from hocket.graph.graph import Phase
    from hocket.plan.sections import Parallel, Replica

    graph, count = problem.graph, len(names)
    forward = [op for op in range(graph.num_ops) if graph.op_phase[op] == Phase.FORWARD]
    layer_of = {op: graph.module_of(op).partition(".")[0] for op in forward}
    layers = 1 + max(int(name) for name in layer_of.values() if name.isdigit())
    cuts = tuple(
        next(op for op in forward if layer_of[op] == str(rank * (layers // count)))
        for rank in range(1, count)
    )
    sizes = (samples // (MICROBATCHES * count),) * (MICROBATCHES * count)
    return Parallel(replicas=(Replica(devices=tuple(names), microbatches=sizes, cuts=cuts),))


def _model(torch: Any, sizes: list[int]) -> Any:
    torch.manual_seed(0)
    layers: list[Any] = []
    for inputs, outputs in pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def _batch(torch: Any, sizes: list[int], samples: int) -> Any:
    draw = torch.Generator().manual_seed(1)
    return (
        torch.randn(samples, sizes[0], generator=draw),
        torch.randn(samples, sizes[-1], generator=draw),
    )


def _loss(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


if __name__ == "__main__":
    main()
