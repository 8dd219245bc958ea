"""Capture one step at several batch sizes, and check that its batch can be split.

The model is captured with the given batch and with two other sizes; `hocket.graph.batches` derives
from these captures which tensors and costs grow with the batch. The graph stays unchanged for
batches of one sample, and for models whose ops differ at another size. The independence of samples
is checked numerically on a small copy of the model: the mean gradient of two half batches must
equal the gradient of the whole batch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from hocket.base.errors import one_line
from hocket.base.units import format_percent, format_rate
from hocket.capture.fake import batch_tensors, map_batch, meta_twins, model_tensors
from hocket.capture.given import first_batch, supervised
from hocket.capture.loss import ChosenLoss, Loss
from hocket.capture.model import capture
from hocket.capture.step import Forward, apply_model
from hocket.capture.swap import swapped_tensors
from hocket.graph import Graph, Phase, Role
from hocket.graph.batches import (
    at_batch,
    differing_op,
    has_same_ops,
    unsplit,
    with_other_batch,
)
from hocket.graph.meeting import SAMPLES, reading_samples

# Check that samples are independent: the gradient of a batch is the mean of its parts' gradients.
#
# Every split of a batch relies on that. It holds for a loss that is a mean over samples, and not
# for a loss that sums over samples or compares them with each other. The check runs a small copy of
# the model (few samples, shortened lists of equal layers) and compares gradients of the whole batch
# with those of its halves. It runs in float32, and without autocast if the model can do without it,
# because 16-bit rounding hides small dependences. Batch norm and dropout are switched off: they are
# known to depend on the other samples and on random numbers, and plans state their effect.

TOLERANCE = 1e-3
"""Maximum relative error of float32 gradients, by their norm."""
NUM_ROUNDINGS = 2
"""Additional error for narrower dtypes, in machine epsilons: one rounding of the whole batch's
gradient, one of the parts'."""
NUM_SAMPLES = 4
_KEPT_LAYERS = 2
_PIXELS = 64
_MOST_PARAMETERS = 100_000_000
_MOST_COMPARED = 4_000_000
"""Maximum elements of a weight that gets a gradient in the check; smaller weights suffice to detect
dependence."""
_MOST_FLOPS = 1e10
"""Limit for the forward pass of the check, so that all its passes take a second or two."""
_DROPOUTS = frozenset({
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout,
})  # fmt: skip


Gradients = tuple[torch.Tensor | None, ...]


class Apart(NamedTuple):
    """Result of the check that samples are independent."""

    is_apart: bool | None
    """True if gradients of parts add up to those of the whole; None if nothing was compared."""
    message: str
    """Result for the user, or the reason why nothing was compared."""


def _unchecked(reason: str) -> Apart:
    return Apart(None, f"not checked on a small copy of the model: {reason}")


def samples_apart(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | str | None = None,
    forward: Forward | None = None,
    flops_per_byte: float = 0.0,
) -> Apart:
    """Check numerically that training on parts of a batch equals training on the whole.

    Model and batch are not changed. ``flops_per_byte`` estimates the forward pass per byte of the
    batch, so that no long computation is started.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Small ops take longer on several threads.
    check = _Check(model, batch, ChosenLoss(loss), forward or apply_model, flops_per_byte)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            # Some models need autocast, and some depend on their number of layers.
            for is_wide, is_cut in itertools.product((True, False), repeat=2):
                try:
                    return check.run(is_cut=is_cut, is_wide=is_wide)
                # An error on a smaller batch does not mean that the real batch fails.
                except Exception as error:
                    failed = one_line(error)
        return _unchecked(failed)
    finally:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True, eq=False)
class _Check:
    """The check of one model and batch."""

    model: nn.Module
    batch: Any
    loss: ChosenLoss
    forward: Forward
    flops_per_byte: float

    def run(self, *, is_cut: bool, is_wide: bool) -> Apart:
        """Check a copy: with shortened lists of layers if ``is_cut``, without autocast if
        ``is_wide``."""
        model, functions = self.model, (self.forward, self.loss)
        whole = sum(parameter.numel() for parameter in model.parameters())
        tensors = [tensor for _, _, tensor in model_tensors(model)]
        meta = meta_twins(tensors)
        origin = {id(meta[id(tensor)]): tensor for tensor in tensors}
        with swapped_tensors(model, meta, *functions) as copy:
            if is_cut:
                _shorten(copy)
            number = sum(parameter.numel() for parameter in copy.parameters())
            flops_per_byte = self.flops_per_byte * number / max(1, whole)
            rows = _per_sample(self.batch, lambda t: t[:NUM_SAMPLES])
            if _num_bytes(rows) * flops_per_byte > _MOST_FLOPS:
                rows = _cropped(rows)
            flops = _num_bytes(rows) * flops_per_byte
            if number > _MOST_PARAMETERS:
                left = f"{number / 1e6:.0f} million weights are left with {_KEPT_LAYERS} layers"
                return _unchecked(left)
            if flops > _MOST_FLOPS:
                return _unchecked(f"{NUM_SAMPLES} samples take {format_rate(flops, 'flop')}")
            real = {id(t): _real(origin.get(id(t), t), t) for _, _, t in model_tensors(copy)}
            with swapped_tensors(copy, real, *functions):
                _quieten(copy)
                filled = map_batch(rows, {id(t): _filled(t) for _, t in batch_tensors(rows)})
                return self._compare(copy, filled, _Calm(is_wide=is_wide))

    def _compare(self, copy: nn.Module, batch: Any, calm: _Calm) -> Apart:
        """Compare the gradient of a batch with the mean gradient of its halves."""

        def loss_of(part: Any) -> torch.Tensor:
            with calm:
                return self.loss(self.forward(copy, part))

        whole = loss_of(batch)
        if not torch.isfinite(whole):
            return _unchecked("its loss is no number there")
        parameters = [p for p in copy.parameters() if p.requires_grad]
        expected = torch.autograd.grad(whole, parameters, allow_unused=True)
        if all(gradient is None for gradient in expected):
            return _unchecked("no gradient reaches its weights")
        middle = _num_rows(batch) // 2
        if not middle:
            raise ValueError("there is one sample")
        # Two equal halves: with an odd sample the mean of halves would not be the mean of samples.
        spans = slice(0, middle), slice(middle, 2 * middle)
        halves = [_per_sample(batch, operator.itemgetter(span)) for span in spans]
        losses = [loss_of(half) / len(halves) for half in halves]
        parts = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses]
        error = _distance(parts, expected)
        tolerance = TOLERANCE + NUM_ROUNDINGS * calm.eps
        if error <= tolerance:
            message = f"checked on a small copy of the model, gradients match within {error:.0e}"
            return Apart(True, message)
        # A model that draws random numbers differs from itself, so the comparison proves nothing.
        if whole.item() != loss_of(batch).item():
            return _unchecked("its loss is not the same twice")
        seen = f"gradients of parts are {_percent(error)} away from that of the whole"
        return Apart(False, f"{seen}, and roundings explain {_percent(tolerance)}")


# ── the small copy ───────────────────────────────────────────────────────────────────────────────


def _shorten(copy: nn.Module) -> None:
    """Shorten lists of equal layers."""
    cut: list[str] = []
    for path, layers in list(copy.named_modules()):
        is_list = isinstance(layers, nn.Sequential | nn.ModuleList) and bool(path)
        if not is_list or path.startswith(tuple(cut)):
            continue
        forms = {(type(e), *((n, p.shape) for n, p in e.named_parameters())) for e in layers}
        if len(layers) > _KEPT_LAYERS and len(forms) == 1:
            parent, _, name = path.rpartition(".")
            copy.get_submodule(parent).register_module(name, layers[:_KEPT_LAYERS])
            cut.append(f"{path}.")


def _num_rows(batch: Any) -> int:
    """Number of samples: the first dimension of the batch's first tensor; -1 if it has none."""
    first = next((tensor for _, tensor in batch_tensors(batch)), None)
    return -1 if first is None or not first.dim() else int(first.shape[0])


def _per_sample(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with ``change`` applied to all tensors with one row per sample."""
    rows = _num_rows(batch)
    return map_batch(batch, {
        id(t): change(t) if t.dim() and t.shape[0] == rows else t for _, t in batch_tensors(batch)
    })  # fmt: skip


def _cropped(rows: Any) -> Any:
    """Crop each image to a corner."""
    return map_batch(rows, {
        id(t): t[..., :_PIXELS, :_PIXELS] if t.dim() == 4 and t.is_floating_point() else t
        for _, t in batch_tensors(rows)
    })  # fmt: skip


def _num_bytes(batch: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for _, tensor in batch_tensors(batch))


def _real(given: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """Real tensor for the small copy: the original values if there are any, else random ones."""
    value = given.detach().cpu().clone() if not given.is_meta else _drawn(given)
    value = value.float() if value.is_floating_point() else value
    if isinstance(twin, nn.Parameter):
        is_trained = twin.requires_grad and value.numel() <= _MOST_COMPARED
        return nn.Parameter(value, requires_grad=is_trained and value.is_floating_point())
    return value


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """Random weights: matrices that preserve the norm of their input, vectors near one."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() < 2:
        return 1 + 0.1 * torch.randn(tensor.shape)
    most = (3.0 * tensor.shape[0] / max(1, tensor.numel())) ** 0.5
    return torch.empty(tensor.shape).uniform_(-most, most)


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Random batch tensor; integers are indices, so they are small and not negative."""
    if tensor.is_meta:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape)
        return torch.randint(0, 2, tensor.shape).to(tensor.dtype)
    value = tensor.detach().cpu()
    if value.is_floating_point():
        return value.float()
    return value if value.dtype == torch.bool else value.clamp(min=0)


# ── what is left out ─────────────────────────────────────────────────────────────────────────────


def _quieten(model: nn.Module) -> None:
    """Switch to training mode without dropout and without batch statistics, so that results are
    deterministic and independent across samples."""
    model.train()
    for module in model.modules():
        if isinstance(module, _NormBase):
            module.eval()
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


class _Calm(TorchFunctionMode):
    """Mode without dropout; if ``is_wide``, without autocast too."""

    def __init__(self, *, is_wide: bool) -> None:
        super().__init__()
        self.is_wide = is_wide
        self.eps = 0.0
        """Machine epsilon of the narrowest dtype below float32 that was seen."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``; dropout returns its input."""
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention and len(args) < 5:
            kwargs["dropout_p"] = 0.0
        # The small copy is on the CPU, whatever device the model's own code names.
        with torch.autocast("cpu", enabled=False) if self.is_wide else nullcontext():
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.itemsize < 4:
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result


def _percent(part: float) -> str:
    """Format a percentage with more digits if it is small, so that refused and allowed values
    differ."""
    return format_percent(part) if part >= 0.1 else f"{100 * part:.3g} %"


def _distance(parts: Sequence[Gradients], expected: Gradients) -> float:
    """Norm of the difference between summed and expected gradients, relative to the expected."""
    off, size = 0.0, 0.0
    for of_parts, wanted in zip(zip(*parts, strict=True), expected, strict=True):
        found = sum(gradient for gradient in of_parts if gradient is not None)
        target = torch.zeros(()) if wanted is None else wanted
        size += float(target.square().sum())
        off += float((found - target).square().sum())
    if not size:
        return 0.0 if not off else float("inf")
    return float((off / size) ** 0.5)


def capture_sizes(model: nn.Module, batch: Any, **options: Any) -> Graph:
    """Like `capture`, with batch-dependent tensors and costs marked in the graph where possible."""
    batch = first_batch(batch)
    graph = capture(model, batch, **options)
    return knowing_sizes(graph, lambda size: capture(model, resized(batch, size), **options))


def trying_samples(graph: Graph, model: nn.Module, batch: Any, **options: Any) -> Graph:
    """Add the result of the independence check to the graph: dependent samples must not be split.

    ``model`` and ``batch`` may be smaller than those of the capture; ``options`` are those of
    `samples_apart`.
    """
    if graph.other_batch is None or graph.meta.get("optimizer") is None:
        return graph
    forward = float(graph.flops[graph.op_phase == Phase.FORWARD].sum())
    is_given = (graph.tensor_role == Role.INPUT) & (graph.tensor_producer < 0)
    given_bytes = max(1, int(graph.tensor_bytes[is_given].sum()))
    batch = first_batch(batch)
    options["loss"], options["forward"] = supervised(
        model, batch, options.get("loss"), options.get("forward")
    )
    found = samples_apart(model, batch, flops_per_byte=forward / given_bytes, **options)
    if found.is_apart is None:
        return reading_samples(replace(graph, meta={**graph.meta, SAMPLES: found.message}))
    if not found.is_apart:
        return unsplit(graph, found.message)
    return replace(graph, meta={**graph.meta, SAMPLES: found.message})


def knowing_sizes(graph: Graph, captured: Callable[[int], Graph]) -> Graph:
    """Add the graph's columns at another batch size; ``captured`` captures the step at a given
    size."""
    num_samples = graph.meta.get("batch")
    if not graph.is_recorded or not isinstance(num_samples, int) or num_samples < 2:
        return graph
    size, proof = _other_sizes(num_samples)
    try:
        seen = with_other_batch(graph, num_samples, captured(size), size)
        if seen.other_batch is None:
            return unsplit(graph, "its ops are others at another size")
        other = captured(proof)
    except Exception as error:
        return unsplit(graph, f"it cannot be captured at another size: {error}")
    if not has_same_ops(graph, other):
        return unsplit(graph, "its ops are others at another size")
    op = differing_op(at_batch(seen, proof), other)
    if op is not None:
        return unsplit(graph, f"{op!r} does not grow evenly with the batch")
    return seen


def _other_sizes(num_samples: int) -> tuple[int, int]:
    """Two other batch sizes, above 1, because libraries special-case a batch of 1."""
    if num_samples >= 4:
        return num_samples // 2, 2 * num_samples
    return 2 * num_samples, 3 * num_samples


def resized(batch: Any, num_samples: int) -> Any:
    """Return the batch with another number of samples, on the meta device.

    Tensors whose first dimension equals that of the batch's first tensor hold samples. A tensor
    that occurs twice, as inputs and as labels, still occurs twice.
    """
    return _per_sample(
        batch, lambda t: torch.empty((num_samples, *t.shape[1:]), dtype=t.dtype, device="meta")
    )
