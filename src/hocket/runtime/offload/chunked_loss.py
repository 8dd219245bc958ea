"""Last layer and cross-entropy of a language model in chunks, without the full logits in memory.

The last layer returns lazy logits: a tensor without data that refers to the layer's input. Casts,
reshapes and slices of lazy logits stay lazy. ``cross_entropy`` computes the logits of one chunk of
positions at a time, and computes them again in the backward pass. Every other function gets the
full logits, so that every model works.

The idea is that of fused linear cross-entropies such as Liger's, with PyTorch's own kernels. Weight
gradients of the chunks are summed in place; sums of 16-bit gradients are in float32 and rounded
once, as in the unchunked layer. Summing in place avoids another copy of the largest gradient of a
language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from hocket.graph.graph import Graph, Phase
from hocket.runtime.trace_options import autocast_dtype

_SHORT = (torch.bfloat16, torch.float16)


def summed_cross_entropy(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    num_chunks: int,
    dtype: torch.dtype,
    ignore_index: int,
) -> torch.Tensor:
    """Return the cross-entropy, summed over rows, of ``linear(rows, weight, bias)`` in
    ``dtype``."""
    how = (target, num_chunks, dtype, ignore_index, autocast_dtype(rows.device.type))
    total: torch.Tensor
    total = _ChunkedLoss.apply(rows, weight, bias, *how)  # type: ignore[no-untyped-call]
    return total


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Any, weight: Any, bias: Any, target: Any, num_chunks: int,
        dtype: torch.dtype, ignore_index: int, cast: torch.dtype | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(rows, weight, bias, target)
        ctx.how = num_chunks, dtype, ignore_index, cast
        layer = _layer(weight, bias, cast)
        chunks = zip(rows.chunk(num_chunks), target.chunk(num_chunks), strict=True)
        losses = [_loss(r, layer, labels, dtype, ignore_index) for r, labels in chunks]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:
        rows, weight, bias, target = ctx.saved_tensors
        num_chunks, dtype, ignore_index, cast = ctx.how
        wanted = ctx.needs_input_grad[:3]
        layer = [
            None if tensor is None else tensor.requires_grad_(is_wanted)
            for tensor, is_wanted in zip(_layer(weight, bias, cast), wanted[1:], strict=True)
        ]
        sums = [
            torch.zeros(t.shape, dtype=_sum_dtype(t.dtype), device=t.device) if is_wanted else None
            for t, is_wanted in zip((weight, bias), wanted[1:], strict=True)
        ]
        of_rows = torch.empty_like(rows) if wanted[0] else None
        start = 0
        for part, labels in zip(rows.chunk(num_chunks), target.chunk(num_chunks), strict=True):
            part = part.detach().requires_grad_(wanted[0])
            with torch.enable_grad(), _autocast(rows.device.type, cast):
                loss = _loss(part, layer, labels, dtype, ignore_index)
            inputs = [t for t in (part, *layer) if t is not None and t.requires_grad]
            found = list(torch.autograd.grad(loss, inputs, given))
            # Frees the chunk's logits before the next chunk allocates its own.
            del loss
            if of_rows is not None:
                of_rows[start : start + len(part)].copy_(found.pop(0))
            start += len(part)
            for total in sums:
                if total is not None:
                    total.add_(found.pop(0))
        back = [
            None if total is None else total.to(tensor.dtype)
            for total, tensor in zip(sums, (weight, bias), strict=True)
        ]
        # One None for each argument of `forward` that is not a tensor.
        return of_rows, *back, None, None, None, None, None


def _layer(weight: torch.Tensor, bias: torch.Tensor | None, cast: torch.dtype | None) -> list[Any]:
    """Cast weight and bias once for all chunks."""
    return [
        None if tensor is None else tensor.detach().to(cast or tensor.dtype)
        for tensor in (weight, bias)
    ]


def _loss(
    rows: torch.Tensor, layer: list[Any], labels: torch.Tensor, dtype: torch.dtype,
    ignore_index: int,
) -> torch.Tensor:  # fmt: skip
    weight, bias = layer
    made = functional.linear(rows.to(weight.dtype), weight, bias).to(dtype)
    return functional.cross_entropy(made, labels, ignore_index=ignore_index, reduction="sum")


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _SHORT else dtype


def _autocast(kind: str, cast: torch.dtype | None) -> torch.autocast:
    return torch.autocast(kind, cast, enabled=cast is not None, cache_enabled=False)


Within = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
"""Function that calls another one while the parameters of the last layer are on the device."""
_PLAIN = frozenset({torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__,
                    torch.Tensor.is_floating_point, torch.Tensor.__repr__})  # fmt: skip
"""Functions that need only the metadata of lazy logits, like attributes such as ``shape``."""


class Head(NamedTuple):
    """The last layer of a model, whose logits are computed in chunks."""

    layer: nn.Linear
    within: Within
    num_chunks: int

    def lazy_logits(self, rows: torch.Tensor) -> LazyLogits:
        """Return the lazy logits of an input of the layer."""
        return LazyLogits(self, rows, autocast_dtype(rows.device.type) or rows.dtype)


class LazyLogits(torch.Tensor):
    """Result of a last layer that is not computed yet: a tensor without data.

    Functions with a rule in `_RULES` are applied to the lazy logits; other functions get the
    computed ones.
    """

    head: Head
    rows: torch.Tensor
    """Input of the last layer."""

    @staticmethod
    def __new__(cls: Any, head: Head, rows: torch.Tensor, dtype: torch.dtype) -> LazyLogits:  # noqa: D102
        shape = (*rows.shape[:-1], head.layer.out_features)
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=rows.device
        )
        made.head, made.rows = head, rows
        return made

    def like(self, rows: torch.Tensor, dtype: torch.dtype | None = None) -> LazyLogits:
        """Return lazy logits for another input of the layer, or with another dtype."""
        return LazyLogits(self.head, rows, dtype or self.dtype)

    def materialize(self) -> torch.Tensor:
        """Compute all logits."""
        layer = self.head.layer
        return self.head.within(lambda: nn.Linear.forward(layer, self.rows).to(self.dtype))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Apply the rule of a function, or call it with the computed logits."""
        others = dict(kwargs or {})
        logits, *more = args or (others.pop("input", None),)
        if func in _RULES and isinstance(logits, LazyLogits):
            result = _RULES[func](logits, *more, **others)
            if result is not NotImplemented:
                return result
        if getattr(func, "__name__", "") == "__get__" or func in _PLAIN:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        made = tree_map(
            lambda x: x.materialize() if isinstance(x, LazyLogits) else x, (args, kwargs or {})
        )
        return func(*made[0], **made[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} sees lazy logits, which must be computed before any op")


def _cast(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        return logits.like(logits.rows, args[0])
    return NotImplemented


def _reshaped(logits: LazyLogits, *shape: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not sizes or sizes[-1] not in (logits.shape[-1], -1) or sizes.count(-1) > 1:
        return NotImplemented
    if sizes[-1] == -1 and logits.rows.shape[:-1].numel() != torch.Size(sizes[:-1]).numel():
        return NotImplemented
    return logits.like(logits.rows.reshape(*sizes[:-1], logits.rows.shape[-1]))


def _flattened(logits: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = logits.dim() - 1
    # The vocabulary axis must remain the last one, and unmerged.
    if end_dim % logits.dim() == last:
        return NotImplemented
    return logits.like(logits.rows.flatten(start_dim, end_dim % logits.dim()))


def _sliced(logits: LazyLogits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        return NotImplemented
    # A slice of the vocabulary would change the normalization of the softmax.
    reaches_last = Ellipsis in parts or len(parts) == logits.dim()
    if reaches_last and parts[-1] not in (slice(None), Ellipsis):
        return NotImplemented
    return logits.like(logits.rows[index])


def _cross_entropy(
    logits: LazyLogits,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    # Chunks sum plain losses: class weights and smoothing would need other normalizations.
    is_usual = weight is None and size_average is None and reduce is None and not label_smoothing
    if not is_usual or target.is_floating_point() or target.dim() != 1 or logits.dim() != 2:
        return NotImplemented
    if reduction not in ("mean", "sum"):
        return NotImplemented

    layer, within, num_chunks = logits.head

    def loss() -> torch.Tensor:
        total = summed_cross_entropy(
            logits.rows, layer.weight, layer.bias, target, dtype=logits.dtype,
            num_chunks=num_chunks, ignore_index=ignore_index,
        )  # fmt: skip
        return total / (target != ignore_index).sum() if reduction == "mean" else total

    return within(loss)


_RULES: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.float: lambda logits: logits.like(logits.rows, torch.float32),
    torch.Tensor.to: _cast,
    torch.Tensor.contiguous: lambda logits: logits,
    torch.Tensor.view: _reshaped,
    torch.Tensor.reshape: _reshaped,
    torch.Tensor.flatten: _flattened,
    torch.Tensor.__getitem__: _sliced,
    functional.cross_entropy: _cross_entropy,
}


def last_layer(model: nn.Module, path: str = "") -> nn.Linear | None:
    """Return the plain linear layer that computes a model's logits, or None.

    The layer is the one at ``path`` if there is one, else the model's output embeddings, else its
    last linear layer. A layer with an overridden ``forward`` cannot compute logits in chunks.
    """
    found: Any = dict(model.named_modules()).get(path) if path else None
    if not isinstance(found, nn.Linear):
        named = getattr(model, "get_output_embeddings", None)
        found = named() if callable(named) else None
        if found is None:
            linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
            found = linear[-1] if linear else None
    is_plain = getattr(getattr(found, "forward", None), "__func__", None) is nn.Linear.forward
    return found if is_plain else None


def supports_chunked_loss(model: nn.Module, graph: Graph) -> bool:
    """True if a step calls the model's last layer once, so that one block can contain the call."""
    head = last_layer(model)
    if head is None:
        return False
    path = path_of(model, head)
    is_forward = graph.op_phase == Phase.FORWARD
    ops = [op for op in range(graph.num_ops) if is_forward[op] and graph.module_of(op) == path]
    # Consecutive ops are one call; a second call would leave a gap between the two.
    return bool(ops) and ops[-1] - ops[0] == len(ops) - 1


def path_of(model: nn.Module, layer: nn.Module) -> str:
    """Return the path of a layer in its model."""
    paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
    return paths[layer]
