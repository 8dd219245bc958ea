"""Profile a captured program: time each distinct op signature on a local device.

Signatures are timed in decreasing order of their predicted time, so that a short time budget leaves
out only the least important ones. No signature may take more than a few times its fair part of the
remaining time. An op that fails or does not fit into memory is listed as missing with the reason;
its costs come from the roofline that is fitted to the others. A profile can be continued. Since
each signature is timed once, a model of any depth takes seconds. On a GPU the whole step is then
captured as a CUDA graph, and its ops are timed in place (`replay`).
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hocket.base.errors import HocketError, UsageError, one_line
from hocket.base.units import format_bytes
from hocket.capture.optimizer import OPTIMIZER_STATES
from hocket.capture.program import Call, Program
from hocket.capture.recording import TensorLayout
from hocket.cost.dispatch import measure_host_overhead
from hocket.cost.efficiency import roofline_s, work_of
from hocket.cost.inputs import argument_bytes, filled, make_arguments
from hocket.cost.profile import Profile, ProfileEntry
from hocket.cost.replay import replayed_in_place
from hocket.cost.timing import call_s
from hocket.graph.graph import DTYPES, Graph
from hocket.hardware.cluster import DeviceKind
from hocket.hardware.detect import available_bytes, last_level_cache_bytes

CPU_CACHE_BYTES = 32 * 2**20
"""Assumed size of the last-level cache if the system does not report it."""
MAX_COPIES = 32
"""Largest number of sets of inputs that are used in rotation."""
MAX_FUSED = 32
"""Largest number of parameters per fused optimizer call."""
MAX_FUSED_BYTES = 4 * 2**30
SHARES = 4
"""Largest time of one signature, as a multiple of its fair part of the remaining time."""
OUT_OF_TIME = "not measured: the time budget was used up"
OUT_OF_MEMORY = "not measured: too little memory"
REPLAYED_STEP = "the step as one CUDA graph"
"""Entry among the missing times if the step could not be captured as a CUDA graph."""
TWO_STEPS = "two such steps beside each other"
"""Entry among the missing times if two steps could not be replayed concurrently."""


class TooLargeError(HocketError):
    """An op's tensors do not fit into the memory that is free."""


def profile_program(
    graph: Graph,
    program: Program,
    kind: DeviceKind,
    *,
    device: str = "cpu",
    budget_s: float = 120.0,
    known: Profile | None = None,
    on_op: Callable[[int, int], None] = lambda number, total: None,
) -> Profile:
    """Time every op signature of a captured step on ``device``, which is of the given type.

    ``known`` is an earlier profile of this device whose times are kept. ``on_op`` is called before
    each signature is timed, with its number and the number of all signatures.
    """
    place = _usable_device(device)
    on_cuda = place.type == "cuda"
    current = torch.cuda.device(place) if on_cuda else nullcontext()
    with torch.random.fork_rng([place] if on_cuda else []), torch.no_grad(), current:
        here = _device_text(place)
        if known is not None and not _is_of(known, kind, here, _versions(place)):
            known = None
        host, reserved_bytes = _host_and_reserved(place)
        # The budget begins after the host was measured. Otherwise short budgets would be used up
        # before any op is timed, and a continued profile would never advance.
        deadline = time.perf_counter() + budget_s
        times = {} if known is None else dict(known.by_signature)
        entries, missing = _measure_all(graph, program, kind, place, deadline, times, on_op)
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
    # Whatever a capture raises, the times of single ops must not be lost.
    except Exception as error:
        missing[REPLAYED_STEP] = one_line(error)
        return entries
    finally:
        # A failed capture may leave memory reserved, which later measurements need.
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
    known: dict[str, ProfileEntry], on_op: Callable[[int, int], None],
) -> tuple[list[ProfileEntry], dict[str, str]]:  # fmt: skip
    """Times measured before the deadline, and reasons for the missing ones."""
    entries: list[ProfileEntry] = []
    missing: dict[str, str] = {}
    first_op, count = _by_signature(graph, kind)
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
        # Fast ops leave time over, so a slow one may take several times its equal part.
        limit_s = min(left_s, SHARES * left_s / (len(first_op) - number))
        try:
            seconds, workspace_bytes = _measure(
                program.calls[op], program, device, count[op], limit_s
            )
        except TooLargeError as error:
            missing[signature] = f"{OUT_OF_MEMORY}: {error.message}"
            continue
        # Whatever an op of an unknown model raises, other measurements must not be lost.
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
        raise TooLargeError(f"needs {needed}, {format_bytes(_free_bytes(device))} are free")
    # Twice the cache, so that no input is still in it when its turn comes again.
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
        # Second moments are squares, and a negative one would give NaN.
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
        # Libraries that this process has used before would hold their memory already.
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


def _device_text(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return versions
