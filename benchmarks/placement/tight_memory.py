"""How tight memory may be: the largest share of it that a step may need and still gets a plan.

    .venv/bin/python benchmarks/placement/tight_memory.py             # the table, some minutes
    .venv/bin/python benchmarks/placement/tight_memory.py gnmt  # graphs so named
    .venv/bin/python benchmarks/placement/tight_memory.py --speed     # 200,000 ops on 16 devices

The need is the peak of the whole step on one device. All devices together get need / share bytes,
split equally or 2:1:1; the share is bisected up to 1. A cell shows the largest share with which
`memory_split` found a plan that fits, and in brackets what the largest set of ops that must sit
together needs, as a part of the smallest device at a share of 0.92: where that is near 1 or above,
no planner can do much. Times are CPU seconds of one process, compilation excluded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from hocket.graph.coarsen import bound_ops
from hocket.graph.files import read_graph
from hocket.graph.generators import generate
from hocket.graph.graph import Graph
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners import find_planner
from hocket.planners.placement.memory_fit import memory_split, spread_memory
from hocket.planners.placement.memory_shortage import tie_needs
from hocket.simulate import simulate

SHARES = ((1, 1), (1, 1, 1), (1,) * 4, (1,) * 8, (2, 1, 1))
PROMISED = 0.92
BISECTIONS = 5
PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "placement"
PUBLIC_GRAPHS = (
    "dnn-partitioning/throughput-inputs/OperatorGraphs/bert_L-12_training.json",
    "dnn-partitioning/throughput-inputs/OperatorGraphs/resnet50_training.json",
    "dnn-partitioning/throughput-inputs/LayerGraphs/inceptionv3_training.json",
    "pipedream/profiler/image_classification/profiles/nasnetamobile/graph.txt",
    "pipedream/profiler/image_classification/profiles/resnet50/graph.txt",
    "pipedream/profiler/image_classification/profiles/vgg16/graph.txt",
)
MODELS: tuple[tuple[str, dict[str, int]], ...] = (
    ("gpt2", {"batch": 4, "seq": 512}),
    ("bert-large", {"batch": 4, "seq": 256}),
    ("t5-base", {"batch": 4, "seq": 256}),
    ("vit-base", {"batch": 16}),
    ("resnet50", {"batch": 32}),
    ("wide-resnet", {"batch": 16}),
    ("inception-v3", {"batch": 32}),
    ("moe-12x32", {"batch": 2, "seq": 128}),
    ("gnmt-4", {"batch": 64, "seq": 12}),
    ("lstm", {"batch": 64, "seq": 20}),
)


def graphs() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Names and how to get the graphs: generated, captured and public ones."""
    for family, num_ops in (("transformer", 400), ("transformer", 3000), ("gnmt", 2000)):
        yield f"{family}, {num_ops} ops", lambda f=family, n=num_ops: generate(f, n, 1)  # type: ignore[misc]
    for name, sizes in MODELS:
        yield name, lambda name=name, sizes=sizes: captured(name, sizes)  # type: ignore[misc]
    for path in PUBLIC_GRAPHS:
        if (PUBLIC / path).exists():
            label = Path(path).stem if path.endswith(".json") else f"{Path(path).parts[-2]}, layers"
            yield label, lambda path=path: read_graph(PUBLIC / path)  # type: ignore[misc]


def captured(name: str, sizes: dict[str, int]) -> Graph:
    """A model of the zoo."""
    from hocket.capture import capture, load_model

    return capture(*load_model(name, batch=sizes["batch"], seq=sizes.get("seq")))


def tight(problem: Problem, shares: tuple[int, ...], filled: float) -> Problem:
    """The problem with so little memory that the step needs ``filled`` of it."""
    alone = Plan().placing(np.zeros(problem.graph.num_ops, dtype=np.int32))
    total = int(simulate(problem, alone).peak_bytes[0]) / filled
    devices = tuple(
        # What libraries reserve and the headroom of the device come on top.
        replace(
            device,
            memory_bytes=int(np.ceil(total * share / sum(shares)))
            + device.memory_bytes
            - int(usable),
        )
        for device, share, usable in zip(
            problem.cluster.devices, shares, problem.memory_bytes, strict=True
        )
    )
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def lacking(problem: Problem, plan: Plan) -> int:
    """Bytes above the limits."""
    over = simulate(problem, plan).peak_bytes - problem.memory_bytes
    return int(np.maximum(over, 0).sum())


def largest_share(problem: Problem, shares: tuple[int, ...]) -> tuple[float, float]:
    """The largest share with which a plan was found, and the seconds of the try at 0.92."""
    begin = time.process_time()
    promised = tight(problem, shares, PROMISED)
    fits = lacking(promised, memory_split(promised, Plan())) == 0
    seconds = time.process_time() - begin
    low, high = (PROMISED, 1.0) if fits else (0.3, PROMISED)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        tried = tight(problem, shares, middle)
        if lacking(tried, memory_split(tried, Plan())):
            high = middle
        else:
            low = middle
    return low, seconds


def table(wanted: list[str]) -> None:
    print("| graph | ops | " + " | ".join(":".join(map(str, shares)) for shares in SHARES) + " |")
    print("|---|---|" + "---|" * len(SHARES))
    slowest_s = 0.0
    for name, make in graphs():
        if wanted and not any(text in name for text in wanted):
            continue
        graph = make()
        cells = []
        for shares in SHARES:
            problem = make_problem(graph, f"{len(shares)}xv100-16g")
            share, seconds = largest_share(problem, shares)
            slowest_s = max(slowest_s, seconds)
            smallest = tight(problem, shares, PROMISED).memory_bytes.min()
            part = tie_needs(graph, bound_ops(graph)).max() / smallest
            cells.append(f"{share:.2f} ({part:.2f})")
        print(f"| {name} | {graph.num_ops:,} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nslowest plan at a share of {PROMISED}: {slowest_s:.1f} s")


def speed() -> None:
    graph = generate("gnmt", 204_800, 0)
    for num_ops in (2_000, 204_800):
        # The first round only compiles.
        graph = generate("gnmt", num_ops, 0)
        for filled in (0.5,) if num_ops == 2_000 else (0.5, 0.7, 0.8, 0.92):
            problem = tight(make_problem(graph, "16xv100-16g"), (1,) * 16, filled)
            start = find_planner("m-topo")(problem, Plan())
            results = []
            for planner, plan in ((spread_memory, start), (memory_split, Plan())):
                begin = time.process_time()
                made = planner(problem, plan)
                seconds = time.process_time() - begin
                timeline = simulate(problem, made)
                lacks = lacking(problem, made) / problem.memory_bytes.sum()
                results.append(
                    f"{planner.__name__} {seconds:.2f} s, lacks {100 * lacks:.1f} %, step "
                    f"{timeline.makespan_s:.2f} s"
                )
            before = 100 * lacking(problem, start) / problem.memory_bytes.sum()
            print(f"{graph.num_ops:,} ops, {filled}: m-topo lacks {before:.1f} %;", *results)


def main() -> None:
    if "--speed" in sys.argv:
        speed()
    else:
        table(sys.argv[1:])


if __name__ == "__main__":
    main()
