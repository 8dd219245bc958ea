"""Normalise user arguments: wrapped models, DataLoaders as batches, ``(x, y)`` pairs with a
loss."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hocket.base.errors import UsageError
from hocket.capture.loss import Loss, find_loss, first_floating
from hocket.capture.precision import amp_forward
from hocket.capture.step import Forward
from hocket.capture.swap import generators_kept


class WrapperWarning(UserWarning):
    """Warning that hocket bypasses a wrapper around a model."""


def unwrapped(model: Any) -> Any:
    """Return the model inside DataParallel, DistributedDataParallel or torch.compile.

    The parameters are the same objects, so an optimizer of the wrapper also fits the model.
    """
    inner = getattr(model, "_orig_mod", None)
    if isinstance(model, nn.Module) and any(map(_is_compiled, model.modules())):
        warnings.warn(
            "hocket runs its own steps of a model, not the kernels that torch.compile made for "
            "it; hint: pass the model itself, with compiled=True for compiled steps",
            WrapperWarning,
            3,
        )
    if isinstance(inner, nn.Module):
        return inner
    if isinstance(model, DataParallel | DistributedDataParallel):
        return unwrapped(model.module)
    _refuse_sharded(model)
    return model


def _is_compiled(module: nn.Module) -> bool:
    """True for a result of torch.compile and for a module after ``module.compile()``."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def refuse_ranks(model: Any) -> None:
    """Refuse a DistributedDataParallel of several ranks: its gradient hooks would not run."""
    if not isinstance(model, DistributedDataParallel):
        return
    num_ranks = torch.distributed.get_world_size(model.process_group)
    if num_ranks > 1:
        raise UsageError(
            f"the model is in a DistributedDataParallel of {num_ranks} ranks, and hocket sums "
            "gradients itself",
            hint="pass model.module and the global batch, with a plan that replicates the model: "
            "hocket.prepare(model.module, optimizer, batch, "
            f"plan=hocket.ParallelConfig(data={num_ranks}, …)) or a plan of hocket plan --on …",
        )


def _refuse_sharded(model: Any) -> None:
    """Refuse a model of `fully_shard`: its parameters are shards that its own hooks gather and
    free."""
    is_sharded = isinstance(model, nn.Module) and any(
        type(each).__name__.startswith("FSDP") and hasattr(each, "unshard")
        for each in model.modules()
    )
    if is_sharded:
        raise UsageError(
            f"{type(model).__name__} is sharded by torch's fully_shard, and hocket shards models "
            "itself",
            hint="pass the model before fully_shard, with a plan that shards it: "
            "hocket.prepare(model, optimizer, batch, plan=…) under hocket launch",
        )


def first_batch(batch: Any) -> Any:
    """Return the first batch of a DataLoader; any other object is returned unchanged.

    The states of random generators do not change. Refuses a DataLoader that can be read only once,
    because training would miss its first batch.
    """
    if not isinstance(batch, DataLoader):
        return batch
    data = batch.dataset
    # An iterator returns itself from `__iter__`, so an item that is taken here is lost.
    if isinstance(data, IterableDataset) and not batch.num_workers and iter(data) is iter(data):
        raise UsageError(
            f"the DataLoader's {type(data).__name__} gives one iterator for all passes, so a batch "
            "that is taken from it here would be missing in training",
            hint="give a batch of the same shape instead of the DataLoader, or let __iter__ of the "
            "dataset make a new iterator",
        )
    own = [g for g in (batch.generator, getattr(batch.sampler, "generator", None)) if g]
    states = [generator.get_state() for generator in own]
    try:
        with torch.random.fork_rng(), generators_kept():
            return next(iter(batch))
    except StopIteration:
        raise UsageError("the DataLoader is empty", hint="give one with a batch") from None
    finally:
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)


class SupervisedForward:
    """Forward that applies a model to ``x`` and a loss to its output and ``y``."""

    def __init__(self, loss: Any, name: str = "") -> None:
        self.loss = loss
        self.name = name
        """Name by which `supervised` finds the loss again; empty for a function of the caller."""

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Loss of one ``(x, y)`` batch."""
        inputs, target = batch
        found: torch.Tensor = self.loss(model(inputs), target)
        return found


def supervised(
    model: Any, batch: Any, loss: Loss | str | None, forward: Forward | None
) -> tuple[Loss | str | None, Forward | None]:
    """Return loss and forward of a step; resolves losses of output and target for ``(x, y)``.

    Such a loss is a function of two arguments, such as ``torch.nn.functional.cross_entropy``, or
    the name of a loss (``package.module:function`` too) if the model is called with ``x`` only.
    """
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if forward is not None or loss is None or not is_pair or isinstance(batch, Mapping):
        return loss, forward
    if isinstance(loss, str):
        if _can_be_called(model, *batch):
            return loss, forward
        loss_of = _OF_TARGET.get(loss) or (find_loss(loss) if ":" in loss else None)
        if loss_of is None or (loss not in _OF_TARGET and _num_required(loss_of) != 2):
            return loss, forward
        return None, SupervisedForward(loss_of, loss)
    if _num_required(loss) != 2:
        return loss, forward
    return None, SupervisedForward(loss)


def loss_and_forward(
    model: Any, batch: Any, loss: Loss | str | None, amp: str | None, device: str
) -> tuple[Loss | str | None, Forward | None]:
    """Return loss and forward of a step under autocast of the type ``amp``, if it is not None."""
    loss, forward = supervised(model, batch, loss, None)
    return loss, amp_forward(amp, device, forward)


def remedy_of_call(model: Any, batch: Any) -> str:
    """Hint for a model that fails on a batch: a missing loss if only ``x`` of ``(x, y)`` fits."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if is_pair and not _can_be_called(model, *batch) and _can_be_called(model, batch[0]):
        return (
            "the model takes x of the batch (x, y): name a loss of its output and y, such as "
            "--loss cross-entropy or --loss FILE.py:FUNCTION; in Python loss= or forward="
        )
    return "check that the model runs on the batch outside hocket"


def _cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over classes in dimension 1, as in PyTorch, or in the last one, as in language
    models."""
    logits = first_floating(output)
    if target.dim() == logits.dim() - 1 and target.shape == logits.shape[:-1]:
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))
    return functional.cross_entropy(logits, target)


def _mean_squares(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(first_floating(output), target)


_OF_TARGET = {"cross-entropy": _cross_entropy, "mse": _mean_squares}


def _num_required(loss: Any) -> int:
    """Number of positional arguments without default; 1 if it is unknown."""
    try:
        taken = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in taken.parameters.values())


def _can_be_called(model: Any, *args: Any) -> bool:
    try:
        inspect.signature(model.forward).bind(*args)
    except (TypeError, ValueError):
        return False
    return True
