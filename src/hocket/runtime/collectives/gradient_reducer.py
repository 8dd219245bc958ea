"""The gradient reducer of data parallelism: buckets that are summed while the backward pass runs.

As in DistributedDataParallel, gradients are copied into flat buckets when they are final on this
rank, and a bucket is summed asynchronously as soon as it is full. Gradients come from autograd by
post-accumulate hooks (`watch_autograd`), or from a traced step right after the op that computes
them (`take`). Buckets contain parameters in the order in which their gradients became ready on the
first rank in the first step. Every rank issues buckets in that order, so a rank that skips a
parameter issues the same collectives as the others. Losses are weighted beforehand, so gradients
are summed and not averaged.

A gradient becomes a view of its bucket, so there is only one copy of all gradients. A bucket ends
with one flag per parameter; a flag whose sum is zero marks a parameter that no rank has used, and
whose gradient stays None. O(parameters) per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.base.errors import UsageError
from hocket.plan.gradient_buckets import fill_buckets

Partners = tuple[Any, Sequence[nn.Parameter]]
"""A process group, and the parameters whose gradients its ranks sum."""


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are summed in one collective."""

    group: int
    root: int | None
    """Global rank to which the bucket is reduced (ZeRO 1 and 2); None for an all-reduce."""
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    views: list[torch.Tensor]
    flags: torch.Tensor
    is_late: bool
    """True if the parameters had no gradient in the step that fixed the order.

    A late bucket is summed only in steps in which some rank has a gradient for it.
    """
    taken: set[int] = field(default_factory=set)
    """Positions of the parameters whose gradients are in the bucket."""
    unused: set[int] = field(default_factory=set)
    """Positions of the parameters without a gradient on this rank."""
    work: Any = None

    @property
    def is_full(self) -> bool:
        return len(self.taken) == len(self.parameters)


class GradientReducer:
    """Sums gradients over the replicas of a model, concurrently with the backward pass."""

    def __init__(
        self,
        partners: Sequence[Partners],
        *,
        root_of: Callable[[nn.Parameter], int | None] = lambda parameter: None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        overlaps: bool = True,
    ) -> None:
        """All ranks of a group must construct it together, with the same parameters.

        ``root_of`` returns the global rank to which a gradient is reduced, or None for an
        all-reduce. ``dtype`` and ``device`` of the sums default to those of each gradient. Without
        ``overlaps`` all collectives are issued by `finish`.
        """
        self._partners, self._root_of = tuple(partners), root_of
        self._dtype, self._device, self.overlaps = dtype, device, overlaps
        self.is_enabled = False
        """True during the last microbatch of an update, whose gradients are final."""
        self._queues: list[list[_Bucket]] = []
        """Buckets of each group, in the order in which they are issued."""
        self._issued: list[int] = []
        self._place: dict[nn.Parameter, tuple[_Bucket, int]] = {}
        self._trained: tuple[bool, ...] = ()
        self._order: list[nn.Parameter] = []
        """Parameters in the order in which their gradients became final in this step."""
        self._is_settled = False
        """True once the buckets are in the order of an observed backward pass."""
        self._hooks: list[Any] = []

    # ── what a step does ──

    def begin(self) -> None:
        """Start an update: make new buckets if the set of trained parameters has changed."""
        trained = tuple(p.requires_grad for _, owned in self._partners for p in owned)
        if trained != self._trained:
            self._trained, self._is_settled = trained, False
            self._place.clear()
            self._queues = [
                # Reversed, because the backward pass computes gradients of the last layers first.
                self._make_buckets(group, [p for p in reversed(owned) if p.requires_grad], [])
                for group, (_, owned) in enumerate(self._partners)
            ]
        for queue in self._queues:
            for bucket in queue:
                bucket.taken.clear()
                bucket.unused.clear()
                bucket.work = None
        self._issued, self._order = [0] * len(self._queues), []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable sums inside the context, like `DistributedDataParallel.no_sync`."""
        before, self.is_enabled = self.is_enabled, False
        try:
            yield
        finally:
            self.is_enabled = before

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, addend: torch.Tensor | None = None) -> torch.Tensor:
        """Copy a gradient that is final on this rank into its bucket, and return its view there.

        The gradient is ``parameter.grad``, to which ``addend`` is added first.
        """
        bucket, position = self._place[parameter]
        if position in bucket.taken:
            raise UsageError(
                "a gradient came twice in one step, after its sum over the ranks had begun",
                hint="call backward() once per train(batch)",
            )
        self._fill(bucket, position, addend)
        self._order.append(parameter)
        if self.overlaps:
            self._issue_full(bucket.group)
        found = parameter.grad
        assert found is not None
        return found

    def finish(self) -> None:
        """Issue the remaining buckets and wait: every gradient is then the sum over the ranks."""
        for queue in self._queues:
            for bucket in queue:
                for position in range(len(bucket.parameters)):
                    if position not in bucket.taken:
                        self._fill(bucket, position, None)
        for group in range(len(self._queues)):
            self._issue_full(group)
            if self._is_late_needed(group):
                self._issue_full(group, with_late=True)
        for queue in self._queues:
            for bucket in queue:
                self._take_sums(bucket)
        if not self._is_settled:
            self._is_settled = True
            self._queues = [self._reordered(group) for group in range(len(self._queues))]

    def watch_autograd(self) -> None:
        """Take gradients as autograd accumulates them."""
        for _, owned in self._partners:
            for parameter in owned:
                # Autograd refuses hooks of frozen parameters. If such a parameter is trained later,
                # `finish` sums its gradient.
                if parameter.requires_grad:
                    hooked: Any = parameter
                    self._hooks.append(hooked.register_post_accumulate_grad_hook(self._hooked))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hooked(self, parameter: nn.Parameter) -> None:
        if self.is_enabled and parameter in self._place:
            self.take(parameter)

    # ── buckets ──

    @torch.no_grad()
    def _fill(self, bucket: _Bucket, position: int, addend: torch.Tensor | None) -> None:
        parameter, view = bucket.parameters[position], bucket.views[position]
        bucket.taken.add(position)
        total = parameter.grad
        if total is None:
            total = addend
        elif addend is not None:
            total = total.add_(addend)
        if total is None:
            view.zero_()
            bucket.unused.add(position)
            return
        if total.layout != torch.strided:
            total = total.to_dense()
        # After zero_grad(set_to_none=False) autograd adds to the view itself.
        if total.data_ptr() != view.data_ptr() or total.dtype != view.dtype:
            view.copy_(total)
        if view.device != parameter.device:
            parameter.grad = None  # held in the bucket alone: a memory budget counts on that
        else:
            parameter.grad = view if view.dtype == parameter.dtype else total

    def _issue_full(self, group: int, *, with_late: bool = False) -> None:
        """Issue full buckets in order, up to the first one that is not full."""
        queue = self._queues[group]
        while self._issued[group] < len(queue):
            bucket = queue[self._issued[group]]
            if not bucket.is_full or (bucket.is_late and not with_late):
                return
            self._issued[group] += 1
            # All flags at once, because each write to a GPU tensor is a kernel launch.
            bucket.flags.fill_(1.0)
            for position in bucket.unused:
                bucket.flags[position] = 0.0
            process_group, _ = self._partners[group]
            if bucket.root is None:
                bucket.work = dist.all_reduce(bucket.flat, group=process_group, async_op=True)
            else:
                bucket.work = dist.reduce(
                    bucket.flat, bucket.root, group=process_group, async_op=True
                )

    def _is_late_needed(self, group: int) -> bool:
        """True if any rank has a gradient for a parameter that had none when buckets were made."""
        late = [bucket for bucket in self._queues[group] if bucket.is_late]
        if not late:
            return False
        came = any(len(bucket.unused) < len(bucket.parameters) for bucket in late)
        # Ranks must agree before any of them issues late buckets: collectives have to match.
        flag = torch.full((1,), float(came), device=late[0].flat.device)
        dist.all_reduce(flag, group=self._partners[group][0])
        found = bool(flag.item())
        if found:
            self._is_settled = False
        return found

    def _take_sums(self, bucket: _Bucket) -> None:
        """Wait for a bucket and set its parameters' gradients; None if no rank had a gradient."""
        if bucket.work is None:
            return
        bucket.work.wait()
        bucket.work = None
        if bucket.root is not None and bucket.root != dist.get_rank():
            for parameter in bucket.parameters:
                parameter.grad = None
            return
        # `tolist` waits for the GPU, so flags are read only if a gradient is missing here.
        came = bucket.flags.tolist() if bucket.unused else ()
        for position, (parameter, view) in enumerate(
            zip(bucket.parameters, bucket.views, strict=True)
        ):
            if position in bucket.unused and not came[position]:
                parameter.grad = None
            else:
                # `to` returns the view itself if device and dtype are the parameter's.
                parameter.grad = view.to(parameter.device, parameter.dtype)

    def _reordered(self, group: int) -> list[_Bucket]:
        """Return the buckets of a group in the order in which gradients became ready on its first
        rank."""
        process_group, owned = self._partners[group]
        number = {parameter: at for at, parameter in enumerate(owned)}
        came = [number[p] for p in self._order if p in number]
        device = self._device or (owned[0].device if owned else torch.device("cpu"))
        # Padded, because a broadcast needs the same length on all ranks.
        order = torch.tensor(came + [-1] * (len(owned) - len(came)), device=device)
        dist.broadcast(order, group=process_group, group_src=0)
        first = [owned[at] for at in order.tolist() if at >= 0]
        seen = set(first)
        late = [p for p in reversed(owned) if p.requires_grad and p not in seen]
        # Without overlap no order was recorded, and the order does not matter.
        return self._make_buckets(group, *((first, late) if first else (late, [])))

    def _make_buckets(
        self, group: int, first: Sequence[nn.Parameter], late: Sequence[nn.Parameter]
    ) -> list[_Bucket]:
        buckets = []
        for parameters in (first, late):
            keys = [
                (self._root_of(p), self._dtype or p.dtype, self._device or p.device)
                for p in parameters
            ]
            sizes = [p.numel() * key[1].itemsize for p, key in zip(parameters, keys, strict=True)]
            for members in fill_buckets(zip(keys, sizes, strict=True)):
                root, dtype, device = keys[members[0]]
                members_of = [parameters[at] for at in members]
                is_late = parameters is late
                buckets.append(_bucket(group, root, members_of, dtype, device, is_late=is_late))
        for bucket in buckets:
            for position, parameter in enumerate(bucket.parameters):
                self._place[parameter] = bucket, position
        return buckets


def _bucket(
    group: int,
    root: int | None,
    parameters: list[nn.Parameter],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_late: bool,
) -> _Bucket:
    num_elements = sum(p.numel() for p in parameters)
    flat = torch.zeros(num_elements + len(parameters), dtype=dtype, device=device)
    views, start = [], 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        # Optimizers use their fast kernels only if gradient and parameter have equal strides.
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        views.append(
            part.as_strided(parameter.shape, parameter.stride())
            if is_dense
            else part.view(parameter.shape)
        )
        start += parameter.numel()
    return _Bucket(group, root, parameters, flat, views, flat[num_elements:], is_late)
