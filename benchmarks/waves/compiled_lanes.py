"""Two lanes of compiled kernels in one CUDA graph, beside compiled kernels without lanes.

    PYTHONPATH=src python benchmarks/waves/compiled_lanes.py [--only TEXT] [--systems lanes]
    PYTHONPATH=src python benchmarks/waves/compiled_lanes.py --toy      # on a processor

``torch.compile`` makes fewer and larger kernels than a recorded step has, so lanes have less to
fill. This asks what is left: a whole step of compiled kernels (forward, backward, sum of gradients,
fused AdamW) is captured as one CUDA graph, in waves one after the other, and in two or four lanes
from the start (asked for by ``--systems lanes``). Beside them ``hocket.prepare(compiled=True)``,
``torch.compile`` and its ``mode="reduce-overhead"``, which captures passes but not the update. Each
lane has running means of its own (a norm that trains does not read them). None of it is predicted:
what the compiler makes of a model is known when it has made it.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from timing import Turns, keep_cap, options_of, parsed, row_of, start_counting
from torch import nn
from torch._inductor.cudagraph_trees import reset_cudagraph_trees
from workloads import TOYS, WORKLOADS, Workload, adamw, plain_step

from hocket.capture.loss import ChosenLoss
from hocket.training import prepare

WARM = 3
LANES = "lanes"
"""Systems with this in their names are left out unless they are asked for."""


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
    model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Ways to train, by name, made when they are measured."""
    is_cuda = device.type == "cuda"
    backend = "inductor" if is_cuda else "eager"
    graphs: dict[str, Any] = {"mode": "reduce-overhead"} if is_cuda else {"backend": backend}

    def fresh() -> nn.Module:
        return copy.deepcopy(model).to(device)

    def captured(num_waves: int, num_lanes: int) -> Callable[[], CapturedStep]:
        return lambda: CapturedStep(fresh(), batch, num_waves, num_lanes)

    def plain(**options: Any) -> Callable[[], Callable[[], Any]]:
        return lambda: plain_step(fresh(), batch, dynamic=False, **options)

    return {
        "compiled + CUDA graphs (reduce-overhead)": plain(**graphs),
        "hocket.prepare(compiled=True)": lambda: prepared(fresh(), batch, backend),
        "compiled": plain(backend=backend),
        "lanes: compiled, two": captured(2, 2),
        "lanes: compiled, two waves in one": captured(2, 1),
        "lanes: compiled, four": captured(4, 4),
    }


def prepared(
    model: nn.Module, batch: dict[str, torch.Tensor], backend: str
) -> Callable[[], torch.Tensor]:
    """A loop of ours on kernels of ``torch.compile``."""
    train = prepare(model, adamw(model), batch, compiled=backend)

    def step() -> torch.Tensor:
        found = train.step(batch)
        TOLD["last"] = train.replays
        return found

    return step


TOLD: dict[str, str] = {}


def told() -> str:
    """What the last system said of itself."""
    return TOLD.pop("last", "")


def compare(name: str, build: Workload, samples: int, options: argparse.Namespace) -> None:
    """Rows of one workload; a system that fails says why."""
    device = torch.device("cpu" if options.toy else "cuda")
    turns = Turns(options.turns, options.until)
    torch.manual_seed(0)
    model, batch = build(samples)
    batch = {n: rows.to(device) for n, rows in batch.items()}
    wanted = options.systems.split(";")
    made = {
        label: make
        for label, make in systems(model, batch, device).items()
        if any(part in label for part in wanted) and (LANES not in label or LANES in wanted)
    }
    # Kernels are made before anybody is timed, and found again where a system is made anew.
    for label, make in made.items():
        began = time.perf_counter()
        try:
            start_counting(device)
            make()()
        # The row of this system will say why.
        except Exception as error:
            print(f"{name}: {label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        print(f"{name}: {label}: made in {time.perf_counter() - began:.0f} s", flush=True)
    TOLD.clear()
    turns.prepared()
    for label, make in made.items():
        if "reduce-overhead" not in label:
            # What the graphs of that mode hold would be held beside the others.
            reset_cudagraph_trees()
        row_of(turns, name, label, make, samples, device, options.steps, told=told)


def main() -> int:
    """All tables."""
    options = parsed(options_of(__doc__.splitlines()[0]))
    keep_cap(options)
    for name, (build, samples) in (TOYS if options.toy else WORKLOADS).items():
        if options.only in name:
            compare(name, build, samples, options)
            torch._dynamo.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
