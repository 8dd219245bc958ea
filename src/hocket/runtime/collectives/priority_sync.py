"""Send gradients in the order in which the next forward pass needs them (P3, MLSys 2019).

A hook gets each gradient as soon as it is computed and passes slices of it to the executor, which
sends the most urgent slice first. In the next forward pass each layer waits only for its own
gradient sums and then updates its parameters, so the end of a step is not a barrier. The order of
every sum is fixed and every parameter is updated once per step, so results are those of synchronous
training. If communication is short compared with compute, crossing the end of a step gains nothing;
then the optimizer step waits for all sums, as in DistributedDataParallel.

Gradients on a GPU are copied to pinned memory on a separate stream (`GpuStaging`), because in NCCL
an urgent slice cannot overtake others. They are summed in their own dtype, or in ``dtype``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hocket.base.arrays import LongArray
from hocket.base.errors import RunError, UsageError
from hocket.plan.make import find_cluster
from hocket.runtime.collectives.process_group import PlannedGroup, given_cluster
from hocket.runtime.collectives.rank_tables import tables_of_chunks
from hocket.runtime.collectives.tree_executor import TreeRun
from hocket.runtime.collectives.tree_thread import TreeThread

# Gradients of a GPU are copied to pinned memory during the backward pass.
#
# A separate stream copies; a thread waits for each copy and then runs its callback. Copies end in
# the order in which they were launched, so one queue suffices.


class GpuStaging:
    """Copies gradients from one GPU to pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None]
        self._copies = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hocket staging", daemon=True)
        self._thread.start()

    def fetch(
        self, into: torch.Tensor, gradient: torch.Tensor | None, on_host: Callable[[], None]
    ) -> None:
        """Copy a gradient (zeros if None) into pinned memory, and call ``on_host`` afterwards."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            source = torch.zeros_like(into, device=self._device) if gradient is None else gradient
            into.copy_(source.reshape(-1).to(into.dtype), non_blocking=True)
            # The allocator must not reuse the gradient's memory before the copy has read it.
            source.record_stream(self._stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._copies.put((copied, on_host))

    def close(self) -> None:
        """End the thread once all copies are done."""
        self._copies.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            copied, on_host = copy
            copied.synchronize()
            on_host()


# Slices: P3 cuts gradients into slices, so that an urgent gradient can overtake a large one that
# was computed earlier. Each slice is sent over the tree that is furthest behind its share of the
# bytes. The roots of the trees replace P3's sharded servers. O(slices · trees).

SLICE_BYTES = 160_000
"""Bytes of a slice: 40,000 float32 values, as in P3."""

Chunk = tuple[int, int, int]
"""Index of the tree, first byte, and end (exclusive)."""


def slices(
    layer_bytes: Sequence[int], shares: Sequence[float], *, item_bytes: int = 4,
    slice_bytes: int = SLICE_BYTES,
) -> tuple[list[Chunk], list[tuple[int, int]]]:  # fmt: skip
    """Return chunks in the order of the layers, and each layer's range of chunks (end
    exclusive)."""
    size = max(slice_bytes // item_bytes, 1) * item_bytes
    chunks: list[Chunk] = []
    ends, sent_bytes, at = [], [0.0] * len(shares), 0
    for num_bytes in layer_bytes:
        first, stop = len(chunks), at + num_bytes
        while at < stop:
            tree = min(range(len(shares)), key=lambda n: (sent_bytes[n] / shares[n], n))
            piece = min(size, stop - at)
            chunks.append((tree, at, at + piece))
            sent_bytes[tree] += piece
            at += piece
        ends.append((first, len(chunks)))
    return chunks, ends


_ADDED = (torch.float32, torch.float64, torch.bfloat16)
WORTHWHILE = 0.2
"""Minimum ratio of communication to compute time at which sums may cross the end of a step; below
it the backward pass hides communication."""
MEASURED_STEPS = 3
"""Number of steps, after the first one, over which this ratio is measured."""


@dataclass(eq=False)
class GradientLayer:
    """Parameters whose first use in a forward pass is in the same module."""

    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    first: int = 0
    stop: int = 0
    """End (exclusive) of the layer's range of chunks."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the layer's gradients."""
        return sum(p.numel() for p in self.parameters)


class Propagation:
    """A model and its optimizer whose gradients are sent by priority; made by `hocket.priority`."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, exchange: TreeThread, *,
        crosses: bool | None, slice_bytes: int = SLICE_BYTES, is_backward_order: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """With ``crosses`` sums may finish after the end of a step; None decides after a few steps.

        Gradients are summed in ``dtype``. By default that is their own dtype if the executor
        supports it, else float32.
        """
        self.model, self.optimizer, self._exchange = model, optimizer, exchange
        self._slice_bytes, self._is_backward = slice_bytes, is_backward_order
        self.crosses: bool | None = crosses
        self._called: list[torch.nn.Module] = []
        self._layers: list[GradientLayer] = []
        self._layer_of: dict[torch.nn.Module, list[int]] = {}
        self._place: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
        self._missing = np.zeros(0, dtype=np.int64)
        self._run: TreeRun | None = None
        self._options: list[dict[str, Any]] = []
        self._due: set[int] = set()
        """Layers to which the sums of the last step have not been applied yet."""
        self._taken: set[torch.nn.Parameter] = set()
        self._is_stepping = False
        self.is_syncing = True
        """False while gradients of several backward passes are accumulated on this rank alone."""
        self._num_steps, self._since_s, self._waited_s = 0, 0.0, 0.0
        trained = [p for p in model.parameters() if p.requires_grad]
        self._dtype = dtype or _wire_dtype(trained)
        self._staging = _staging_of(trained)
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if stepped != set(trained):
            raise UsageError(
                "the optimizer must update all parameters of the model that need gradients, and no "
                "others"
            )
        for module in model.modules():
            module.register_forward_pre_hook(self._before_forward)
        for parameter in trained:
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(self._after_gradient)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        saved: Any = model
        saved.register_state_dict_pre_hook(lambda *_: self.finish())
        optimizer.register_state_dict_pre_hook(lambda *_: self.finish())

    # ── what the loop does ──

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if not self._layers:
            if module not in self._called:
                self._called.append(module)
            return
        for index in self._layer_of.get(module, ()):
            if index in self._due:
                self._update([index])

    def _after_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._layers or not self.is_syncing:
            return
        if parameter in self._taken:
            raise UsageError(
                "a gradient came twice in one step",
                hint="call backward once per optimizer.step(), and all backward passes before the "
                "last within no_sync()",
            )
        self._taken.add(parameter)
        self._submit_gradient(parameter)

    def _before_step(self, *_: Any) -> None:
        if self._is_stepping:
            return
        if not self._layers:
            self._plan_layers()
        # Modules that were not called in this step have not waited for the last one.
        self.finish()
        for parameter in self._place.keys() - self._taken:
            self._submit_gradient(parameter)
        self._taken = set()
        # Settings of this step: a scheduler may change them before a layer is updated.
        self._options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        self._due = set(range(len(self._layers)))
        if not self.crosses:
            if self.crosses is None and self._staging is not None:
                torch.cuda.synchronize()  # else the GPU's remaining compute counts as waiting
            began_s = time.monotonic()
            self._sums_as_gradients(range(len(self._layers)))
            self._waited_s += time.monotonic() - began_s
            self._due = set()

    def _after_step(self, *_: Any) -> None:
        if self._is_stepping:
            return
        if not self.crosses:
            for parameter in self._place:
                parameter.grad = None
            self._decide()
        self._begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable sums inside the context, like `DistributedDataParallel.no_sync`."""
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def finish(self) -> None:
        """Wait for all sums and apply them; call this before reading parameters, for example to
        evaluate or save."""
        if self._due:
            self._update(sorted(self._due))

    # ── the pieces ──

    def _plan_layers(self) -> None:
        """Order layers by the first forward pass, and cut their gradients into slices."""
        self._layers, self._layer_of = _layers(self.model, self._called)
        if self._is_backward:
            self._layers = self._layers[::-1]
            count = len(self._layers)
            self._layer_of = {m: [count - 1 - n for n in ns] for m, ns in self._layer_of.items()}
        item_bytes = self._dtype.itemsize
        sizes = [layer.num_elements * item_bytes for layer in self._layers]
        # With other sizes or another order, ranks would add up gradients of different layers.
        text = self._exchange.agreed("sizes", ",".join(map(str, sizes)))
        if text != ",".join(map(str, sizes)):
            raise RunError("ranks run their layers in different orders, or have other layers")
        plan = self._exchange.plan(sum(sizes))
        self._sums_s = sum(sizes) / plan.rate_bps
        shares = [float(tree.share) for tree in plan.section.trees]
        chunks, ends = slices(sizes, shares, item_bytes=item_bytes, slice_bytes=self._slice_bytes)
        self._tables = tables_of_chunks(plan.section, self._exchange.rank, chunks)
        at = 0
        starts = np.array([start for _, start, _ in chunks], dtype=np.int64)
        for layer, (first_chunk, stop_chunk) in zip(self._layers, ends, strict=True):
            layer.first, layer.stop = first_chunk, stop_chunk
            for parameter in layer.parameters:
                size = parameter.numel() * item_bytes
                first = int(np.searchsorted(starts, at, side="right")) - 1
                last = int(np.searchsorted(starts, at + size, side="left"))
                self._place[parameter] = (at // item_bytes, first, last)
                at += size
        # Two buffers alternate: the sums of a step are read while gradients of the next step are
        # written.
        self._buffers = [
            torch.zeros(at // item_bytes, dtype=self._dtype, pin_memory=self._staging is not None)
            for _ in range(2)
        ]
        self._begin()

    def _begin(self) -> None:
        """Prepare buffers for the gradients of a step."""
        self._last = self._run
        self._buffers.reverse()
        self._missing = np.zeros(self._tables.num_chunks, dtype=np.int64)
        for _, first, last in self._place.values():
            self._missing[first:last] += 1
        bits = self._buffers[0]
        if bits.dtype == torch.bfloat16:
            # NumPy has no bfloat16; the executor recognizes it as uint16.
            bits = bits.view(torch.uint16)
        self._run = self._exchange.begin(self._tables, bits.numpy())

    def _submit_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Copy a gradient into the buffer, and release the chunks that it completes for sending."""
        assert self._run is not None
        at, first, last = self._place[parameter]
        into = self._buffers[0][at : at + parameter.numel()]
        ready = partial(_count_down, self._run, self._missing, first, last)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if self._staging is None:
            if gradient is None:
                into.zero_()
            else:
                into.copy_(gradient.reshape(-1))
            ready()
        else:
            self._staging.fetch(into, gradient, ready)

    def _update(self, indices: Sequence[int]) -> None:
        """Wait for the sums of some layers, and step the optimizer for these layers only."""
        groups, self._is_stepping = self.optimizer.param_groups, True
        try:
            self._sums_as_gradients(indices)
            chosen = {p for index in indices for p in self._layers[index].parameters}
            self.optimizer.param_groups = [
                {**options, "params": [p for p in group["params"] if p in chosen]}
                for group, options in zip(groups, self._options, strict=True)
            ]
            self.optimizer.step()
        finally:
            self.optimizer.param_groups, self._is_stepping = groups, False
        for parameter in chosen:
            parameter.grad = None
        self._due.difference_update(indices)

    def _sums_as_gradients(self, indices: Sequence[int]) -> None:
        # In the forward pass the buffers have been swapped: the sums are in the previous one.
        is_last = bool(self._due) and self.crosses and self._last is not None
        run = self._last if is_last else self._run
        buffer = self._buffers[1 if is_last else 0]
        assert run is not None
        for index in indices:
            layer = self._layers[index]
            self._exchange.wait(run, layer.first, layer.stop)
            for parameter in layer.parameters:
                at = self._place[parameter][0]
                total = buffer[at : at + parameter.numel()].view(parameter.shape)
                total = total.to(parameter.device, parameter.dtype, non_blocking=True)
                parameter.grad = total / self._exchange.num_ranks

    def _decide(self) -> None:
        """Decide after a few steps whether communication is long enough to cross the end of a
        step."""
        self._num_steps += 1
        if self._num_steps == 1:
            # The first step compiles kernels and lays out buffers: it is not measured.
            self._since_s, self._waited_s = time.monotonic(), 0.0
        if self.crosses is None and self._num_steps == MEASURED_STEPS + 1:
            computed_s = time.monotonic() - self._since_s - self._waited_s
            sums_s = max(MEASURED_STEPS * self._sums_s, self._waited_s)
            worthwhile = sums_s > WORTHWHILE * computed_s
            self.crosses = self._exchange.agreed("crosses", str(worthwhile)) == "True"

    def close(self) -> None:
        """Bring all parameters up to date and release the links."""
        self.finish()
        if self._staging is not None:
            self._staging.close()
        self._exchange.close()


def _count_down(run: TreeRun, missing: LongArray, first: int, last: int) -> None:
    """Pass those chunks to the executor whose last missing gradient has just arrived."""
    missing[first:last] -= 1
    for chunk in range(first, last):
        if missing[chunk] == 0:
            run.ready(chunk)


def _wire_dtype(trained: Sequence[torch.nn.Parameter]) -> torch.dtype:
    """Return the gradients' common dtype if the executor can sum it, else float32."""
    found = {parameter.dtype for parameter in trained}
    return found.pop() if len(found) == 1 and found <= set(_ADDED) else torch.float32


def _staging_of(trained: Sequence[torch.nn.Parameter]) -> GpuStaging | None:
    devices = {parameter.device for parameter in trained}
    if len(devices) > 1:
        raise UsageError(
            "the parameters are on several devices, and priorities need them on one",
            hint="move the model to one device of this rank",
        )
    (device,) = devices or {torch.device("cpu")}
    return GpuStaging(device) if device.type == "cuda" else None


def _layers(
    model: torch.nn.Module, called: Sequence[torch.nn.Module]
) -> tuple[list[GradientLayer], dict[torch.nn.Module, list[int]]]:
    """Return the layers, and for each module the indices of the layers that it must wait for.

    A layer holds the parameters whose first user is the same module. If a module is never called
    itself (its parent uses its parameters), its nearest called ancestor counts as the user.
    """
    above = {child: module for module in model.modules() for child in module.children()}
    rank = {module: number for number, module in enumerate(called)}
    users: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
    for module in model.modules():
        user = module
        while user not in rank and user in above:
            user = above[user]
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                users.setdefault(parameter, []).append(user)
    layers: dict[torch.nn.Module, GradientLayer] = {}
    for parameter, modules in users.items():
        first = min(modules, key=lambda module: rank.get(module, len(rank)))
        layers.setdefault(first, GradientLayer()).parameters.append(parameter)
    ordered = sorted(layers, key=lambda module: rank.get(module, len(rank)))
    number = {module: index for index, module in enumerate(ordered)}
    waits: dict[torch.nn.Module, list[int]] = {}
    for modules in users.values():
        first = min(modules, key=lambda module: rank.get(module, len(rank)))
        for module in modules:
            if number[first] not in waits.setdefault(module, []):
                waits[module].append(number[first])
    return [layers[module] for module in ordered], waits


_number = count()
"""Counter for prefixes of the store; ranks call `wrap` in the same order, so numbers match."""


def wrap(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    crosses: bool | None = None,
    slice_bytes: int = SLICE_BYTES,
    dtype: torch.dtype | None = None,
) -> Propagation:
    """Send the gradients of a model by priority, between all ranks of the default group.

    With ``crosses`` True, each layer of the next forward pass waits only for its own sums; with
    False, the optimizer step waits for all sums; None chooses the faster one in the first steps.
    All ranks start from the parameters of rank 0. Gradients are summed in their own dtype, or in
    ``dtype``; gradients on a GPU are staged in host memory. To accumulate several backward passes
    into one update, run all but the last inside ``no_sync()`` of the returned object.
    """
    if not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised",
            hint='call torch.distributed.init_process_group("gloo") first',
        )
    if slice_bytes < 4:
        raise UsageError(f"slice_bytes is {slice_bytes}, a number takes 4")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if num_ranks < 2:
        raise UsageError("there is one rank only: nothing travels", hint="leave wrap out")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, 0)
    default_group: Any = dist.group.WORLD
    thread = default_group.thread if isinstance(default_group, PlannedGroup) else None
    known = thread.cluster if thread else None
    cluster = known or given_cluster(range(num_ranks), find_cluster)
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore(f"hocket priority {next(_number)}", c10d._get_default_store())
    exchange = TreeThread(store, rank, num_ranks, lambda: cluster)
    exchange.open()
    return Propagation(
        model, optimizer, exchange, crosses=crosses, slice_bytes=slice_bytes, dtype=dtype
    )
