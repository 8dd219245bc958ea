"""Workspaces of GPU kernels, measured once per call signature and kept on disk.

Libraries choose kernels and their workspaces by shapes, layouts and dtypes: cuDNN's attention takes
several times the memory of its results, convolutions up to hundreds of MB. The size can only be
found by a run. A call signature consists of the op, the shapes, strides and dtypes of its tensors,
and its other arguments. The op is run on zeros, and PyTorch's allocator reports the peak beyond the
results. Only ops without side effects are run, and only if zeros are valid inputs. A measurement
resets the allocator's peak; the caller restores random number generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.base import disk_cache
from hocket.runtime.offload.copy_streams import extent

KernelCall = Callable[[], Any]
_KIND = "kernel-workspaces"
_MIN_BYTES = 2**20
"""Minimum bytes of a call's tensors; workspaces of smaller calls are not measured."""
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_",
              "_cudnn_attention_")  # fmt: skip
"""Prefixes of ops that may draw random numbers and take seeds as integer tensors."""
_RECURRENT = "_cudnn_rnn"
"""Prefix of recurrent ops, which may draw random numbers too; their reserve is a byte tensor."""
_EMBEDDING_GRADIENT = "embedding_dense_backward"
"""Prefix of an op that takes row indices, for which 0 is valid."""


class Workspaces:
    """Workspace bytes of calls, beyond their results."""

    def __init__(
        self, device: torch.device, measure: Callable[[KernelCall], int],
        cache_key: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """``measure`` runs a call and returns the peak beyond its results.

        Measurements are kept on disk under ``cache_key``, unless it is None.
        """
        self._device, self._measure, self._cache_key = device, measure, cache_key
        known = None if cache_key is None else disk_cache.recall(_KIND, cache_key)
        self._found: dict[str, int] = known if isinstance(known, dict) else {}
        self._num_kept = len(self._found)
        self.unknown: dict[str, str] = {}
        """Errors of calls that could not run, by op."""

    def workspace_bytes(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> int:
        """Return the workspace bytes of a call; 0 if they are unknown."""
        if not _may_need_workspace(func):
            return 0
        leaves, form = tree_flatten((args, dict(kwargs or {})))
        if not self._can_run(func, [v for v in leaves if isinstance(v, torch.Tensor)]):
            return 0
        key = repr((str(func), _settings(), tuple(kwargs or ()), [_kind(leaf) for leaf in leaves]))
        if key not in self._found:
            self._found[key] = self._measured(func, leaves, form)
        return self._found[key]

    def keep(self) -> None:
        """Store new measurements on disk, unless a call has failed, which is then retried later."""
        if self._cache_key is not None and len(self._found) > self._num_kept and not self.unknown:
            disk_cache.keep(_KIND, self._cache_key, self._found)
            self._num_kept = len(self._found)

    def _can_run(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        here = [t for t in tensors if t.device.type == self._device.type]
        # Other integers may be indices or sizes for which zero is not valid.
        takes_zeros = _name(func).startswith((*_ATTENTION, _RECURRENT, _EMBEDDING_GRADIENT))
        if not takes_zeros and not all(t.is_floating_point() for t in here):
            return False
        return sum(t.untyped_storage().nbytes() for t in here) >= _MIN_BYTES

    def _measured(self, func: Any, leaves: list[Any], form: Any) -> int:
        with unset_fake_temporarily():
            try:
                real = [_zeros(v) if isinstance(v, torch.Tensor) else v for v in leaves]
                args, kwargs = tree_unflatten(real, form)
                return self._measure(lambda: func(*args, **kwargs))
            # Too little free memory for the call, or no such kernel on the device.
            except RuntimeError as error:
                self.unknown[_name(func)] = str(error)
                return 0


@cache
def workspaces_on(device: torch.device) -> Workspaces:
    """Return the workspaces of a GPU, with measurements kept on disk."""

    def measure(call: KernelCall) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        with warnings.catch_warnings():
            # Weights of recurrent layers are not contiguous here, as in training.
            warnings.simplefilter("ignore")
            result = call()
        held = torch.cuda.memory_allocated(device)
        del result
        return max(0, torch.cuda.max_memory_allocated(device) - held)

    key = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
    return Workspaces(device, measure, key)


@cache
def _may_need_workspace(func: Any) -> bool:
    """True if an op can be measured and may need a workspace.

    Such ops have no side effects, draw no random numbers (except attention and recurrent layers)
    and are not pointwise.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    if func.is_view or func._schema.is_mutable:
        return False
    draws = torch.Tag.nondeterministic_seeded in func.tags
    draws = draws and not _name(func).startswith((*_ATTENTION, _RECURRENT))
    gives = any(isinstance(each.type, torch.TensorType) for each in func._schema.returns)
    return gives and not draws and torch.Tag.pointwise not in func.tags


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.removeprefix("aten::")


def _settings() -> tuple[bool, ...]:
    """Return the global settings by which libraries choose kernels."""
    return (
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__, leaf
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros in the layout of a tensor."""
    flat = torch.zeros(extent(tensor), dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride())
