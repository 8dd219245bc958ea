"""Parameters of a block: their master copy on the host, and their copies on the device.

A block whose parameters are streamed, or whose update is on the host, has all its parameters in one
host buffer, so that a single copy fetches them. If every op that reads a parameter first casts it
(autocast), a low-precision copy of the buffer is uploaded instead, which gives the same results
with half the bytes. The parameter objects remain the user's: ``parameter.data`` becomes a view of
the master copy, or of a device buffer while the block computes. This file lays out the buffers and
points parameters at them; `hooks` and `prefetch` start the transfers of a step.
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
    CopyEvent,
    CopyStreams,
    extent,
    host_buffer,
    typed_view,
)
from hocket.runtime.offload.memory_tracker import on_host
from hocket.runtime.offload.recompute import ModuleState
from hocket.runtime.optimizer_parts import versions_of


@dataclass(frozen=True)
class BufferView:
    """Position, dtype and layout of a tensor in a byte buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """First aligned byte after the tensor, where the next tensor may start."""
        return self.start + aligned(self.num_bytes)

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of ``buffer``.

        Views are cached in the buffer, because creating one costs as much host time as a kernel
        launch.
        """
        views: dict[BufferView, torch.Tensor] = buffer.__dict__.setdefault("_views", {})
        if self not in views:
            offset = self.start // self.dtype.itemsize
            views[self] = typed_view(buffer, self.dtype, self.shape, self.stride, offset)
        return views[self]


@dataclass(frozen=True)
class ParameterView(BufferView):
    """Position, dtype and layout of a parameter in a byte buffer."""

    parameter: nn.Parameter


@dataclass(frozen=True)
class BufferLayout:
    """Positions of consecutive parameters in a byte buffer."""

    places: tuple[ParameterView, ...] = ()
    num_bytes: int = 0


def layout_of(
    parameters: Sequence[nn.Parameter], dtypes: Mapping[int, torch.dtype] | None = None
) -> BufferLayout:
    """Lay out parameters in their own dtypes, or in ``dtypes`` by ``id`` of the parameter."""
    places: list[ParameterView] = []
    for parameter in parameters:
        dtype = (dtypes or {}).get(id(parameter), parameter.dtype)
        dense = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
        # A layout with gaps or overlaps is made dense, so that copies move no unused bytes.
        is_dense = dense.numel() == extent(dense)
        stride = parameter.stride() if is_dense else torch.empty_like(dense).stride()
        start = places[-1].stop if places else 0
        places.append(ParameterView(dtype, parameter.shape, stride, start, parameter))
    return BufferLayout(tuple(places), places[-1].stop if places else 0)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(eq=False)
class Block:
    """A part of the model with one memory policy."""

    policy: MemoryBlock
    index: int
    """Position in the forward pass; -1 for the block of shared parameters, which is needed
    first."""
    modules: dict[str, nn.Module]
    calls: Sequence[str] = ()
    """Path of the module of each call in the block, in the order of the calls."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Parameters that no other block uses; the shared block has all other parameters."""
    uses_rng: bool = True
    """True if the forward pass of the block may draw random numbers."""
    not_recomputable: frozenset[str] = frozenset()
    """Paths of modules that cannot run twice, for example because they write into their inputs."""

    master: torch.Tensor | None = None
    """Host buffer with the master copy of the parameters; None if they live on the device."""
    master_layout: BufferLayout = field(default_factory=BufferLayout)
    upload: torch.Tensor | None = None
    """Host buffer that is copied to the device: the master copy or its low-precision copy."""
    upload_layout: BufferLayout = field(default_factory=BufferLayout)
    """Layout of ``upload``, and of host gradients, which have the dtype of the device's
    gradients."""
    masters: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Master copy by parameter; the host can update it while the parameter views device memory."""
    resident: torch.Tensor | None = None
    """Permanent copy on the device, if only the update is on the host."""
    is_stale: bool = True
    """True if the permanent copy is older than the master copy."""

    resident_ready: CopyEvent = DONE
    """Event of the last refresh of the permanent copy."""
    last_use: CopyEvent = DONE
    """Event after the last use of the permanent copy by computation."""
    update_done: threading.Event = field(default_factory=_set_event)
    """Set unless the host has unfinished work for the block."""
    written_back: CopyEvent = DONE
    """Event of the last write-back of an update on the device."""
    gradients_sent: CopyEvent = DONE
    """Event of the last copy of gradients to the host."""
    num_pending_backward: int = 0
    """Number of calls in the forward pass whose backward pass has not run yet."""

    host_gradients: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Gradients on the host that wait for further batches, or for the update."""
    gradient_buffer: torch.Tensor | None = None
    """Pinned buffer of ``host_gradients``."""

    _own_storages: set[int] = field(default_factory=set)
    """Keys of the storages in which hocket places the parameters."""
    versions: list[int] = field(default_factory=list)
    """Version counters of the parameters at the last `refresh_upload`."""

    @cached_property
    def module_state(self) -> ModuleState:
        """State of the block's modules, which recompute saves and restores."""
        return ModuleState(self.modules.values())

    @property
    def offloads_saved(self) -> bool:
        """True if tensors that the block's calls save are offloaded."""
        if self.policy.activations == "recomputed":
            return self.policy.checkpoint == "offloaded"
        return self.policy.activations == "offloaded"

    @property
    def is_streamed(self) -> bool:
        """True if the parameters are fetched before each use."""
        return self.master is not None and self.resident is None

    @property
    def fetched_bytes(self) -> int:
        """Bytes of one fetch of the parameters."""
        return self.upload_layout.num_bytes

    @property
    def updates_on_device(self) -> bool:
        """True if optimizer state is swapped in for updates on the device."""
        return self.is_streamed and self.policy.update == "device"

    def move_to_host(self, low_precision: Mapping[int, torch.dtype], *, pinned: bool) -> None:
        """Move the parameters to a master copy on the host.

        ``low_precision`` maps the ``id`` of parameters to the dtype in which ops read them.
        """
        self.master_layout = layout_of(self.parameters)
        self.upload_layout = layout_of(self.parameters, low_precision)
        are_same = all(id(p) not in low_precision for p in self.parameters)
        # The master copy is copied to the device only without a low-precision copy or for updates
        # on the device; pinned memory that is not copied from would be wasted.
        is_pinned = pinned and (are_same or self.policy.update == "device")
        with on_host(), torch.no_grad():
            self.master = host_buffer(self.master_layout.num_bytes, pinned=is_pinned)
            for place in self.master_layout.places:
                view = place.of(self.master)
                view.copy_(place.parameter.data)
                place.parameter.data = view
                self.masters[place.parameter] = nn.Parameter(view, requires_grad=False)
            self.upload = self.master
            if not are_same:
                self.upload = host_buffer(self.upload_layout.num_bytes, pinned=pinned)
        self._own_storages.add(self.master.untyped_storage()._cdata)
        self.refresh_upload()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the parameters from their present memory to the master copy and upload buffer."""
        if self.master is not None:
            with on_host():
                for parameter, master in self.masters.items():
                    master.copy_(parameter.data)
            self.use_master()
            self.refresh_upload()
            self.is_stale = True

    def require_own_storage(self) -> None:
        """Refuse parameters whose ``data`` the user replaced, because the next fetch would discard
        the new values."""
        for parameter in self.parameters if self.master is not None else ():
            # Empty parameters have no memory of their own to compare.
            if parameter.untyped_storage()._cdata not in self._own_storages and parameter.numel():
                raise UsageError(
                    f"a parameter of {self.policy.name!r} ({list(parameter.shape)}) was given "
                    "other memory, but with memory= hocket manages its memory",
                    hint="write into it: parameter.data.copy_(…) for parameter.data = …",
                )

    def use_master(self) -> None:
        """Make the parameters views of their master copy."""
        if self.master is not None:
            for parameter, master in self.masters.items():
                parameter.data = master

    def use_buffer(self, buffer: torch.Tensor) -> None:
        """Make the parameters views of a device buffer."""
        self._own_storages.add(buffer.untyped_storage()._cdata)
        for place in self.upload_layout.places:
            place.parameter.data = place.of(buffer)

    @torch.no_grad()
    def refresh_upload(self, chosen: Collection[nn.Parameter] | None = None) -> None:
        """Cast the master copy to the low-precision copy, for all parameters or the ``chosen``
        ones."""
        assert self.master is not None
        assert self.upload is not None
        if self.upload is not self.master:
            both = zip(self.upload_layout.places, self.master_layout.places, strict=True)
            # One call for all tensors, because the update thread waits for Python's GIL between
            # calls.
            with on_host():
                pairs = [(low.of(self.upload), full.of(self.master)) for low, full in both
                         if chosen is None or full.parameter in chosen]  # fmt: skip
                torch._foreach_copy_([low for low, _ in pairs], [full for _, full in pairs])
        self.versions = versions_of(self.parameters)

    @property
    def is_changed(self) -> bool:
        """True if the parameters were written to since `refresh_upload`."""
        return self.versions != versions_of(self.parameters)


def blocks_by_module(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    """Return, by path of a module, the block of each of its calls, in the order of the calls."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        for path in block.calls:
            found.setdefault(path, []).append(block)
    return found


def place_parameters(
    model: nn.Module,
    blocks: Sequence[Block],
    streams: CopyStreams,
    low_precision: Mapping[str, torch.dtype],
) -> None:
    """Move parameters and buffers to the host or the device, as the policies of their blocks
    specify.

    ``low_precision`` holds the dtypes of parameters that every op casts to another dtype first, by
    name.
    """
    if flat_weights(model):
        lay_apart(model)
        accept_weights_apart()
    names = {id(p): name for name, p in model.named_parameters()}
    types = {key: low_precision[name] for key, name in names.items() if name in low_precision}
    for block in blocks:
        if block.parameters and block.policy.is_on_host:
            block.move_to_host(types, pinned=streams.is_real)
            if block.policy.parameters == "resident":
                num_bytes = block.upload_layout.num_bytes
                block.resident = torch.empty(num_bytes, dtype=torch.uint8, device=streams.device)
                # Computation may still use memory that it has freed.
                block.last_use = streams.record_event()
            continue
        for parameter in block.parameters:
            parameter.data = parameter.data.to(streams.device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(streams.device)
