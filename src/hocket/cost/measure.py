"""Profile a captured program: time each distinct op signature on the present device.

Signatures are timed in decreasing order of their predicted time, so that an exhausted time budget
leaves out only the least important ones; none may take more than a few times its fair part of the
remaining time. An op that fails or does not fit is listed as missing with the reason, and costed by
the roofline fitted to the rest. An earlier profile can be continued. One timing per signature, not
per op, takes seconds for a model of any depth. On a GPU the whole step is then captured as a CUDA
graph and its ops are timed in place (`replay`).
"""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hocket.base import config
from hocket.base.errors import HocketError, UsageError, one_line
from hocket.base.units import format_bytes
from hocket.capture.optimizer import OPTIMIZER_STATES
from hocket.capture.program import Call, Program
from hocket.capture.recording import TensorLayout
from hocket.cost.at_work import COMPUTE, STREAM
from hocket.cost.dispatch import measure_host_overhead
from hocket.cost.efficiency import ideal_s, roofline_s, work_of
from hocket.cost.inputs import argument_bytes, filled, make_arguments
from hocket.cost.profile import Profile, ProfileEntry
from hocket.cost.replay import replayed_in_place
from hocket.cost.timing import call_s
from hocket.graph.graph import DTYPES, Graph
from hocket.hardware.cluster import DeviceKind
from hocket.hardware.detect import available_bytes, last_level_cache_bytes, usable_cores
from hocket.processes.start import start_module

# Other processes at work while ops are timed, as where several share one CPU.
#
# What a process has of the memory's bandwidth, the caches and the clock is less while others work.
# Processes that share out a step well do alike work at the same time: matrices are multiplied while
# others multiply, parameters are updated while others stream through memory, too. So the others
# multiply matrices while an op that computes is timed, and copy memory while one that moves bytes
# is.


class Neighbours:
    """Load processes on the other cores, whose kind of load can be switched."""

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self._children = children

    def do(self, *, stream: bool) -> None:
        """Switch the load to memory streaming, or to compute."""
        for child in self._children:
            assert child.stdin is not None
            # One that somebody killed cannot be notified.
            with suppress(BrokenPipeError):
                os.write(child.stdin.fileno(), STREAM if stream else COMPUTE)


@contextmanager
def sharing_cores(num_processes: int) -> Iterator[Neighbours]:
    """Run load processes so that this process is one of ``num_processes`` that share the cores."""
    if num_processes == 1:
        yield Neighbours([])
        return
    threads, before = max(1, usable_cores() // num_processes), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ExitStack() as others:
            children = [others.enter_context(_at_work(threads)) for _ in range(num_processes - 1)]
            yield Neighbours(children)
    finally:
        torch.set_num_threads(before)


@contextmanager
def _at_work(threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """A load process that ends with this process, however that ends."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    child = start_module(
        "hocket.cost.at_work", stdin=subprocess.PIPE, output=subprocess.PIPE,
        errors=subprocess.DEVNULL,
        environment={**config.environment_anywhere(), **dict.fromkeys(names, str(threads))},
    )  # fmt: skip
    with child:
        try:
            assert child.stdout is not None
            child.stdout.readline()  # it has begun, or ended
            yield child
        finally:
            child.kill()


CPU_CACHE_BYTES = 32 * 2**20
"""Assumed last-level cache, which inputs must exceed, if the system does not report it."""
MAX_COPIES = 32
"""Sets of inputs that are used in rotation."""
MAX_FUSED = 32
"""Parameters per fused optimizer call."""
MAX_FUSED_BYTES = 4 * 2**30
SHARES = 4
"""Multiple of its fair part of the remaining time that one signature may take."""
OUT_OF_TIME = "not measured: the time budget was used up"
OUT_OF_MEMORY = "not measured: too little memory"
REPLAYED_STEP = "the step as one CUDA graph"
"""Entry among the missing times if the step could not be captured as a CUDA graph."""
TWO_STEPS = "two such steps beside each other"
"""Entry among the missing times if two steps could not be replayed concurrently."""


class NoRoomError(HocketError):
    """An op's tensors do not fit into the memory that is free."""


def profile_program(
    graph: Graph,
    program: Program,
    kind: DeviceKind,
    *,
    device: str = "cpu",
    budget_s: float = 120.0,
    processes: int = 1,
    known: Profile | None = None,
    on_op: Callable[[int, int], None] = lambda number, total: None,
) -> Profile:
    """Time every op signature of a captured step on ``device``, which is of the given type.

    If several ``processes`` share a CPU, the others run load meanwhile. ``known`` is an earlier
    profile of this device whose times are kept. ``on_op`` is called with the number of each
    signature and the total before it is timed.
    """
    place = _usable_device(device)
    on_cuda = place.type == "cuda"
    if on_cuda and processes > 1:
        raise UsageError("processes share a CPU", hint="use --device cpu, or leave it out")
    current = torch.cuda.device(place) if on_cuda else nullcontext()
    with (
        torch.random.fork_rng([place] if on_cuda else []),
        torch.no_grad(),
        current,
        sharing_cores(processes) as others,
    ):
        here = _device_text(place, processes)
        if known is not None and not _is_of(known, kind, here, _versions(place)):
            known = None
        host, reserved_bytes = _host_and_reserved(place)
        # The budget is for ops: what is measured of the host must not use it up, or a run that goes
        # on from another would come no further.
        deadline = time.perf_counter() + budget_s
        times = {} if known is None else dict(known.by_signature)
        entries, missing = _measure_all(graph, program, kind, place, deadline, times, others, on_op)
        if on_cuda:
            entries = _with_replayed(entries, missing, graph, program, place)
    return Profile(
        device_kind=kind.name,
        device=here,
        versions=_versions(place),
        host=host,
        reserved_bytes=reserved_bytes,
        entries=tuple(sorted(entries, key=lambda entry: entry.signature)),
        missing=dict(sorted(missing.items())),
    )


def _with_replayed(
    entries: list[ProfileEntry], missing: dict[str, str], graph: Graph, program: Program,
    device: torch.device,
) -> list[ProfileEntry]:  # fmt: skip
    """Entries with the times of their ops in a replayed step, or the reason why it cannot be
    captured."""
    try:
        found = replayed_in_place(graph, program, device)
    # The times of single ops are there, and must not be lost for whatever a capture raises.
    except Exception as error:
        missing[REPLAYED_STEP] = one_line(error)
        return entries
    finally:
        torch.cuda.empty_cache()
    if found.alone:
        missing[TWO_STEPS] = found.alone
    return [replace(entry, replayed=found.in_place.get(entry.signature)) for entry in entries]


def _is_of(profile: Profile, kind: DeviceKind, device: str, versions: dict[str, str]) -> bool:
    """True if a profile was measured on this device with these versions."""
    here = (kind.name, device, versions)
    return (profile.device_kind, profile.device, dict(profile.versions)) == here


def _measure_all(
    graph: Graph, program: Program, kind: DeviceKind, device: torch.device, deadline: float,
    known: dict[str, ProfileEntry], others: Neighbours, on_op: Callable[[int, int], None],
) -> tuple[list[ProfileEntry], dict[str, str]]:  # fmt: skip
    """Times measured before the deadline, and reasons for the missing ones."""
    entries: list[ProfileEntry] = []
    missing: dict[str, str] = {}
    first_op, count = _by_signature(graph, kind)
    compute_s, memory_s = ideal_s(work_of(graph), kind)
    for number, op in enumerate(first_op):
        signature = graph.signatures[int(graph.op_signature[op])]
        if signature in known:
            entries.append(replace(known[signature], count=count[op]))
            continue
        on_op(number + 1, len(first_op))
        left_s = deadline - time.perf_counter()
        if left_s <= 0:
            missing[signature] = OUT_OF_TIME
            continue
        limit_s = min(left_s, SHARES * left_s / (len(first_op) - number))
        others.do(stream=bool(memory_s[op] > compute_s[op]))
        try:
            seconds, workspace_bytes = _measure(
                program.calls[op], program, device, count[op], limit_s
            )
        except NoRoomError as error:
            missing[signature] = f"{OUT_OF_MEMORY}: {error.message}"
            continue
        # Whatever one op of a stranger's model raises must not lose the other measurements.
        except Exception as error:
            missing[signature] = one_line(error)
            continue
        entries.append(
            ProfileEntry(
                signature=signature,
                kind=graph.kind_of(op),
                dtype=DTYPES[int(graph.op_dtype[op])],
                flops=float(graph.flops[op]),
                bytes_touched=int(graph.bytes_touched[op]),
                count=count[op],
                seconds=seconds,
                workspace_bytes=workspace_bytes,
            )
        )
    return entries, missing


def _by_signature(graph: Graph, kind: DeviceKind) -> tuple[list[int], dict[int, int]]:
    """First op of each signature with device time, costliest first, and the number of its ops."""
    ops = np.flatnonzero(graph.works & (graph.op_signature >= 0))
    _, first, counts = np.unique(graph.op_signature[ops], return_index=True, return_counts=True)
    expected_s = roofline_s(work_of(graph), kind)[ops[first]] * counts
    order = np.argsort(-expected_s, kind="stable")
    count = dict(zip(ops[first].tolist(), counts.tolist(), strict=True))
    return ops[first][order].tolist(), count


def _measure(
    call: Call, program: Program, device: torch.device, count: int, left_s: float
) -> tuple[float, int]:
    """Seconds of one call and its workspace bytes."""
    generator = torch.Generator(device).manual_seed(0)
    if isinstance(call.function, str):
        run, num_parameters = _fused_update(call, program, device, count, generator)
        return call_s([run], device, left_s) / num_parameters, 0
    size_bytes = max(argument_bytes(call, program), 1)
    free_bytes = _free_bytes(device) - _result_bytes(call, program)
    if size_bytes > free_bytes:
        needed = format_bytes(size_bytes + _result_bytes(call, program))
        raise NoRoomError(f"needs {needed}, {format_bytes(_free_bytes(device))} are free")
    enough = -(-2 * _cache_bytes(device) // size_bytes)
    num_copies = max(1, min(MAX_COPIES, enough, free_bytes // (2 * size_bytes)))
    calls = []
    for _ in range(num_copies):
        args, kwargs = make_arguments(call, program, device, generator)
        calls.append(partial(call.function, *args, **kwargs))
    return call_s(calls, device, left_s), _workspace_bytes(calls[0], device)


_FUSED = frozenset(f"optimizer.{name}" for name in OPTIMIZER_STATES)


def _fused_update(
    call: Call, program: Program, device: torch.device, count: int, generator: torch.Generator
) -> tuple[Callable[[], Any], int]:
    """One update of several equal parameters, as fused optimizers launch it."""
    layout = program.tensors[call.args[0].number].layout
    if layout is None or call.function not in _FUSED:
        raise UsageError(f"no fused update for {call.function}")
    num = max(1, min(count, MAX_FUSED, MAX_FUSED_BYTES // max(4 * layout.size_bytes, 1)))
    own: TensorLayout = layout._replace(offset=0)
    tensors, grads, first, second = (
        [filled(own, device, 1, generator) for _ in range(num)] for _ in range(4)
    )
    if call.function.startswith("optimizer.sgd"):
        has_momentum = call.function == "optimizer.sgd-momentum"
        return partial(
            torch._fused_sgd_, tensors, grads, first if has_momentum else [], weight_decay=0.0,
            momentum=0.9 if has_momentum else 0.0, lr=1e-3, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        ), num  # fmt: skip
    for state in second:
        state.abs_()
    steps = [torch.ones((), dtype=torch.float32, device=device) for _ in range(num)]
    fused = torch._fused_adamw_ if call.function == "optimizer.adamw" else torch._fused_adam_
    return partial(
        fused, tensors, grads, first, second, [], steps, lr=1e-3, beta1=0.9,
        beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    ), num  # fmt: skip


def _workspace_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call allocates beyond its results on CUDA; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    kept = torch.cuda.memory_allocated() - before
    del result
    return max(0, torch.cuda.max_memory_allocated() - before - kept)


def _host_and_reserved(device: torch.device) -> tuple[Any, int]:
    """Host overhead, and bytes that libraries keep on the device after a small training step."""
    if device.type == "cuda":
        # Libraries that were used before in this process hold their memory already.
        torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with torch.enable_grad():
        host = measure_host_overhead(device)
    if device.type != "cuda":
        return host, 0
    gc.collect()
    return host, max(0, torch.cuda.memory_allocated() - before)


def _result_bytes(call: Call, program: Program) -> int:
    layouts = (program.tensors[t].layout for t in call.outputs if t is not None)
    return sum(layout.size_bytes for layout in layouts if layout is not None)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def _cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return last_level_cache_bytes() or CPU_CACHE_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _usable_device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}", hint="known: cpu, cuda") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"cannot profile on {device!r}: PyTorch sees no CUDA device",
            hint="use --device cpu, or install a CUDA build of PyTorch",
        )
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"cannot profile on {device!r}", hint="known: cpu, cuda")
    return place


def _device_text(device: torch.device, processes: int = 1) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    shared = f", one of {processes} processes at work" if processes > 1 else ""
    return f"{platform.processor() or platform.machine()}, {threads} threads{shared}"


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return versions
