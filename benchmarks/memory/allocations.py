"""What an allocator gives and takes back in a step, event by event, with the op that asked for it.

PyTorch's profiler is told by the allocators themselves, so that nothing stands between autograd and
its ops: a dispatch mode, which counts storages, changes how gradients are added up. On a processor
the device and the host are the same kind of memory: what is made `on_host` is marked as the host's.
Temporaries inside an op are told apart: a rehearsal on tensors without memory cannot see them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._C._profiler import _EventType

from hocket.runtime.offload import memory_tracker as ledger

_HOST = "made on the host"
_ENGINE = "autograd::engine::evaluate_function: "
_OP = "aten::"


class Moment(NamedTuple):
    """What was held at most, and when."""

    held_bytes: int
    phase: str
    """Forward, backward or update; of a backward pass also the node."""
    op: str
    """The outermost op, and inside of it the innermost."""


@dataclass(frozen=True)
class _Event:
    at_ns: int
    address: int
    num_bytes: int
    """Less than 0 where they are given back."""
    path: tuple[str, ...]
    """Ops that were under way, from the outside."""
    op_ends_ns: int | None
    """Of the outermost op that is not only made of others."""
    is_counted: bool


class Allocations:
    """What was given and taken back on a device while a function ran."""

    def __init__(self, held: Mapping[int, int], events: Iterable[_Event]) -> None:
        """``held`` are bytes by address that were there before."""
        self._held, self._events = held, sorted(events, key=lambda event: event.at_ns)

    def peak(self, *, with_temporaries: bool) -> Moment:
        """The most that was held, with or without what lives and dies inside one op."""
        return max(self._moments(with_temporaries), key=lambda moment: moment.held_bytes)

    def peaks(self) -> dict[str, int]:
        """The most that was held by phase, with temporaries."""
        found: dict[str, int] = {}
        for moment in self._moments(with_temporaries=True):
            phase = moment.phase.partition(" ")[0]
            found[phase] = max(found.get(phase, 0), moment.held_bytes)
        return found

    @property
    def end_bytes(self) -> int:
        """What was held at the end."""
        live = dict(self._held)
        for event in self._events:
            if event.num_bytes < 0:
                live.pop(event.address, None)
            elif event.is_counted:
                live[event.address] = event.num_bytes
        return sum(live.values())

    def _moments(self, with_temporaries: bool) -> Iterator[Moment]:
        freed_ns = self._freed_ns()
        live, held, phase = dict(self._held), sum(self._held.values()), "forward"
        yield Moment(held, phase, "")
        for number, event in enumerate(self._events):
            phase = _phase(event.path, phase)
            if event.num_bytes < 0:
                held -= live.pop(event.address, 0)
                continue
            is_short = event.op_ends_ns is not None and freed_ns[number] < event.op_ends_ns
            if event.is_counted and (with_temporaries or not is_short):
                live[event.address] = event.num_bytes
                held += event.num_bytes
                yield Moment(held, phase, _ops(event.path))

    def _freed_ns(self) -> list[float]:
        """For each event when what it gave was given back."""
        found, given = [float("inf")] * len(self._events), dict[int, int]()
        for number, event in enumerate(self._events):
            if event.num_bytes > 0:
                given[event.address] = number
            elif event.address in given:
                found[given.pop(event.address)] = event.at_ns
        return found


def allocations(
    function: Callable[[], Any], device: torch.device, held: Iterable[torch.Tensor] = ()
) -> Allocations:
    """Call a function and note what it allocates; ``held`` is there before, where the allocator
    does not tell what is."""
    before = {0: torch.cuda.memory_allocated(device)} if device.type == "cuda" else _bytes_of(held)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _host_marked(), torch.profiler.profile(activities=activities, profile_memory=True) as made:
        function()
    tree = made.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    return Allocations(before, _events(tree, device.type))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _events(
    tree: Iterable[Any], kind: str, path: tuple[str, ...] = (), op_ends_ns: int | None = None
) -> Iterator[_Event]:
    for event in tree:
        if event.tag == _EventType.Allocation:
            given = event.extra_fields
            # On a processor states of random numbers and single numbers come from no op.
            is_device = kind != "cpu" or (op_ends_ns is not None and _HOST not in path)
            if given.device.type == kind:
                yield _Event(event.start_time_ns, given.ptr, given.alloc_size, path, op_ends_ns,
                             is_device)  # fmt: skip
        ends_ns = op_ends_ns
        if ends_ns is None and event.name.startswith(_OP) and not _is_made_of_others(event.name):
            ends_ns = event.end_time_ns
        yield from _events(event.children, kind, (*path, event.name), ends_ns)


@cache
def _is_made_of_others(name: str) -> bool:
    """Whether an op is split into others before a dispatch mode sees it."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(has_kernel(each, "CompositeImplicitAutograd") for each in _overloads()[name])


@cache
def _overloads() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in torch._C._dispatch_get_all_op_names():
        op, _, overload = name.partition(".")
        # Results that are given have kernels of their own, names of dimensions have none.
        if overload != "out" and "name" not in overload:
            found[op].append(name)
    return found


def _phase(path: tuple[str, ...], before: str) -> str:
    nodes = [name.removeprefix(_ENGINE) for name in path if name.startswith(_ENGINE)]
    if nodes:
        return f"backward {nodes[0]}"
    return before if before == "forward" else "update"


def _ops(path: tuple[str, ...]) -> str:
    ops = [name for name in path if name.startswith(_OP)]
    return " … ".join(dict.fromkeys((*ops[:1], *ops[-1:])))


class _MarkedDepth(threading.local):
    """How deep a thread is within `on_host`, told to the profiler as well."""

    def __init__(self) -> None:
        self._ranges: list[Any] = []

    @property
    def value(self) -> int:
        return len(self._ranges)

    @value.setter
    def value(self, depth: int) -> None:
        if depth > len(self._ranges):
            self._ranges.append(torch.profiler.record_function(_HOST))
            self._ranges[-1].__enter__()
        else:
            self._ranges.pop().__exit__(None, None, None)


@contextmanager
def _host_marked() -> Iterator[None]:
    with mock.patch.object(ledger, "_host_depth", _MarkedDepth()):
        yield
