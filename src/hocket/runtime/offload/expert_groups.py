"""Parameters of experts that are never whole on the device: their products, group by group.

The matrices of all experts are one parameter, which is at home on the host and multiplied as a
batch. While a block computes, a stand-in takes the parameter's place: what people do to it before
the product (turning it, rounding it) is done to the stand-in; a batched product of it goes through
groups of experts, each of which is copied to the device, multiplied, and makes room for the next
one but one (`expert_products`). Every expert's numbers come from the same kernels as in one batch.
Anything else that is done to the parameter brings all of it, so that it gets what it expects.
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
from hocket.runtime.offload.copy_streams import CopyEngines, Ticket
from hocket.runtime.offload.lazy_tensor import StandInTensor
from hocket.runtime.offload.parameter_blocks import Block, Place
from hocket.simulate.rewriting.homes import NUM_TURNS

# Groups of experts on their way: parameters whose first dimension is that of experts come from the
# host a few matrices at a time, and take turns in a ring of the device.

Deliver = Callable[[Block, nn.Parameter, slice, torch.Tensor], None]
"""Sends the gradient of some experts to the host."""


class GroupRing:
    """Room on the device that groups take turns in."""

    def __init__(self, engines: CopyEngines, num_bytes: int) -> None:
        self._engines, self._turn = engines, 0
        self.buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, device=engines.device)
            for _ in range(NUM_TURNS if num_bytes else 0)
        ]
        # The computation may still be at work in memory that it has given back.
        self._left: list[Ticket] = [engines.mark()] * len(self.buffers)

    def bring(self, sources: Sequence[torch.Tensor], after: Ticket) -> Iterator[torch.Tensor]:
        """Bytes of the host one after the other; each is there until the next one is asked for,
        which comes meanwhile."""
        coming = self._fetch(sources[0], after)
        for number, source in enumerate(sources):
            turn, ticket = coming
            if number + 1 < len(sources):
                coming = self._fetch(sources[number + 1], after)
            ticket.wait()
            yield self.buffers[turn][: source.numel()]
            self._left[turn] = self._engines.mark()

    def _fetch(self, source: torch.Tensor, after: Ticket) -> tuple[int, Ticket]:
        turn = self._turn
        self._turn = (turn + 1) % len(self.buffers)
        pairs = [(self.buffers[turn][: source.numel()], source)]
        return turn, self._engines.fetch(pairs, self._left[turn], after)


@dataclass(frozen=True, eq=False)
class GroupedParameter:
    """A parameter whose first dimension is that of experts, and how its groups come and go."""

    block: Block
    place: Place
    """Where it lies in what is copied of the block."""
    num_groups: int
    ring: GroupRing
    deliver: Deliver

    @property
    def parameter(self) -> nn.Parameter:
        """The person's own."""
        return self.place.parameter

    @property
    def groups(self) -> list[slice]:
        """The experts of each group."""
        count, size = self.place.shape[0], _group_size(self.place, self.num_groups)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def send(self, group: slice, gradient: torch.Tensor) -> None:
        """The gradient of a group, home."""
        self.deliver(self.block, self.parameter, group, gradient)

    def bring(self, groups: Sequence[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Matrices of groups on the device, each until the next one is asked for."""
        assert self.block.copied is not None
        each = self.place.num_bytes // self.place.shape[0]
        start, home = self.place.start, self.block.copied
        sources = [home[start + g.start * each : start + g.stop * each] for g in groups]
        here = self.ring.bring(sources, self.block.returned)
        for group, buffer in zip(groups, here, strict=True):
            shape = (group.stop - group.start, *self.place.shape[1:])
            yield group, buffer.view(self.place.dtype).view(shape)


def sources_of(
    block: Block, ring: GroupRing, deliver: Deliver
) -> dict[nn.Parameter, GroupedParameter]:
    """The parameters of a block that come in groups."""
    return {
        place.parameter: GroupedParameter(
            block, place, block.grouped[place.parameter], ring, deliver
        )
        for place in block.copied_layout.places
        if place.parameter in block.grouped
    }


def ring_of(blocks: Sequence[Block], engines: CopyEngines) -> GroupRing:
    """Room for the largest group of all blocks."""
    sizes = [
        group_bytes(place, block.grouped[place.parameter])
        for block in blocks
        for place in block.copied_layout.places
        if place.parameter in block.grouped
    ]
    return GroupRing(engines, max(sizes, default=0))


def group_bytes(place: Place, num_groups: int) -> int:
    """What the largest group takes."""
    return place.num_bytes // place.shape[0] * _group_size(place, num_groups)


def _group_size(place: Place, num_groups: int) -> int:
    return -(-place.shape[0] // num_groups)


def can_be_grouped(parameter: nn.Parameter) -> bool:
    """True if experts lie one behind the other, matrix by matrix."""
    return parameter.dim() == 3 and parameter.is_contiguous()


# Parameters of experts that are never whole on the device: their products, group by group.
#
# The matrices of all experts are one parameter, which is at home on the host and multiplied as a
# batch. While a block computes, a stand-in takes the parameter's place: what people do to it
# before the product (turning it, rounding it) is done to the stand-in; a batched product of it
# goes through groups of experts, each of which is copied to the device, multiplied, and makes room
# for the next one but one (`expert_products`). Every expert's numbers come from the same kernels
# as in one batch. Anything else that is done to the parameter brings all of it, so that it gets
# what it expects.


# Products with the matrices of experts, group by group, and their gradients.
#
# In the backward pass the groups come again, the last one first, and the gradient of each goes to
# the host as soon as it is there. Rows of a batched product belong to an expert by their place;
# rows that are sorted by expert, of which each has as many as chose it, are turned so that those of
# a group come first: so shapes never depend on the data, and nobody waits for the numbers of rows.


class BatchedProduct(torch.autograd.Function):
    """Rows of each expert with its matrix."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, parameter: nn.Parameter, source: GroupedParameter,
        is_turned: bool, dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """The products."""
        ctx.save_for_backward(rows)
        ctx.how = source, is_turned, dtype
        width = source.place.shape[1 if is_turned else 2]
        made = rows.new_empty((*rows.shape[:2], width))
        for group, matrices in source.bring(source.groups):
            torch.bmm(rows[group], _as_used(matrices, is_turned, dtype), out=made[group])
        return made

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        """Of the rows; gradients of the matrices go to the host."""
        (rows,) = ctx.saved_tensors
        source, is_turned, dtype = ctx.how
        wants_rows, wants_matrices = ctx.needs_input_grad[:2]
        of_rows = torch.empty_like(rows) if wants_rows else None
        groups = source.groups[::-1]
        # Nobody asks for the matrices where nobody asks for the gradient of the rows.
        brought = source.bring(groups) if wants_rows else None
        for group in groups:
            if brought is not None and of_rows is not None:
                used = _as_used(next(brought)[1], is_turned, dtype)
                torch.bmm(given[group], used.transpose(1, 2), out=of_rows[group])
            if wants_matrices:
                found = torch.bmm(rows[group].transpose(1, 2), given[group])
                source.send(group, found.transpose(1, 2) if is_turned else found)
                del found
        return of_rows, None, None, None, None


class WholeExperts(torch.autograd.Function):
    """All matrices on the device."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, source: GroupedParameter) -> torch.Tensor:
        """The parameter itself."""
        ctx.source = source
        shape, device = source.place.shape, source.ring.buffers[0].device
        made = torch.empty(shape, dtype=source.place.dtype, device=device)
        for group, matrices in source.bring(source.groups):
            made[group].copy_(matrices)
        return made

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        """Gradients go to the host."""
        for group in ctx.source.groups:
            ctx.source.send(group, given[group])
        return None, None


def _as_used(matrices: torch.Tensor, is_turned: bool, dtype: torch.dtype) -> torch.Tensor:
    used = matrices.to(dtype)
    return used.transpose(1, 2) if is_turned else used


# ── rows that are sorted by expert ───────────────────────────────────────────────────────────────


class _Turn(NamedTuple):
    """Sorted rows, turned so that those of a group come first."""

    order: torch.Tensor
    """The row that comes to each place."""
    back: torch.Tensor
    """The place that each row has come to."""
    is_own: torch.Tensor
    """Whether a row is one of the group, as a column."""
    offsets: torch.Tensor
    """Where the rows of each expert of the group end."""


def _turn(offsets: torch.Tensor, group: slice, num_rows: int) -> _Turn:
    places = torch.arange(num_rows, device=offsets.device)
    start = offsets[group.start - 1] if group.start else torch.zeros_like(offsets[0])
    own = (places >= start) & (places < offsets[group.stop - 1])
    return _Turn(
        (places + start) % num_rows, (places - start) % num_rows, own[:, None],
        offsets[group] - start,
    )  # fmt: skip


class SortedProduct(torch.autograd.Function):
    """Rows that are sorted by expert, each with the matrix of its expert (``grouped_mm``)."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, offsets: torch.Tensor, parameter: nn.Parameter,
        source: GroupedParameter, is_turned: bool, dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """The products."""
        ctx.save_for_backward(rows, offsets)
        ctx.how = source, is_turned, dtype
        made = rows.new_zeros((len(rows), source.place.shape[1 if is_turned else 2]))
        for group, matrices in source.bring(source.groups):
            turn = _turn(offsets, group, len(rows))
            used = _as_used(matrices, is_turned, dtype)
            part = functional.grouped_mm(rows[turn.order], used, offs=turn.offsets)
            torch.where(turn.is_own, part[turn.back], made, out=made)
        return made

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        """Of the rows; gradients of the matrices go to the host."""
        rows, offsets = ctx.saved_tensors
        source, is_turned, dtype = ctx.how
        wants_rows, wants_matrices = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        of_rows = torch.zeros_like(rows) if wants_rows else None
        groups = source.groups[::-1]
        brought = source.bring(groups) if wants_rows else None
        for group in groups:
            turn = _turn(offsets, group, len(rows))
            there = given[turn.order]
            if brought is not None and of_rows is not None:
                used = _as_used(next(brought)[1], is_turned, dtype).transpose(1, 2)
                part = functional.grouped_mm(there, used, offs=turn.offsets)
                torch.where(turn.is_own, part[turn.back], of_rows, out=of_rows)
                del part
            if wants_matrices:
                sides = (there, rows[turn.order]) if is_turned else (rows[turn.order], there)
                found = functional.grouped_mm(sides[0].t(), sides[1], offs=turn.offsets)
                source.send(group, found)
                del found, sides
        return of_rows, None, None, None, None, None


class ExpertsStandIn(StandInTensor):
    """What stands for a parameter while its block computes."""

    source: GroupedParameter
    is_turned: bool
    """True if the matrices are transposed."""

    @staticmethod
    def __new__(  # noqa: D102
        cls: Any, source: GroupedParameter, *, is_turned: bool, dtype: torch.dtype
    ) -> ExpertsStandIn:
        count, *sides = source.place.shape
        shape = (count, *(reversed(sides) if is_turned else sides))
        device = source.ring.buffers[0].device
        made: ExpertsStandIn = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        made.source, made.is_turned = source, is_turned
        return made

    def turned(self) -> ExpertsStandIn:
        """With its matrices transposed."""
        return ExpertsStandIn(self.source, is_turned=not self.is_turned, dtype=self.dtype)

    def rounded(self, dtype: torch.dtype) -> ExpertsStandIn:
        """In another type."""
        return ExpertsStandIn(self.source, is_turned=self.is_turned, dtype=dtype)

    def whole(self) -> torch.Tensor:
        """All of it on the device."""
        made: torch.Tensor = WholeExperts.apply(self.source.parameter, self.source)  # type: ignore[no-untyped-call]
        made = made.to(self.dtype)
        return made.transpose(1, 2) if self.is_turned else made

    @classmethod
    def ruled(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Products in groups, and what is done to experts before them."""
        return _RULES[func](*args, **kwargs) if func in _RULES else NotImplemented


class InGroups(TorchFunctionMode):
    """Has stand-ins in the place of parameters whatever is done to them."""

    def __init__(self, sources: Mapping[nn.Parameter, GroupedParameter]) -> None:
        super().__init__()
        self._sources = {id(parameter): source for parameter, source in sources.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, with stand-ins where it is given such parameters."""
        given = (args, dict(kwargs or {}))
        if any(id(leaf) in self._sources for leaf in tree_leaves(given)):
            given = tree_map(self._stand_in, given)
        return func(*given[0], **given[1])

    def _stand_in(self, leaf: Any) -> Any:
        source = self._sources.get(id(leaf))
        return leaf if source is None else ExpertsStandIn(source, is_turned=False, dtype=leaf.dtype)


def called_in_groups(
    sources: Mapping[nn.Parameter, GroupedParameter], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, to which such parameters are stand-ins."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with InGroups(sources):
            return function(*args, **kwargs)

    return called


# ── products ─────────────────────────────────────────────────────────────────────────────────────


def _product(left: Any, right: Any) -> Any:
    """A batched product in which one side is a stand-in; others are none of ours."""
    if isinstance(right, ExpertsStandIn):
        rows, experts, is_left = left, right, False
    else:
        # (W x)' = x' W'
        rows, experts, is_left = right.transpose(1, 2) if right.dim() == 3 else right, left, True
    if isinstance(rows, ExpertsStandIn) or rows.dim() != 3 or rows.shape[0] != experts.shape[0]:
        return NotImplemented
    experts = experts.turned() if is_left else experts
    kind, source = rows.device.type, experts.source
    dtype = autocast_dtype(kind) or experts.dtype
    with torch.autocast(kind, enabled=False):
        made: torch.Tensor = BatchedProduct.apply(  # type: ignore[no-untyped-call]
            rows.to(dtype), source.parameter, source, experts.is_turned, dtype
        )
    return made.transpose(1, 2) if is_left else made


def _sorted_product(
    rows: Any, experts: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """``grouped_mm`` of rows that are sorted by expert."""
    is_usual = isinstance(experts, ExpertsStandIn) and not isinstance(rows, ExpertsStandIn)
    if not is_usual or rows.dim() != 2 or offs is None or bias is not None or out_dtype is not None:
        return NotImplemented
    source = experts.source
    return SortedProduct.apply(  # type: ignore[no-untyped-call]
        rows, offs, source.parameter, source, experts.is_turned, experts.dtype
    )


def _turned(experts: Any, *dims: Any) -> Any:
    if not isinstance(experts, ExpertsStandIn) or len(dims) != 2:
        return NotImplemented
    return experts.turned() if {dim % 3 for dim in dims} == {1, 2} else NotImplemented


def _permuted(experts: Any, *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 else dims
    if not isinstance(experts, ExpertsStandIn) or len(order) != 3:
        return NotImplemented
    return experts.turned() if tuple(d % 3 for d in order) == (0, 2, 1) else NotImplemented


def _rounded(experts: Any, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        return experts.rounded(args[0])
    return NotImplemented


def _einsum(equation: Any, *operands: Any) -> Any:
    """``einsum`` where it is a batched product: experts in all three, one sum, matrices last."""
    terms = str(equation).replace(" ", "").replace("->", ",").split(",")
    is_usual = len(terms) == 3 and len(operands) == 2 and "->" in str(equation)
    if not is_usual or any(len(set(term)) != len(term) or "." in term for term in terms):
        return NotImplemented
    if isinstance(operands[0], ExpertsStandIn):
        (of_experts, of_rows, result), (experts, rows) = terms, operands
    else:
        (of_rows, of_experts, result), (rows, experts) = terms, operands
    if isinstance(rows, ExpertsStandIn):
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
    used = experts if sides == [*summed, *kept] else experts.turned()
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
    torch.transpose: _turned,
    torch.Tensor.transpose: _turned,
    torch.permute: _permuted,
    torch.Tensor.permute: _permuted,
    torch.Tensor.mT.__get__: lambda experts: experts.turned(),  # type: ignore[attr-defined]
    torch.Tensor.to: _rounded,
    torch.Tensor.float: lambda experts: experts.rounded(torch.float32),
    torch.Tensor.bfloat16: lambda experts: experts.rounded(torch.bfloat16),
    torch.Tensor.half: lambda experts: experts.rounded(torch.float16),
}
