"""The parameters of a block: where they are at home, and where they are computed with.

A block with streamed parameters, or with an update on the host, has its parameters side by side in
one buffer of the host, so that one copy brings them all. Where every op that reads a parameter
first rounds it (autocast), what is copied is a rounded twin of the buffer: the same numbers in half
the bytes. The parameter objects stay the person's own: ``parameter.data`` looks at home, and at the
device's copy while the block computes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.fake import flat_weights, lay_apart
from hocket.capture.recurrent import accept_weights_apart
from hocket.hardware.allocation import aligned
from hocket.plan.sections.memory import MemoryBlock
from hocket.runtime.offload.copy_streams import (
    DONE,
    CopyEngines,
    Ticket,
    extent,
    host_buffer,
    looking,
)
from hocket.runtime.offload.memory_tracker import on_host
from hocket.runtime.offload.optimizer_parts import versions_of
from hocket.runtime.offload.recompute import Unmoved


@dataclass(frozen=True)
class Look:
    """A tensor that looks at a buffer of bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """What it takes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """Where the next one may begin."""
        return self.start + aligned(self.num_bytes)

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor; a buffer keeps those that look at it, because making one takes the host as
        long as launching a kernel."""
        views: dict[Look, torch.Tensor] = buffer.__dict__.setdefault("_views", {})
        if self not in views:
            offset = self.start // self.dtype.itemsize
            views[self] = looking(buffer, self.dtype, self.shape, self.stride, offset)
        return views[self]


@dataclass(frozen=True)
class Place(Look):
    """One parameter in a buffer."""

    parameter: nn.Parameter


@dataclass(frozen=True)
class BufferLayout:
    """Where parameters lie in a buffer."""

    places: tuple[Place, ...]
    num_bytes: int


def layout_of(
    parameters: Sequence[nn.Parameter], dtypes: Mapping[int, torch.dtype] | None = None
) -> BufferLayout:
    """Side by side, in their own types or in ``dtypes`` (by ``id`` of the parameter)."""
    places: list[Place] = []
    for parameter in parameters:
        dtype = (dtypes or {}).get(id(parameter), parameter.dtype)
        dense = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
        # Gaps of an odd layout are not worth keeping.
        is_dense = dense.numel() == extent(dense)
        stride = parameter.stride() if is_dense else torch.empty_like(dense).stride()
        start = places[-1].stop if places else 0
        places.append(Place(dtype, parameter.shape, stride, start, parameter))
    return BufferLayout(tuple(places), places[-1].stop if places else 0)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(eq=False)
class Block:
    """A part of the model with one policy."""

    policy: MemoryBlock
    index: int
    """Its place in the forward pass; -1 for what is needed before all blocks."""
    modules: dict[str, nn.Module]
    calls: Sequence[str] = ()
    """Paths of these modules, each as often as the block calls it."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Those that no other block has."""
    draws: bool = True
    """True if its forward pass may draw random numbers."""
    once: frozenset[str] = frozenset()
    """Those of its modules that change what they are given, so that they cannot run again."""
    grouped: dict[nn.Parameter, int] = field(default_factory=dict)
    """Those of experts that come in so many groups, and not with the block."""
    home: torch.Tensor | None = None
    """The host's buffer of the parameters; None where they live on the device."""
    home_layout: BufferLayout = field(default_factory=lambda: BufferLayout((), 0))
    copied: torch.Tensor | None = None
    """What is copied to the device: the home itself or its rounded twin."""
    copied_layout: BufferLayout = field(default_factory=lambda: BufferLayout((), 0))
    made_layout: BufferLayout = field(default_factory=lambda: BufferLayout((), 0))
    """Where gradients land in the type that they are made in: that of what is copied."""
    resident: torch.Tensor | None = None
    """The device's lasting copy, where only the update is on the host."""
    renewed: Ticket = DONE
    """Of what that copy was last brought up to date with."""
    left: Ticket = DONE
    """Where the computation last used it."""
    updated: threading.Event = field(default_factory=_set_event)
    """Whether no update of it is under way on the host."""
    returned: Ticket = DONE
    """Of what an update on the device sends home."""
    sent: Ticket = DONE
    """Of the gradients that were last sent home."""
    num_open: int = 0
    """Visits of the forward pass whose backward pass is still to come."""
    pending: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Gradients at home that wait for more, or for the update."""
    landing: torch.Tensor | None = None
    """The buffer that they lie in."""
    arriving: torch.Tensor | None = None
    """The buffer that gradients of groups of experts are sent to in this backward pass."""
    arrived: set[tuple[nn.Parameter, int]] = field(default_factory=set)
    """Which of them were sent, by parameter and first expert."""
    twins: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """What is updated at home, while the parameter itself may look elsewhere."""
    is_stale: bool = True
    """True if the device's lasting copy is older than the home."""
    _views: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """What the parameters look at in each lasting buffer of the device."""
    _own_storages: set[int] = field(default_factory=set)
    """The home, and buffers of the device that the parameters have looked at."""
    versions: list[int] = field(default_factory=list)
    """Of the parameters when they were last rounded."""

    @cached_property
    def unmoved(self) -> Unmoved:
        """The buffers of its modules."""
        return Unmoved(self.modules.values())

    @property
    def sends(self) -> bool:
        """True if something of what its visits save goes to the host."""
        is_recomputed = self.policy.activations == "recomputed"
        from_host = is_recomputed and self.policy.checkpoint == "offloaded"
        return self.policy.activations == "offloaded" or from_host

    @property
    def is_streamed(self) -> bool:
        """True if its parameters have to be fetched before each use."""
        return self.home is not None and self.resident is None

    @property
    def brought_bytes(self) -> int:
        """What is fetched of a streamed block at once: all that does not come in groups."""
        places = [p for p in self.copied_layout.places if p.parameter not in self.grouped]
        return places[-1].stop if places else 0

    @property
    def is_updated_here(self) -> bool:
        """True if its state comes to the device for the update."""
        return self.is_streamed and self.policy.update == "device"

    def settle_on_host(self, rounded: Mapping[int, torch.dtype], *, pinned: bool) -> None:
        """Make the host its home; ``rounded`` are types that its parameters are computed in."""
        # What comes in groups lies behind what comes at once.
        ordered = sorted(self.parameters, key=lambda p: p in self.grouped)
        self.home_layout = layout_of(ordered)
        self.copied_layout = layout_of(ordered, rounded)
        # Those of groups are added up where they land.
        self.made_layout = self.home_layout if self.grouped else self.copied_layout
        are_same = all(id(p) not in rounded for p in self.parameters)
        travels = are_same or self.policy.update == "device"
        with on_host(), torch.no_grad():
            self.home = host_buffer(self.home_layout.num_bytes, pinned=pinned and travels)
            for place in self.home_layout.places:
                here = place.of(self.home)
                here.copy_(place.parameter.data)
                place.parameter.data = here
                self.twins[place.parameter] = nn.Parameter(here, requires_grad=False)
            self.copied = self.home
            if not are_same:
                self.copied = host_buffer(self.copied_layout.num_bytes, pinned=pinned)
        self._own_storages.add(self.home.untyped_storage()._cdata)
        self.round()

    @torch.no_grad()
    def take_home(self) -> None:
        """Bring home what the parameters are, wherever they look."""
        if self.home is not None:
            with on_host():
                for parameter, twin in self.twins.items():
                    twin.copy_(parameter.data)
            self.look_home()
            self.round()
            self.is_stale = True

    def require_own_memory(self) -> None:
        """Refuse parameters that a person has given other memory: it would be forgotten."""
        for parameter in self.parameters if self.home is not None else ():
            if parameter.untyped_storage()._cdata not in self._own_storages and parameter.numel():
                raise UsageError(
                    f"a parameter of {self.policy.name!r} ({list(parameter.shape)}) was given "
                    "other memory, and hocket has its own for it within a budget",
                    hint="write into it: parameter.data.copy_(…) for parameter.data = …",
                )

    def look_home(self) -> None:
        """Have the parameters look at their home."""
        if self.home is not None:
            for parameter, twin in self.twins.items():
                parameter.data = twin

    def look_at(self, buffer: torch.Tensor) -> None:
        """Have the parameters look at a copy on the device."""
        places = [p for p in self.copied_layout.places if p.parameter not in self.grouped]
        if id(buffer) not in self._views:
            self._views[id(buffer)] = [place.of(buffer) for place in places]
            self._own_storages.add(buffer.untyped_storage()._cdata)
        for place, view in zip(places, self._views[id(buffer)], strict=True):
            place.parameter.data = view

    @torch.no_grad()
    def round(self, chosen: Collection[nn.Parameter] | None = None) -> None:
        """Bring the rounded twin up to date with the home: of all parameters, or of some."""
        assert self.home is not None
        assert self.copied is not None
        if self.copied is not self.home:
            both = zip(self.copied_layout.places, self.home_layout.places, strict=True)
            # In one call: a thread that has to ask for Python between copies waits for the others.
            with on_host():
                pairs = [(place.of(self.copied), whole.of(self.home)) for place, whole in both
                         if chosen is None or whole.parameter in chosen]  # fmt: skip
                torch._foreach_copy_([place for place, _ in pairs], [whole for _, whole in pairs])
        self.versions = versions_of(self.parameters)

    @property
    def is_changed(self) -> bool:
        """True if somebody wrote to the parameters since they were last rounded."""
        return self.versions != versions_of(self.parameters)


def blocks_by_module(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    """By the path of a module: the block of each of its calls, in the order of the calls."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        for path in block.calls:
            found.setdefault(path, []).append(block)
    return found


def settle_parameters(
    model: nn.Module,
    blocks: Sequence[Block],
    engines: CopyEngines,
    rounded: Mapping[str, torch.dtype],
) -> None:
    """Bring parameters and buffers to where the policies of their blocks have them at home.

    ``rounded`` are parameters that every op reads in another type only, by name.
    """
    if flat_weights(model):
        lay_apart(model)
        accept_weights_apart()
    names = {id(p): name for name, p in model.named_parameters()}
    types = {number: rounded[name] for number, name in names.items() if name in rounded}
    for block in blocks:
        if block.parameters and block.policy.is_on_host:
            block.settle_on_host(types, pinned=engines.is_real)
            if block.policy.parameters == "resident":
                num_bytes = block.copied_layout.num_bytes
                block.resident = torch.empty(num_bytes, dtype=torch.uint8, device=engines.device)
                # The computation may still be at work in memory that it has given back.
                block.left = engines.mark()
            continue
        for parameter in block.parameters:
            parameter.data = parameter.data.to(engines.device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(engines.device)
