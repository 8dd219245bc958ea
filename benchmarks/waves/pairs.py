"""Pairs of rows of kernels on two streams, beside what the simulator says of them.

    PYTHONPATH=src python benchmarks/waves/pairs.py

A row is one kernel again and again, captured as a CUDA graph, as long as the row beside it. Its
pace is what it takes alone over what both take together; the simulator's is that of two such rows
in two lanes, with the time that was measured of each kernel alone and with what it asks for
(`hocket.cost.demand`).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from timing import Turns, options_of
from torch import nn

from hocket.api.planned import find_cluster
from hocket.capture.model import capture_program
from hocket.cost.costs import Costs, TimeSource
from hocket.cost.demand import FILL, NUM_SHARES, ON_DEVICE, demand_of
from hocket.cost.measure import profile_program
from hocket.cost.profile import merge_profiles
from hocket.cost.roofline import estimate_costs
from hocket.graph import Graph, GraphBuilder, Stream
from hocket.plan.problem import Problem
from hocket.simulate.engine import simulate_placement

_ROW_S = 4e-3
ON = "1xh200"


class Product(nn.Module):
    """A product of square matrices."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right


class Rectified(nn.Module):
    """One pass over memory."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given.relu()


class Convolved(nn.Module):
    """A convolution of ResNet-56."""

    def forward(self, images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(images, weight, padding=1)


def kernels() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """From those that ask for little to those that ask for all."""

    def square(size: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(size, size) for _ in range(2))

    return {
        "product 256": (Product(), square(256)),
        "product 1024": (Product(), square(1024)),
        "product 8192": (Product(), square(8192)),
        "relu 0.5 MiB": (Rectified(), (torch.randn(2**17),)),
        "relu 16 MiB": (Rectified(), (torch.randn(2**22),)),
        "relu 512 MiB": (Rectified(), (torch.randn(2**27),)),
        "convolution 128 x 16 x 32²": (
            Convolved(), (torch.randn(128, 16, 32, 32), torch.randn(16, 16, 3, 3))
        ),
    }  # fmt: skip


class Kernel:
    """A kernel with its time alone, and what it is thought to ask for."""

    def __init__(self, module: nn.Module, given: tuple[torch.Tensor, ...], device: str) -> None:
        self.graph, self.program = capture_program(module, given, optimizer=None, device=device)
        self._operands = [[each.to(device) for each in given] for _ in range(2)]
        self._module = module
        self.predicted_s = self.alone_s = 0.0
        self.demand = np.zeros(NUM_SHARES)
        self.repeats = 1

    def price(self, profile: Any) -> None:
        """What is predicted from the times of all kernels on a stream."""
        cluster = find_cluster(ON)
        costs = estimate_costs(self.graph, cluster, profile=profile, launches="replayed")
        op = int(costs.op_s[0].argmax())
        self.predicted_s = float(costs.op_s[0, op])
        self.demand = demand_of(self.graph, cluster, costs)[:, 0, op]

    def time(self) -> None:
        """Its row alone."""
        once_s = rows_s([(self.calls(0), 20)]) / 20
        self.repeats = max(2, min(2000, round(_ROW_S / once_s)))
        self.alone_s = rows_s([(self.calls(0), self.repeats)])

    @property
    def once_s(self) -> float:
        """One of the row."""
        return self.alone_s / self.repeats

    def calls(self, which: int) -> Callable[[], Any]:
        """The kernel on operands of its own."""
        return lambda: self._module(*self._operands[which])


def simulated_s(rows: list[tuple[Kernel, int]]) -> float:
    """What two lanes of such rows take."""
    builder = GraphBuilder("rows")
    seconds, demand = [], []
    for stream, (kernel, count) in zip((Stream.COMPUTE, Stream.SECOND), rows, strict=True):
        for index in range(count):
            builder.op(f"{stream}.{index}", "kernel", stream=stream)
        seconds += [kernel.once_s] * count
        demand += [kernel.demand] * count
    return makespan_s(builder.build(), np.array(seconds), np.array(demand).T)


def makespan_s(graph: Graph, seconds: Any, demand: Any) -> float:
    """Of ops with these times and demands."""
    cluster = find_cluster(ON)
    costs: Costs = replace(
        estimate_costs(graph, cluster), op_s=seconds[None],
        op_source=np.full((1, len(seconds)), TimeSource.FILE, np.uint8), demand=demand[:, None],
    )  # fmt: skip
    problem = Problem(work=graph, cluster=cluster, op_costs=costs)
    return simulate_placement(problem, np.zeros(len(seconds), np.int32))[1].makespan_s


def rows_s(rows: list[tuple[Callable[[], Any], int]]) -> float:
    """Seconds of captured rows of calls, each on a stream."""
    streams = [torch.cuda.Stream() for _ in rows]
    for stream, (call, _) in zip(streams, rows, strict=True):
        # Libraries make what they need for a stream at its first use, which no graph may hold.
        with torch.cuda.stream(stream):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        for stream, (call, repeats) in zip(streams, rows, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for _ in range(repeats):
                    call()
        for stream in streams:
            here.wait_stream(stream)
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def main() -> int:
    """Kernels alone, then all pairs."""
    options = options_of(__doc__.splitlines()[0]).parse_args()
    turns = Turns(options.turns, options.until)
    device = "cpu" if options.toy else "cuda"
    found = {name: Kernel(*kernel, device) for name, kernel in kernels().items()}
    one = next(iter(found.values()))
    simulated_s([(one, 1), (one, 1)])  # compiles the engine before anybody waits for the GPU
    turns.prepared()
    if options.toy:
        print("pairs are of a CUDA device")
        return 0
    (kind,) = find_cluster(ON).kinds
    measured: dict[tuple[str, str], tuple[list[int], float]] = {}
    with turns.turn():
        profile = merge_profiles([
            profile_program(each.graph, each.program, kind, device=device, budget_s=1.0)
            for each in found.values()
        ])  # fmt: skip
        for each in found.values():
            each.time()
        for pair in itertools.combinations_with_replacement(found, 2):
            rows = [found[name] for name in pair]
            longer_s = max(each.alone_s for each in rows)
            counts = [max(1, round(longer_s / each.once_s)) for each in rows]
            calls = [(each.calls(which), counts[which]) for which, each in enumerate(rows)]
            measured[pair] = counts, rows_s(calls)
    # A rule of pairs is looked at, and not what was measured of two rows of one kernel.
    entries = tuple(replace(entry, replayed=None) for entry in profile.entries)
    alone = replace(profile, entries=entries)
    for name, one in found.items():
        one.price(alone)
        turns.write("pairs", name, alone_us=one.once_s * 1e6,
                    predicted_of=one.predicted_s / one.once_s,
                    on_device=float(one.demand[ON_DEVICE]), fill=float(one.demand[FILL])
                    )  # fmt: skip
    for (first, second), (counts, both_s) in measured.items():
        longer_s = max(found[first].alone_s, found[second].alone_s)
        told_s = simulated_s([(found[first], counts[0]), (found[second], counts[1])])
        turns.write("pairs", f"{first} + {second}", alone_ms=longer_s * 1e3, both_ms=both_s * 1e3,
                    pace=longer_s / both_s, simulated=longer_s / told_s)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
