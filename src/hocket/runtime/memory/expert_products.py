"""Products with the matrices of experts, group by group, and their gradients.

In the backward pass the groups come again, the last one first, and the gradient of each goes to the
host as soon as it is there. Rows of a batched product belong to an expert by their place; rows that
are sorted by expert, of which each has as many as chose it, are turned so that those of a group
come first: so shapes never depend on the data, and nobody waits for the numbers of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hocket.runtime.memory.groups import GroupedParameter


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
