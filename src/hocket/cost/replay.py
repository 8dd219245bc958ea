"""Time the calls of a captured program in place, by replaying the whole step as one CUDA graph.

An op that is timed alone finds other data in the caches than in a step, and the gaps between its
kernels are longer than in a graph. Therefore forward and backward run once as recorded on synthetic
data, are captured on one stream and replayed: without the profiler to time the step, with it to
time each kernel. A second graph that shares nothing with the first is replayed on another stream;
it gives the slowdown of two concurrent steps, which no rule based on occupancy predicted within 10
% for all models (`benchmarks/results`). All replays of a sample are launched while the device
sleeps, so that host time is excluded. Ops that synchronize with the host cannot be captured, and a
replay needs as much memory as a training step.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hocket.base.errors import one_line
from hocket.capture.perform import BoundCall
from hocket.capture.program import Program
from hocket.capture.storage import first_tensors
from hocket.cost.inputs import filled, index_bound
from hocket.cost.replayed_kernels import ChipLimits, InPlace, in_place, kernels_of
from hocket.cost.timing import launched_ahead_s
from hocket.graph.graph import Graph, Phase

_WARM, _NUM_ROWS, _ROW, _NUM_PROFILED = 2, 5, 4, 5
"""Warm-up runs before the capture, number of timed samples, replays per sample, and profiled
replays."""
_SLEEP_S = 0.01
"""First guess of the device's sleep while the host launches a sample."""
_REGISTERS = 65536
"""Registers of a multiprocessor, equal on all GPUs that PyTorch supports."""
_SLACK = 1.2
"""Memory factor of a step for allocator fragmentation."""
_SMALL = 0.05
"""Scale of synthetic values, so that long sums stay finite."""


class ReplayedCalls(NamedTuple):
    """Times of forward and backward calls in a replayed step."""

    in_place: dict[str, InPlace]
    """Times by signature."""
    alone: str = ""
    """Reason why no second step was replayed concurrently; empty if one was."""


def replayed_in_place(graph: Graph, program: Program, device: torch.device) -> ReplayedCalls:
    """Capture a step on a CUDA device and replay it alone and beside a second one."""
    passes = ReplayedPasses(program, device)
    one = CapturedPasses(passes, device)
    step_s = rows_s([one], device)
    # Ops of no signature are alike in nothing.
    keys = [
        graph.signatures[number] if (number := int(graph.op_signature[op])) >= 0 else f"op {op}"
        for op in passes.ops
    ]
    kernels = kernels_of(_trace(one.graph))
    found = in_place(kernels, _NUM_PROFILED, one.nodes, keys, step_s, _chip_limits(device))
    try:
        other = CapturedPasses(ReplayedPasses(program, device), device)
        beside = max(1.0, rows_s([one, other], device) / step_s)
    # A second step may not fit; the times of the first are known all the same.
    except RuntimeError as error:
        return ReplayedCalls(found, alone=one_line(error))
    return ReplayedCalls({key: each._replace(beside=beside) for key, each in found.items()})


def _call_driver(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver; raises `RuntimeError` if it fails."""
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} of the CUDA driver failed with error {code}")


def _num_graph_nodes(stream: int) -> int:
    """Number of nodes in the CUDA graph that a stream is being captured into."""
    # PyTorch has no function for this.
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    _call_driver(
        "cuStreamGetCaptureInfo_v3", ctypes.c_void_p(stream), ctypes.byref(status),
        ctypes.byref(number), ctypes.byref(graph), None, None, None,
    )  # fmt: skip
    count = ctypes.c_size_t()
    _call_driver("cuGraphGetNodes", graph, None, ctypes.byref(count))
    return count.value


class CapturedPasses:
    """Forward and backward pass as a CUDA graph, with the stream that it is replayed on."""

    def __init__(self, passes: ReplayedPasses, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.graph = torch.cuda.CUDAGraph()
        _reserve_memory(passes, self.stream, device)
        counts: list[int] = []
        own = self.stream.cuda_stream
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="relaxed"):
            counts.append(_num_graph_nodes(own))
            passes.run(lambda: counts.append(_num_graph_nodes(own)))
        self.nodes = [after - before for before, after in pairwise(counts)]
        """Number of graph nodes of each call."""
        self._read = passes

    def replay(self) -> None:
        """Launch one replay."""
        with torch.cuda.stream(self.stream):
            self.graph.replay()


def _reserve_memory(
    passes: ReplayedPasses, stream: torch.cuda.Stream, device: torch.device
) -> None:
    """Run the passes once with the memory that a capture needs; raises if it is not available.

    A capture that runs out of memory leaves PyTorch's random generator unusable.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            passes.run()
    # The captured graph has memory of its own, so what the warm-up left is released first.
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    torch.UntypedStorage(int(_SLACK * needed), device=device)  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()


class ReplayedPasses:
    """Forward and backward calls of a program with all their inputs on a device."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.ops = [at for at, call in enumerate(program.calls) if call.phase != Phase.OPTIMIZER]
        self._calls = [BoundCall(program.calls[op], device) for op in self.ops]
        last: dict[int, int] = {}
        for position, op in enumerate(self.ops):
            call = program.calls[op]
            for tensor in (*call.reads, *call.outputs, *call.written):
                if tensor is not None:
                    last[tensor] = position
        self._given = _made_up(program, {program.tensors[t].storage for t in last}, device)
        if device.type == "cuda":
            # Another stream would read index tensors before they are written.
            torch.cuda.synchronize(device)
        kept = {*program.outputs, *program.gradients.values(), *self._given}
        self._dropped: list[list[int]] = [[] for _ in self.ops]
        for tensor, position in last.items():
            if tensor not in kept:
                self._dropped[position].append(tensor)

    def run(self, after_call: Callable[[], Any] = lambda: None) -> None:
        """Run all calls once, with a callback after each; tensors are freed after their last
        reader."""
        known = dict(self._given)
        # Some kernels save less without gradients enabled, and backward calls would miss it.
        with torch.enable_grad():
            for call, dropped in zip(self._calls, self._dropped, strict=True):
                call.perform(known)
                for tensor in dropped:
                    known.pop(tensor, None)
                after_call()


def _made_up(program: Program, used: Set[int], device: torch.device) -> dict[int, torch.Tensor]:
    """Synthetic tensors for the storages that exist before a step and are used, with valid
    contents."""
    bounds = _index_bounds(program)
    generator = torch.Generator(device).manual_seed(0)
    specs = {number: program.tensors[number] for number in program.names}
    there = [n for n, spec in specs.items() if spec.layout is not None and spec.storage in used]
    storages: dict[int, torch.Tensor] = {}
    for number in there:
        spec = specs[number]
        if spec.layout is not None and spec.storage not in storages:
            count = -(-spec.storage_bytes // spec.layout.dtype.itemsize)
            flat = spec.layout._replace(shape=(count,), stride=(1,), offset=0)
            values = filled(flat, device, bounds.get(spec.storage, 1), generator)
            if values.is_floating_point():
                values.mul_(_SMALL)
            storages[spec.storage] = values.view(torch.uint8)
    return first_tensors(there, dict(enumerate(program.tensors)), storages, device)


def _index_bounds(program: Program) -> dict[int, int]:
    """Exclusive upper bound of the integers in each storage, so that all views of it are valid."""
    bounds: dict[int, int] = {}
    for call in reversed(program.calls):
        if isinstance(call.function, str):
            continue
        own = index_bound(call, program)
        made = (bounds.get(program.tensors[t].storage) for t in call.outputs if t is not None)
        limits = [bound for bound in (*made, own if own > 1 else None) if bound is not None]
        for tensor in call.reads if limits else ():
            # Indices may be computed from others: bounds go backward from readers to makers.
            spec = program.tensors[tensor]
            if spec.layout is not None and not spec.layout.dtype.is_floating_point:
                bounds[spec.storage] = min(*limits, bounds.get(spec.storage, limits[0]))
    return bounds


def rows_s(rows: Sequence[CapturedPasses], device: torch.device) -> float:
    """Seconds of one replay when all graphs are replayed concurrently, each on its own stream.

    The minimum of several samples: other work on the device only lengthens them.
    """

    def launch() -> None:
        here = torch.cuda.current_stream(device)
        for row in rows:
            row.stream.wait_stream(here)
        for _ in range(_ROW):
            for row in rows:
                row.replay()
        for row in rows:
            here.wait_stream(row.stream)

    # Other work on the device only lengthens samples, so the shortest one is right.
    return min(launched_ahead_s(launch, _SLEEP_S) for _ in range(_NUM_ROWS)) / _ROW


def _trace(captured: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """Profiler trace of several consecutive replays."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_NUM_PROFILED):
            captured.replay()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def _chip_limits(device: torch.device) -> ChipLimits:
    here = torch.cuda.get_device_properties(device)
    return ChipLimits(
        here.multi_processor_count,
        here.max_threads_per_multi_processor,
        _REGISTERS,
        here.shared_memory_per_multiprocessor,
    )
