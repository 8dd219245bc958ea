"""Two lanes of compiled kernels in one CUDA graph, beside compiled kernels without lanes.

    PYTHONPATH=src python benchmarks/waves/compiled_lanes.py [--only TEXT] [--steps 50]
    PYTHONPATH=src python benchmarks/waves/compiled_lanes.py --toy      # on a processor

``torch.compile`` makes fewer and larger kernels than a recorded step has, so lanes have less to
fill. This asks what is left: a whole step of compiled kernels (forward, backward, sum of gradients,
fused AdamW) is captured as one CUDA graph, with the batch whole, in waves one after the other, and
in two or four lanes from the start. Beside them ``torch.compile(mode="reduce-overhead")``, which
captures passes but not the update. Each lane has running means of its own (a norm that trains does
not read them).
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from timing import GIB, Turns, start_counting, timed
from torch import nn
from workloads import TOYS, WORKLOADS, Workload, plain_step

from hocket.capture.loss import ChosenLoss

WARM = 3


class CapturedStep:
    """A step of compiled kernels, launched as one CUDA graph where there is CUDA."""

    def __init__(
        self, model: nn.Module, batch: dict[str, torch.Tensor], num_waves: int, num_lanes: int
    ) -> None:
        self._parameters = list(model.parameters())
        shared = {id(parameter): parameter for parameter in self._parameters}
        device = self._parameters[0].device
        self._is_cuda = device.type == "cuda"
        options: dict[str, Any] = {"dynamic": False} if self._is_cuda else {"backend": "eager"}
        # Each lane has buffers of its own: two that change one buffer at once would race.
        twins = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(num_lanes - 1))]
        self._run = [torch.compile(twin, **options) for twin in twins]
        self._loss = ChosenLoss(None)
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
        gradients: list[Any] = []
        self._losses = []
        with self._lanes_joined():
            for number, part in enumerate(self._parts):
                which = number % len(self._lanes)
                with self._on(which):
                    loss = self._loss(self._run[which](**part))
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


def systems(
    model: nn.Module, batch: dict[str, torch.Tensor]
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Ways to train, by name, made when they are measured."""

    def captured(num_waves: int, num_lanes: int) -> Callable[[], CapturedStep]:
        return lambda: CapturedStep(copy.deepcopy(model), batch, num_waves, num_lanes)

    found: dict[str, Callable[[], Callable[[], Any]]] = {}
    if next(model.parameters()).is_cuda:
        found["compiled + CUDA graphs (reduce-overhead)"] = lambda: plain_step(
            copy.deepcopy(model), batch, mode="reduce-overhead"
        )
    return found | {
        "compiled, whole step one graph": captured(1, 1),
        "compiled, two lanes": captured(2, 2),
        "compiled, two waves, one lane": captured(2, 1),
        "compiled, four lanes": captured(4, 4),
    }


def compare(name: str, build: Workload, samples: int, options: argparse.Namespace) -> None:
    """Rows of one workload; a system that fails says why."""
    device, turns = (
        torch.device("cpu" if options.toy else "cuda"),
        Turns(options.lock, options.until),
    )
    torch.manual_seed(0)
    model, batch = build(samples)
    model, batch = model.to(device), {n: rows.to(device) for n, rows in batch.items()}
    for label, make in systems(model, batch).items():
        if options.systems not in label:
            continue
        if turns.left_s < 0:
            print(f"| {name} | {label} | no time left | | | | |", flush=True)
            continue
        start_counting(device)
        began = time.perf_counter()
        try:
            step = make()
            step()
            made_s = time.perf_counter() - began
            with turns.turn():
                row = timed(step, samples, device, options.steps)
        # One system that cannot run must not hide the others.
        except Exception as error:
            print(f"| {name} | {label} | {type(error).__name__}: {str(error)[:200]} | | | | |",
                  flush=True)  # fmt: skip
            continue
        print(f"| {name} | {label} | {row.samples_per_s:,.1f} | {row.spread:.2f} | "
              f"{row.busy:.0%} | {row.peak_bytes / GIB:.2f} GiB | {made_s:.0f} s |",
              flush=True)  # fmt: skip
        del step


def main() -> int:
    """All tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--systems", default="", help="a part of their names")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cap", type=float, default=8.0, help="GiB")
    parser.add_argument("--lock", default="", help="file of who has the GPU")
    parser.add_argument("--until", type=float, default=math.inf, help="begin nothing after (epoch)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.toy and not torch.cuda.is_available():
        sys.exit("no CUDA device here: use --toy")
    if not options.toy:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total)
    print("| workload | system | samples/s | spread | kernels run | peak | made in |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only in name:
            compare(name, build, samples, options)
            torch._dynamo.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
