"""Parameters of experts that are fetched in groups, so that they are never whole on the device.

The matrices of all experts are one parameter with a master copy on the host. While a block
computes, a lazy tensor takes the parameter's place. Transposes and casts are applied to it; a
batched product fetches one group of experts after the other into a ring of staging buffers, while
the last one is multiplied. Every expert's numbers come from the same kernels as in one batch. Every
other function gets the whole parameter.

In the backward pass the groups are fetched again, the last one first, and the gradient of each goes
to the host at once. Rows that are sorted by expert (``grouped_mm``) are rotated so that those of a
group come first: shapes never depend on the data, and the host waits for no counts of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from hocket.runtime.autocast import autocast_dtype
from hocket.runtime.offload.copy_streams import CopyEvent, CopyStreams
from hocket.runtime.offload.lazy_tensor import LazyTensor
from hocket.runtime.offload.parameter_blocks import Block, ParameterView
from hocket.simulate.rewriting.host_parameters import NUM_TURNS

CopyGradient = Callable[[Block, nn.Parameter, slice, torch.Tensor], None]
"""Copies the gradient of some experts to the host."""


class GroupRing:
    """Staging buffers of the device that groups take turns in."""

    def __init__(self, streams: CopyStreams, num_bytes: int) -> None:
        self._streams, self._next = streams, 0
        self.buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, device=streams.device)
            for _ in range(NUM_TURNS if num_bytes else 0)
        ]
        # Computation may still use memory that it has freed.
        self._last_use: list[CopyEvent] = [streams.record_event()] * len(self.buffers)

    def fetch(self, sources: Sequence[torch.Tensor], after: CopyEvent) -> Iterator[torch.Tensor]:
        """Fetch parts of host memory one after the other; each is valid until the next one is
        requested, which is fetched meanwhile."""
        coming = self._fetch(sources[0], after)
        for number, source in enumerate(sources):
            index, event = coming
            if number + 1 < len(sources):
                coming = self._fetch(sources[number + 1], after)
            event.wait()
            yield self.buffers[index][: source.numel()]
            self._last_use[index] = self._streams.record_event()

    def _fetch(self, source: torch.Tensor, after: CopyEvent) -> tuple[int, CopyEvent]:
        index = self._next
        self._next = (index + 1) % len(self.buffers)
        pairs = [(self.buffers[index][: source.numel()], source)]
        return index, self._streams.fetch(pairs, self._last_use[index], after)


@dataclass(frozen=True, eq=False)
class GroupedParameter:
    """A parameter whose first dimension is that of experts."""

    block: Block
    place: ParameterView
    """Its view of the block's upload buffer."""
    num_groups: int
    ring: GroupRing
    copy_gradient: CopyGradient

    @property
    def parameter(self) -> nn.Parameter:
        """The user's parameter."""
        return self.place.parameter

    @property
    def groups(self) -> list[slice]:
        """Slices of the experts of each group."""
        count, size = self.place.shape[0], _group_size(self.place, self.num_groups)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def offload(self, group: slice, gradient: torch.Tensor) -> None:
        """Copy the gradient of a group to the host."""
        self.copy_gradient(self.block, self.parameter, group, gradient)

    def fetch(self, groups: Sequence[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Fetch matrices of groups; each is valid until the next one is requested."""
        assert self.block.upload is not None
        each = self.place.num_bytes // self.place.shape[0]
        start, upload = self.place.start, self.block.upload
        sources = [upload[start + g.start * each : start + g.stop * each] for g in groups]
        here = self.ring.fetch(sources, self.block.written_back)
        for group, buffer in zip(groups, here, strict=True):
            shape = (group.stop - group.start, *self.place.shape[1:])
            yield group, buffer.view(self.place.dtype).view(shape)


def sources_of(
    block: Block, ring: GroupRing, copy_gradient: CopyGradient
) -> dict[nn.Parameter, GroupedParameter]:
    """Return the parameters of a block that are fetched in groups."""
    return {
        place.parameter: GroupedParameter(
            block, place, block.expert_groups[place.parameter], ring, copy_gradient
        )
        for place in block.upload_layout.places
        if place.parameter in block.expert_groups
    }


def ring_of(blocks: Sequence[Block], streams: CopyStreams) -> GroupRing:
    """Make staging buffers for the largest group of all blocks."""
    sizes = [
        group_bytes(place, block.expert_groups[place.parameter])
        for block in blocks
        for place in block.upload_layout.places
        if place.parameter in block.expert_groups
    ]
    return GroupRing(streams, max(sizes, default=0))


def group_bytes(place: ParameterView, num_groups: int) -> int:
    """Return the bytes of the largest group."""
    return place.num_bytes // place.shape[0] * _group_size(place, num_groups)


def _group_size(place: ParameterView, num_groups: int) -> int:
    return -(-place.shape[0] // num_groups)


def can_be_grouped(parameter: nn.Parameter) -> bool:
    """True if the matrices of experts are contiguous, one after the other."""
    return parameter.dim() == 3 and parameter.is_contiguous()


# before the product (turning it, rounding it) is done to the stand-in; a batched product of it
# goes through groups of experts, each of which is copied to the device, multiplied, and released
# for the next one but one (`expert_products`). Every expert's numbers come from the same kernels
# as in one batch. Anything else that is done to the parameter brings all of it, so that it gets
# what it expects.


class BatchedProduct(torch.autograd.Function):
    """Batched product of each expert's rows with its matrix."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, parameter: nn.Parameter, source: GroupedParameter,
        is_transposed: bool, dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the products."""
        ctx.save_for_backward(rows)
        ctx.how = source, is_transposed, dtype
        width = source.place.shape[1 if is_transposed else 2]
        made = rows.new_empty((*rows.shape[:2], width))
        for group, matrices in source.fetch(source.groups):
            torch.bmm(rows[group], _as_used(matrices, is_transposed, dtype), out=made[group])
        return made

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        """Compute gradients of the rows; those of the matrices go to the host."""
        (rows,) = ctx.saved_tensors
        source, is_transposed, dtype = ctx.how
        wants_rows, wants_matrices = ctx.needs_input_grad[:2]
        of_rows = torch.empty_like(rows) if wants_rows else None
        groups = source.groups[::-1]
        # Matrices are needed for the gradient of the rows alone.
        fetched = source.fetch(groups) if wants_rows else None
        for group in groups:
            if fetched is not None and of_rows is not None:
                used = _as_used(next(fetched)[1], is_transposed, dtype)
                torch.bmm(given[group], used.transpose(1, 2), out=of_rows[group])
            if wants_matrices:
                found = torch.bmm(rows[group].transpose(1, 2), given[group])
                source.offload(group, found.transpose(1, 2) if is_transposed else found)
                del found
        return of_rows, None, None, None, None


class AllExperts(torch.autograd.Function):
    """Fetches all matrices."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, source: GroupedParameter) -> torch.Tensor:
        """Return the whole parameter on the device."""
        ctx.source = source
        shape, device = source.place.shape, source.ring.buffers[0].device
        made = torch.empty(shape, dtype=source.place.dtype, device=device)
        for group, matrices in source.fetch(source.groups):
            made[group].copy_(matrices)
        return made

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        """Copy gradients to the host."""
        for group in ctx.source.groups:
            ctx.source.offload(group, given[group])
        return None, None


def _as_used(matrices: torch.Tensor, is_transposed: bool, dtype: torch.dtype) -> torch.Tensor:
    used = matrices.to(dtype)
    return used.transpose(1, 2) if is_transposed else used


# ── rows that are sorted by expert ───────────────────────────────────────────────────────────────


class _Rotation(NamedTuple):
    """Rotation of sorted rows that puts those of a group first."""

    order: torch.Tensor
    """Source row of each position."""
    back: torch.Tensor
    """Position of each source row."""
    is_own: torch.Tensor
    """True for rows of the group, as a column."""
    offsets: torch.Tensor
    """End of the rows of each expert of the group."""


def _rotation(offsets: torch.Tensor, group: slice, num_rows: int) -> _Rotation:
    places = torch.arange(num_rows, device=offsets.device)
    start = offsets[group.start - 1] if group.start else torch.zeros_like(offsets[0])
    own = (places >= start) & (places < offsets[group.stop - 1])
    return _Rotation(
        (places + start) % num_rows, (places - start) % num_rows, own[:, None],
        offsets[group] - start,
    )  # fmt: skip


class SortedProduct(torch.autograd.Function):
    """Product of rows that are sorted by expert, each with its expert's matrix (``grouped_mm``)."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, offsets: torch.Tensor, parameter: nn.Parameter,
        source: GroupedParameter, is_transposed: bool, dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Compute the products."""
        ctx.save_for_backward(rows, offsets)
        ctx.how = source, is_transposed, dtype
        made = rows.new_zeros((len(rows), source.place.shape[1 if is_transposed else 2]))
        for group, matrices in source.fetch(source.groups):
            rotation = _rotation(offsets, group, len(rows))
            used = _as_used(matrices, is_transposed, dtype)
            part = functional.grouped_mm(rows[rotation.order], used, offs=rotation.offsets)
            torch.where(rotation.is_own, part[rotation.back], made, out=made)
        return made

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        """Compute gradients of the rows; those of the matrices go to the host."""
        rows, offsets = ctx.saved_tensors
        source, is_transposed, dtype = ctx.how
        wants_rows, wants_matrices = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        of_rows = torch.zeros_like(rows) if wants_rows else None
        groups = source.groups[::-1]
        fetched = source.fetch(groups) if wants_rows else None
        for group in groups:
            rotation = _rotation(offsets, group, len(rows))
            there = given[rotation.order]
            if fetched is not None and of_rows is not None:
                used = _as_used(next(fetched)[1], is_transposed, dtype).transpose(1, 2)
                part = functional.grouped_mm(there, used, offs=rotation.offsets)
                torch.where(rotation.is_own, part[rotation.back], of_rows, out=of_rows)
                del part
            if wants_matrices:
                sides = (
                    (there, rows[rotation.order])
                    if is_transposed
                    else (rows[rotation.order], there)
                )
                found = functional.grouped_mm(sides[0].t(), sides[1], offs=rotation.offsets)
                source.offload(group, found)
                del found, sides
        return of_rows, None, None, None, None, None


class LazyExperts(LazyTensor):
    """A parameter of experts while its block computes."""

    source: GroupedParameter
    is_transposed: bool
    """True if the matrices are transposed."""

    @staticmethod
    def __new__(  # noqa: D102
        cls: Any, source: GroupedParameter, *, is_transposed: bool, dtype: torch.dtype
    ) -> LazyExperts:
        count, *sides = source.place.shape
        shape = (count, *(reversed(sides) if is_transposed else sides))
        device = source.ring.buffers[0].device
        made: LazyExperts = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        made.source, made.is_transposed = source, is_transposed
        return made

    def transposed(self) -> LazyExperts:
        """Return the transposed matrices."""
        return LazyExperts(self.source, is_transposed=not self.is_transposed, dtype=self.dtype)

    def cast(self, dtype: torch.dtype) -> LazyExperts:
        """Return the matrices in another type."""
        return LazyExperts(self.source, is_transposed=self.is_transposed, dtype=dtype)

    def materialize(self) -> torch.Tensor:
        """Fetch the whole parameter."""
        made: torch.Tensor = AllExperts.apply(self.source.parameter, self.source)  # type: ignore[no-untyped-call]
        made = made.to(self.dtype)
        return made.transpose(1, 2) if self.is_transposed else made

    @classmethod
    def apply_rule(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply products in groups, and transposes and casts before them."""
        return _RULES[func](*args, **kwargs) if func in _RULES else NotImplemented


class InGroups(TorchFunctionMode):
    """Replaces parameters by lazy tensors in all functions."""

    def __init__(self, sources: Mapping[nn.Parameter, GroupedParameter]) -> None:
        super().__init__()
        self._sources = {id(parameter): source for parameter, source in sources.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function with lazy tensors in place of such parameters."""
        given = (args, dict(kwargs or {}))
        if any(id(leaf) in self._sources for leaf in tree_leaves(given)):
            given = tree_map(self._lazy, given)
        return func(*given[0], **given[1])

    def _lazy(self, leaf: Any) -> Any:
        source = self._sources.get(id(leaf))
        return (
            leaf if source is None else LazyExperts(source, is_transposed=False, dtype=leaf.dtype)
        )


def called_in_groups(
    sources: Mapping[nn.Parameter, GroupedParameter], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a function so that such parameters are lazy tensors in it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with InGroups(sources):
            return function(*args, **kwargs)

    return called


# ── products ─────────────────────────────────────────────────────────────────────────────────────


def _product(left: Any, right: Any) -> Any:
    """Multiply in groups if one side is a lazy tensor; `NotImplemented` for others."""
    if isinstance(right, LazyExperts):
        rows, experts, is_left = left, right, False
    else:
        # (W x)' = x' W'
        rows, experts, is_left = right.transpose(1, 2) if right.dim() == 3 else right, left, True
    if isinstance(rows, LazyExperts) or rows.dim() != 3 or rows.shape[0] != experts.shape[0]:
        return NotImplemented
    experts = experts.transposed() if is_left else experts
    kind, source = rows.device.type, experts.source
    dtype = autocast_dtype(kind) or experts.dtype
    with torch.autocast(kind, enabled=False):
        made: torch.Tensor = BatchedProduct.apply(  # type: ignore[no-untyped-call]
            rows.to(dtype), source.parameter, source, experts.is_transposed, dtype
        )
    return made.transpose(1, 2) if is_left else made


def _sorted_product(
    rows: Any, experts: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Compute ``grouped_mm`` of rows that are sorted by expert."""
    is_supported = isinstance(experts, LazyExperts) and not isinstance(rows, LazyExperts)
    if (
        not is_supported
        or rows.dim() != 2
        or offs is None
        or bias is not None
        or out_dtype is not None
    ):
        return NotImplemented
    source = experts.source
    return SortedProduct.apply(  # type: ignore[no-untyped-call]
        rows, offs, source.parameter, source, experts.is_transposed, experts.dtype
    )


def _transpose(experts: Any, *dims: Any) -> Any:
    if not isinstance(experts, LazyExperts) or len(dims) != 2:
        return NotImplemented
    return experts.transposed() if {dim % 3 for dim in dims} == {1, 2} else NotImplemented


def _permuted(experts: Any, *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 else dims
    if not isinstance(experts, LazyExperts) or len(order) != 3:
        return NotImplemented
    return experts.transposed() if tuple(d % 3 for d in order) == (0, 2, 1) else NotImplemented


def _cast(experts: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        return experts.cast(args[0])
    return NotImplemented


def _einsum(equation: Any, *operands: Any) -> Any:
    """Compute an ``einsum`` that is a batched product: experts in all terms, one sum."""
    terms = str(equation).replace(" ", "").replace("->", ",").split(",")
    is_supported = len(terms) == 3 and len(operands) == 2 and "->" in str(equation)
    if not is_supported or any(len(set(term)) != len(term) or "." in term for term in terms):
        return NotImplemented
    if isinstance(operands[0], LazyExperts):
        (of_experts, of_rows, result), (experts, rows) = terms, operands
    else:
        (of_rows, of_experts, result), (rows, experts) = terms, operands
    if isinstance(rows, LazyExperts):
        return NotImplemented
    expert, sides = of_experts[0], list(of_experts[1:])
    summed = [side for side in sides if side in of_rows and side not in result]
    kept = [side for side in sides if side in result and side not in of_rows]
    free = [letter for letter in of_rows if letter not in (expert, *summed)]
    is_product = len(summed) == len(kept) == 1 and expert in of_rows and expert in result
    if not is_product or set(result) != {expert, *free, *kept}:
        return NotImplemented
    order = [of_rows.index(letter) for letter in (expert, *free, *summed)]
    laid = rows.permute(order)
    used = experts if sides == [*summed, *kept] else experts.transposed()
    made = _product(laid.flatten(1, -2) if free else laid.unsqueeze(1), used)
    made = made.view(*laid.shape[:-1], made.shape[-1])
    letters = [expert, *free, *kept]
    return made.permute([letters.index(letter) for letter in result])


_RULES: Mapping[Any, Callable[..., Any]] = {
    torch.bmm: _product,
    torch.Tensor.bmm: _product,
    torch.matmul: _product,
    torch.Tensor.matmul: _product,
    torch.Tensor.__matmul__: _product,
    torch.einsum: _einsum,
    functional.grouped_mm: _sorted_product,
    torch._grouped_mm: _sorted_product,
    torch.transpose: _transpose,
    torch.Tensor.transpose: _transpose,
    torch.permute: _permuted,
    torch.Tensor.permute: _permuted,
    torch.Tensor.mT.__get__: lambda experts: experts.transposed(),  # type: ignore[attr-defined]
    torch.Tensor.to: _cast,
    torch.Tensor.float: lambda experts: experts.cast(torch.float32),
    torch.Tensor.bfloat16: lambda experts: experts.cast(torch.bfloat16),
    torch.Tensor.half: lambda experts: experts.cast(torch.float16),
}
