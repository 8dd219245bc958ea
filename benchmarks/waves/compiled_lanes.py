"""Two lanes of compiled kernels in one CUDA graph, beside compiled kernels without lanes.

    PYTHONPATH=src python benchmarks/waves/compiled_lanes.py [--only TEXT] [--seconds 240]
    PYTHONPATH=src python benchmarks/waves/compiled_lanes.py --toy      # on a processor

``torch.compile`` makes fewer and larger kernels than a recorded step has, so lanes have less to
fill. This asks what is left: a whole step of compiled kernels (forward, backward, sum of gradients,
fused AdamW) is captured as one CUDA graph, with the batch whole, in two waves one after the other,
in two lanes from the start, and with the second lane begun after the forward pass of the first.
Beside them ``torch.compile(mode="reduce-overhead")``, which captures passes but not the update.
Each lane has running means of its own (a norm that trains does not read them). Then pairs of rows
of kernels on two streams and in two green contexts of half the multiprocessors each.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from h200 import GIB, plain_step, timed
from torch import nn
from workloads import TOYS, WORKLOADS, Workload

from hocket.capture.loss import ChosenLoss

WARM = 3
FROM_START, AFTER_FORWARD, ONE_LANE = "from the start", "after a forward pass", "one lane"


class CapturedStep:
    """A step of compiled kernels, launched as one CUDA graph where there is CUDA."""

    def __init__(
        self, model: nn.Module, batch: dict[str, torch.Tensor], num_waves: int, way: str
    ) -> None:
        self._parameters = list(model.parameters())
        shared = {id(parameter): parameter for parameter in self._parameters}
        device = self._parameters[0].device
        self._is_cuda = device.type == "cuda"
        options: dict[str, Any] = {"dynamic": False} if self._is_cuda else {"backend": "eager"}
        num_lanes = 1 if way == ONE_LANE else 2
        # Each lane has buffers of its own: two that change one buffer at once would race.
        twins = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(num_lanes - 1))]
        self._run = [torch.compile(twin, **options) for twin in twins]
        self._loss, self._way = ChosenLoss(None), way
        halves = [rows.chunk(num_waves) for rows in batch.values()]
        self._parts = [dict(zip(batch, part, strict=True)) for part in zip(*halves, strict=True)]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=1e-4, fused=True, capturable=self._is_cuda
        )
        self._lanes: list[Any] = [torch.cuda.Stream() if self._is_cuda else None for _ in twins]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._losses: list[torch.Tensor] = []
        if self._is_cuda:
            self._capture()

    def _capture(self) -> None:
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self._waves()
        torch.cuda.synchronize()
        self._losses = []
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._waves()

    def __call__(self) -> torch.Tensor:
        """A step; the mean of the waves' losses."""
        if self._graph is None:
            self._waves()
        else:
            self._graph.replay()
        return torch.stack(self._losses).mean()

    def _waves(self) -> None:
        forward_done: Any = None
        gradients: list[Any] = []
        self._losses = []
        with self._lanes_joined():
            for number, part in enumerate(self._parts):
                which = number % len(self._lanes)
                with self._on(which):
                    if self._way == AFTER_FORWARD and which and forward_done is not None:
                        self._lanes[which].wait_event(forward_done)
                    loss = self._loss(self._run[which](**part))
                    if self._is_cuda and which == 0:
                        forward_done = self._lanes[0].record_event()
                    found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
                    gradients.append(found)
                    self._losses.append(loss.detach())
        with torch.no_grad():
            for parameter, *each in zip(self._parameters, *gradients, strict=True):
                parameter.grad = each[0]
            used = [p for p in self._parameters if p.grad is not None]
            rows = [[g for g in found if g is not None] for found in gradients]
            for more in rows[1:]:
                torch._foreach_add_(rows[0], more)
            torch._foreach_div_(rows[0], len(rows))
            assert len(used) == len(rows[0])
            self._optimizer.step()

    @contextmanager
    def _lanes_joined(self) -> Iterator[None]:
        if not self._is_cuda:
            yield
            return
        here = torch.cuda.current_stream()
        for lane in self._lanes:
            lane.wait_stream(here)
        yield
        for lane in self._lanes:
            here.wait_stream(lane)

    def _on(self, which: int) -> Any:
        return torch.cuda.stream(self._lanes[which]) if self._is_cuda else nullcontext()


def same_bits(make: Callable[[str], CapturedStep], steps: int) -> int:
    """Steps whose loss in two lanes is that of the same waves one after the other."""
    rows = []
    for way in (ONE_LANE, FROM_START):
        torch.manual_seed(0)
        step = make(way)
        rows.append([float(step()) for _ in range(steps)])
    return sum(a == b for a, b in zip(*rows, strict=True))


def compare(name: str, build: Workload, samples: int, device: torch.device, steps: int,
            left_s: Callable[[], float]) -> None:  # fmt: skip
    """Rows of one workload; a system that fails says why."""
    torch.manual_seed(0)
    model, batch = build(samples)
    model, batch = model.to(device), {n: rows.to(device) for n, rows in batch.items()}

    def captured(num_waves: int, way: str) -> Callable[[], CapturedStep]:
        return lambda: CapturedStep(copy.deepcopy(model), batch, num_waves, way)

    systems: dict[str, Callable[[], Callable[[], Any]]] = {
        "compiled, whole step one graph": captured(1, ONE_LANE),
        "compiled, two waves, one lane": captured(2, ONE_LANE),
        "compiled, two lanes": captured(2, FROM_START),
        "compiled, two lanes, tock after tick's forward": captured(2, AFTER_FORWARD),
    }
    if device.type == "cuda":
        options = {"mode": "reduce-overhead"}
        systems["compiled + CUDA graphs (reduce-overhead)"] = lambda: plain_step(
            copy.deepcopy(model), batch, **options
        )
    for label, make in systems.items():
        if left_s() < 0:
            print(f"| {name} | {label} | no time left | | |", flush=True)
            continue
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            step = make()
            made_s = time.perf_counter() - began
            row = timed(step, samples, device, steps)
        # One system that cannot run must not hide the others.
        except Exception as error:
            print(f"| {name} | {label} | {type(error).__name__}: {str(error)[:200]} | | |",
                  flush=True)  # fmt: skip
            continue
        print(f"| {name} | {label} | {row.samples_per_s:,.1f} | {row.busy:.0%} | "
              f"{row.peak_bytes / GIB:.2f} GiB | {made_s:.0f} s |", flush=True)  # fmt: skip
        del step
    if left_s() > 0:
        count = min(steps, 100)
        found = same_bits(lambda way: CapturedStep(copy.deepcopy(model), batch, 2, way), count)
        print(f"| {name} | same bits in two lanes | {found} of {count} | | |", flush=True)


# ── rows of kernels in green contexts ────────────────────────────────────────────────────────────


def green_pairs(size: int, repeats: int = 100) -> None:
    """Two rows of products: alone, on two streams, in two halves of the multiprocessors."""
    from torch.cuda.green_contexts import GreenContext

    half = torch.cuda.get_device_properties(0).multi_processor_count // 2 // 8 * 8
    operands = [torch.randn(size, size, device="cuda") for _ in range(2)]

    def row(operand: torch.Tensor) -> None:
        for _ in range(repeats):
            torch.mm(operand, operand)

    def alone() -> None:
        row(operands[0])

    streams = [torch.cuda.Stream() for _ in range(2)]

    def on_streams() -> None:
        for stream, operand in zip(streams, operands, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(repeats):
                    torch.mm(operand, operand)

    contexts = [GreenContext.create(half, 0) for _ in range(2)]

    def in_contexts() -> None:
        for context, operand in zip(contexts, operands, strict=True):
            context.set_context()
            row(operand)
            context.pop_context()

    def seconds(run: Callable[[], None]) -> float:
        took = []
        for _ in itertools.repeat(None, 4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        return statistics.median(took[1:])

    found = [seconds(run) * 1e3 for run in (alone, on_streams, in_contexts)]
    print(f"| {size} | {found[0]:.2f} ms | {found[1]:.2f} ms | {found[2]:.2f} ms |", flush=True)


def main() -> int:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=240, help="begin nothing after so many")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    if not options.toy and not torch.cuda.is_available():
        sys.exit("no CUDA device here: use --toy")
    device = torch.device("cpu" if options.toy else "cuda")
    if device.type == "cuda":
        print("| products | one row | two streams | two green contexts |\n|---|---|---|---|")
        try:
            for size in (512, 2048, 8192):
                green_pairs(size, 100 if size < 8192 else 10)
        # Not every build and driver has them.
        except Exception as error:
            print(f"| {type(error).__name__}: {str(error)[:200]} | | | |", flush=True)
    print("| workload | system | samples/s | kernels run | peak | made in |")
    print("|---|---|---|---|---|---|")
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only in name:
            left_s = lambda: options.seconds - (time.perf_counter() - began)  # noqa: E731
            compare(name, build, samples, device, 3 if options.toy else options.steps, left_s)
            torch._dynamo.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
