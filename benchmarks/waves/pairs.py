"""Pairs of rows of kernels on two streams, beside what the simulator says of them.

    PYTHONPATH=src python benchmarks/waves/pairs.py

A row is one kernel again and again, captured as a CUDA graph, as long as the row beside it. Its
pace is what it takes alone over what both take together; the simulator's is 1 where both ask for no
more than the whole device, and less by as much as they ask for too much (`hocket.cost.demand`,
with the time of each kernel as it was measured).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import Turns
from torch import nn

from hocket.api import make_problem
from hocket.api.planned import find_cluster
from hocket.capture.model import capture_program
from hocket.cost.demand import demand_of
from hocket.cost.measure import profile_program
from hocket.cost.roofline import costs_from_settings

_ROW_S = 4e-3


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
    """A kernel with its time alone, and the share of the device that it is thought to ask for."""

    def __init__(self, module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        graph, program = capture_program(module, given, optimizer=None, device="cuda")
        (kind,) = find_cluster("1xh200").kinds
        profile = profile_program(graph, program, kind, device="cuda", budget_s=1.0)
        problem = make_problem(graph, "1xh200", profile=profile)
        settings = {**problem.costs.settings, "launches": "replayed"}
        costs = costs_from_settings(graph, problem.cluster, settings)
        op = int(costs.op_s[0].argmax())
        self.predicted_s = float(costs.op_s[0, op])
        self.asks = float(demand_of(graph, problem.cluster, costs)[0, 0, op])
        self._operands = [[each.cuda() for each in given] for _ in range(2)]
        self._module = module
        once_s = self.row_s(20) / 20
        self.repeats = max(2, min(2000, round(_ROW_S / once_s)))
        self.alone_s = self.row_s(self.repeats)

    def calls(self, which: int) -> Callable[[], Any]:
        """The kernel on operands of its own."""
        return lambda: self._module(*self._operands[which])

    def row_s(self, repeats: int) -> float:
        """A row alone."""
        return rows_s([(self.calls(0), repeats)])


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lock", default="", help="file of who has the GPU")
    parser.add_argument("--until", type=float, default=math.inf, help="begin nothing after (epoch)")
    parser.add_argument("--only", default="")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if options.toy or not torch.cuda.is_available():
        print("pairs are of a CUDA device")
        return 0
    turns = Turns(options.lock, options.until)
    print("| kernel | alone | predicted / measured | asks for |\n|---|---|---|---|")
    found: dict[str, Kernel] = {}
    with turns.turn():
        for name, (module, given) in kernels().items():
            try:
                one = found[name] = Kernel(module, given)
            # One kernel that cannot be timed must not hide the others.
            except Exception as error:
                print(f"| {name} | {type(error).__name__}: {str(error)[:200]} | | |", flush=True)
                continue
            alone_s = one.alone_s / one.repeats
            print(f"| {name} | {alone_s * 1e6:.1f} us | {one.predicted_s / alone_s:.2f} | "
                  f"{one.asks:.2f} |", flush=True)  # fmt: skip
        print("| pair | alone | together | pace | simulated |\n|---|---|---|---|---|")
        for first, second in itertools.combinations_with_replacement(found, 2):
            one, two = found[first], found[second]
            longer_s = max(one.alone_s, two.alone_s)
            counts = [max(1, round(k.repeats * longer_s / k.alone_s)) for k in (one, two)]
            both_s = rows_s([(one.calls(0), counts[0]), (two.calls(1), counts[1])])
            pace = longer_s / both_s
            told = min(1.0, 1.0 / (one.asks + two.asks))
            print(f"| {first} + {second} | {longer_s * 1e3:.2f} ms | {both_s * 1e3:.2f} ms | "
                  f"{pace:.2f} | {told:.2f} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
