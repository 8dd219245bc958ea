"""The problems on which placement is judged: public graphs, captured models, generated graphs.

Each has a name, a graph and a cluster: equal and unequal devices, fast and slow links, loose and
tight memory. ``problems()`` makes them one by one; public graphs are left out where their folder
(``../shared/data/placement``) is not there. Used by ``benchmarks/placement/quality.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from hocket.cost.roofline import estimate_costs
from hocket.graph.files import read_graph
from hocket.graph.generators import generate
from hocket.graph.graph import Graph
from hocket.hardware import Cluster
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate import simulate

DATA = Path(__file__).parents[3] / "shared" / "data" / "placement"
PROFILES = DATA / "pipedream" / "profiler"
UNEQUAL = "1xv100-32g + 2xt4"
TIGHT = 0.85
"""Tight memory: the step needs this share of what all devices have together."""

CAPTURED = (
    ("gpt2", {"batch": 8, "seq": 512}, "4xrtx2080"),
    ("gpt2", {"batch": 8, "seq": 1024}, "mixed-desktop"),
    ("gpt2-medium", {"batch": 8, "seq": 512}, "2xv100-16g + 2xt4"),
    ("bert-large", {"batch": 16, "seq": 256}, UNEQUAL),
    ("t5-base", {"batch": 8, "seq": 256}, "4xv100-16g"),
    ("vit-base", {"batch": 64}, UNEQUAL),
    ("mixtral-small", {"batch": 4, "seq": 256}, "4xv100-16g"),
    ("resnet50", {"batch": 64}, "rtx2080x4"),
    ("resnet152", {"batch": 64}, UNEQUAL),
    ("inception-v3", {"batch": 32}, "rtx2080x4"),
    ("inception-v3", {"batch": 64}, "4xv100-16g"),
    ("gnmt-4", {"batch": 128, "seq": 40}, "rtx2080x4"),
    ("gnmt-8", {"batch": 128, "seq": 50}, "rtx2080x4"),
    ("lstm", {"batch": 64}, "4xv100-16g"),
    ("moe-12x32", {"batch": 4, "seq": 256}, "4xa100-40g"),
)
"""Models, how they are built, and on what they are placed."""

GENERATED = (
    ("gnmt", 2_000, "4xv100-16g"),
    ("gnmt", 2_000, "rtx2080x4"),
    ("gnmt", 10_000, "8xv100-16g"),
    ("gnmt", 10_000, UNEQUAL),
    ("transformer", 2_000, "4xa100-40g"),
    ("transformer", 8_000, "16xa100-40g"),
    ("transformer", 2_000, "mixed-desktop"),
    ("layered", 500, "4xv100-16g"),
    ("layered", 2_000, "rtx2080x4"),
    ("layered", 2_000, UNEQUAL),
    ("layered", 8_000, "8xa100-40g"),
    ("series-parallel", 500, "4xv100-16g"),
    ("series-parallel", 2_000, "8xv100-16g"),
    ("series-parallel", 2_000, "rtx2080x4"),
    ("series-parallel", 2_000, UNEQUAL),
)
SMALL = tuple(
    (family, size, devices)
    for family in ("layered", "series-parallel")
    for size, devices in ((10, 2), (16, 3), (22, 2), (28, 3))
)
"""Graphs small enough to prove their optimum; transfers do not disturb each other."""
TIGHT_CASES = (
    ("gpt2", {"batch": 4, "seq": 512}, "4xv100-16g"),
    ("resnet50", {"batch": 32}, "3xv100-16g"),
    ("gnmt-4", {"batch": 64, "seq": 40}, "1xv100-32g + 2xt4"),
)


def problems() -> Iterator[tuple[str, Problem]]:
    """All of them, with their names."""
    yield from public()
    yield from captured()
    yield from generated()
    yield from tight()
    yield from small()


def public() -> Iterator[tuple[str, Problem]]:
    """Graphs that others profiled and published."""
    for name in ("alexnet", "vgg16", "resnet50", "inception_v3", "nasnetamobile", "resnext50"):
        path = PROFILES / "image_classification" / "profiles" / name / "graph.txt"
        for on in ("4xv100-16g", "rtx2080x4") if path.exists() else ():
            yield f"pipedream {name}, {on}", make_problem(read_graph(path), on)
    for name in ("gnmt",):
        path = PROFILES / "translation" / "profiles" / name / "graph.txt"
        if path.exists():
            yield f"pipedream {name}, 4xv100-16g", make_problem(read_graph(path), "4xv100-16g")
    for path in sorted((DATA / "dnn-partitioning" / "latency-inputs").rglob("*.json")):
        label = f"{path.parent.name[:-6].lower()} {path.stem}"
        yield f"neurips {label}, file", make_problem(read_graph(path), "file")


def captured() -> Iterator[tuple[str, Problem]]:
    """Training steps of real models."""
    for name, options, on in CAPTURED:
        yield f"{name}, {on}", make_problem(step_of(name, **options), on)


def generated() -> Iterator[tuple[str, Problem]]:
    """Training graphs of several shapes."""
    for index, (family, size, on) in enumerate(GENERATED):
        yield f"{family}-{size}, {on}", make_problem(generate(family, size, index), on)


def small() -> Iterator[tuple[str, Problem]]:
    """Graphs of at most 30 ops."""
    for index, (family, size, devices) in enumerate(SMALL):
        graph = generate(family, size, 100 + index)
        problem = make_problem(graph, f"{devices}xv100-16g", transfers="parallel")
        yield f"small {family}-{graph.num_ops}, {devices} devices", problem


def tight() -> Iterator[tuple[str, Problem]]:
    """Steps that need most of the memory there is."""
    for name, options, on in TIGHT_CASES:
        graph = step_of(name, **options)
        yield f"{name}, {on}, tight", tightened(make_problem(graph, on), TIGHT)


def step_of(name: str, **options: int) -> Graph:
    """The training step of a model of the zoo."""
    from hocket.capture import capture, load_model

    model, batch = load_model(name, **options)
    return capture(model, batch, name=name)


def need_bytes(problem: Problem) -> int:
    """What the whole step needs on one device."""
    alone = Plan().placing(np.zeros(problem.graph.num_ops, dtype=np.int32))
    return int(simulate(problem, alone).peak_bytes[0])


def tightened(problem: Problem, share: float) -> Problem:
    """The problem with so little memory that the step needs ``share`` of all of it."""
    factor = need_bytes(problem) / share / float(problem.memory_bytes.sum())
    cluster = scaled(problem.cluster, factor)
    costs = estimate_costs(problem.graph, cluster)
    return replace(problem, cluster=cluster, op_costs=costs)


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with its memory multiplied."""
    devices = tuple(
        replace(device, memory_bytes=int(device.memory_bytes * factor))
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def cluster_named(text: str) -> Cluster:
    """A cluster by its preset or shorthand."""
    return cluster_from_text(text)
