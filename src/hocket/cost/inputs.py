"""Make real tensors for a recorded call: same shapes, strides and dtypes, valid contents.

Floating-point tensors are random, because zeros let a device draw less power and run faster than
real data. Integers that index something stay in range, others are 0. Tensors that a backward op
takes from its own forward op (masks, statistics, random seeds) are computed by that op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hocket.capture.program import Call, Program
from hocket.capture.record import flat_refs
from hocket.capture.recording import Constant, Ref, TensorLayout, flat_results, map_tree

_Bound = Callable[[Any], int]


def _extent(tensor: int, dim: int) -> _Bound:
    """Index bound given by one dimension of an argument."""
    return lambda args: args[tensor].shape[dim]


def _extent_of_dim(args: Any) -> int:
    """Index bound of ``gather(input, dim, index)`` and related ops."""
    return int(args[0].shape[args[1]]) if args[0].shape else 1


def _indexed_extents(args: Any) -> int:
    """Index bound of ``index(input, [index, None, ...])``: the smallest indexed dimension."""
    extents = [args[0].shape[dim] for dim, index in enumerate(args[1]) if index is not None]
    return min(extents, default=1)


_INDEX_BOUNDS: dict[str, _Bound] = {
    "embedding": _extent(0, 0),
    "embedding_dense_backward": lambda args: args[2],
    "embedding_bag": _extent(0, 0),
    "nll_loss_forward": _extent(0, -1),
    "nll_loss_backward": _extent(1, -1),
    "nll_loss2d_forward": _extent(0, 1),
    "nll_loss2d_backward": _extent(1, 1),
    "gather": _extent_of_dim,
    "scatter": _extent_of_dim,
    "scatter_add": _extent_of_dim,
    "scatter_reduce": _extent_of_dim,
    "index_select": _extent_of_dim,
    "index_add": _extent_of_dim,
    "index_copy": _extent_of_dim,
    "index_fill": _extent_of_dim,
    "index": _indexed_extents,
    "index_put": _indexed_extents,
    "_index_put_impl": _indexed_extents,
    "_unsafe_index": _indexed_extents,
    "_unsafe_index_put": _indexed_extents,
}


def index_bound(call: Call, program: Program) -> int:
    """Exclusive upper bound for the integers in the tensors of a call."""
    name = _name(call).rstrip("_")
    layouts = map_tree(call.args, lambda leaf: _layout(leaf, program))
    return max(1, int(_INDEX_BOUNDS[name](layouts))) if name in _INDEX_BOUNDS else 1


def make_arguments(
    call: Call, program: Program, device: torch.device, generator: torch.Generator
) -> tuple[Any, dict[str, Any]]:
    """Arguments on ``device`` with which the call can be run."""
    made: dict[int, torch.Tensor] = {}
    # Backward ops get the results of real forward ops, as masks and statistics must be consistent.
    for forward in _own_forwards(call, program):
        args, kwargs = _real(forward, program, device, generator, made)
        results = flat_results(forward.function(*args, **kwargs))
        made |= {
            number: result
            for number, result in zip(forward.outputs, results, strict=True)
            if number is not None
        }
    return _real(call, program, device, generator, made)


def _real(
    call: Call,
    program: Program,
    device: torch.device,
    generator: torch.Generator,
    made: dict[int, torch.Tensor],
) -> tuple[Any, dict[str, Any]]:
    """Arguments of one call; tensors missing in ``made`` are filled and added to it."""
    bound = index_bound(call, program)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            if leaf.number not in made:
                made[leaf.number] = filled(_layout(leaf, program), device, bound, generator)
            return made[leaf.number]
        if isinstance(leaf, Constant):
            return leaf.tensor
        return device if isinstance(leaf, torch.device) else leaf

    return map_tree(call.args, real), map_tree(dict(call.kwargs), real)


def _own_forwards(call: Call, program: Program) -> list[Call]:
    """Forward calls whose results a backward call reads: ``softmax`` for ``softmax_backward``."""
    producers = {
        program.tensors[ref.number].producer for ref in flat_refs((call.args, call.kwargs))
    }
    calls = [program.calls[op] for op in sorted(producers - {-1})]
    return [
        forward
        for forward in calls
        if not isinstance(forward.function, str)
        and _name(call).startswith(f"{_name(forward).removesuffix('_forward')}_backward")
    ]


def filled(
    layout: TensorLayout, device: torch.device, bound: int, generator: torch.Generator
) -> torch.Tensor:
    """Tensor of the given layout with random content; integers are below ``bound``."""
    # Strided views need memory up to their last element only.
    spans = zip(layout.shape, layout.stride, strict=True)
    num_cells = 1 + sum((extent - 1) * stride for extent, stride in spans)
    num_cells = num_cells if layout.num_elements else 0
    if layout.dtype == torch.bool:
        cells = torch.rand(num_cells, device=device, generator=generator) < 0.9
    elif layout.dtype.is_floating_point or layout.dtype.is_complex:
        # 8-bit types have no random generator.
        wide = layout.dtype if layout.dtype.itemsize > 1 else torch.float32
        cells = torch.randn(num_cells, dtype=wide, device=device, generator=generator)
        cells = cells.to(layout.dtype)
    elif bound > 1:
        cells = torch.randint(bound, (num_cells,), device=device, generator=generator)
        cells = cells.to(layout.dtype)
    else:
        cells = torch.zeros(num_cells, dtype=layout.dtype, device=device)
    return cells.as_strided(layout.shape, layout.stride)


def argument_bytes(call: Call, program: Program) -> int:
    """Total bytes of all tensors among the arguments."""
    sizes: dict[int, int] = {}

    def note(leaf: Any) -> None:
        if isinstance(leaf, Ref):
            sizes[leaf.number] = _layout(leaf, program).touched_bytes

    map_tree((call.args, dict(call.kwargs)), note)
    return sum(sizes.values())


def _name(call: Call) -> str:
    """Base name of an op: ``softmax`` for ``aten.softmax.int``."""
    return str(call.function).split(".")[1]


def _layout(leaf: Any, program: Program) -> Any:
    return program.tensors[leaf.number].layout if isinstance(leaf, Ref) else leaf
