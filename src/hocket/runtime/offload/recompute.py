"""Activation checkpointing: a module runs a second time in the backward pass, in the same state.

The method is that of PyTorch's non-reentrant checkpoints. In the first run autograd saves an index
in place of each tensor. When the backward pass needs the tensor of an index, the module runs again
until all indexed tensors have been saved, and is then stopped by an exception. Host time per saved
tensor is lower than PyTorch's: with small ops, a step takes 1.9 to 2.1 times as long as without
recompute, against 2.5 to 3.1 times with PyTorch's checkpoints (`benchmarks/memory/host_time.py`).

The second run starts in the state of the first one: random number generators, autocast, the default
device, inputs, buffers and Python attributes. Afterwards the state after the first run is restored,
so that buffers (running statistics) and attributes (counters) change once per step.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from hocket.base.errors import RunError
from hocket.capture.model import CaptureWarning
from hocket.capture.swap import Holder, ReachableState, global_draws, same_draws
from hocket.runtime.trace_options import autocast_dtype

Function = Callable[..., Any]
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Pack and unpack hooks of saved tensors."""


# ── state of modules ─────────────────────────────────────────────────────────────────────────────

_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATISTICS = _MEAN, _VARIANCE, _COUNT = "running_mean", "running_var", "num_batches_tracked"


class SeenBuffer(NamedTuple):
    """A buffer and its version before a run."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor | None
    """Copy of the buffer's value, or None if none was made."""


class PythonValues(NamedTuple):
    """Values outside of tensors on which a run may depend."""

    holders: list[Holder]
    """Attributes, containers and closure cells with their contents."""
    generators: list[tuple[torch.Generator, torch.Tensor]]
    """The modules' own random number generators with their states."""
    draws: tuple[Any, Any] | None
    """States of the generators of Python and NumPy; None if they are not used."""

    def renewed(self) -> PythonValues:
        """Return the current values of the same attributes and generators."""
        return PythonValues(
            [holder.renewed() for holder in self.holders],
            [(generator, generator.get_state()) for generator, _ in self.generators],
            None if self.draws is None else global_draws(),
        )

    def write(self) -> None:
        """Write the recorded values back to the attributes and generators."""
        for holder in self.holders:
            holder.write(holder.owner, holder.saved)
        for generator, state in self.generators:
            generator.set_state(state)
        if self.draws is not None:
            random.setstate(self.draws[0])
            np.random.set_state(self.draws[1])


class StateBefore(NamedTuple):
    """Recorded state of modules before a run; after the run reduced to what it has changed."""

    buffers: list[SeenBuffer]
    python: PythonValues


class ModuleState:
    """Buffers and Python state of modules that run twice per step, but change their state once.

    In the second run batch norms write to temporary statistics; their results in training do not
    depend on these. All other state that the first run changes is reset for the second run, and
    restored to the values after the first run at the end. Without the reset, a module that counts
    its calls, or that draws from Python's or NumPy's generator, would silently compute other
    values. The very first run compares all state that is reachable from the modules, except globals
    and class attributes. Later runs record only the state that the first run changed.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        inner = list(dict.fromkeys(each for outer in self._modules for each in outer.modules()))
        self._norms = [each for each in inner
                       if isinstance(each, _NormBase) and type(each) in _PLAIN_NORMS]  # fmt: skip
        self._watched = [(each, name) for each in inner if type(each) not in _PLAIN_NORMS
                         for name in each._buffers]  # fmt: skip
        # Kernels of norms write running statistics without moving their version counters.
        self._unseen = {place for place in self._watched if isinstance(place[0], _NormBase)}
        self._moved: set[tuple[nn.Module, str]] | None = None
        """Buffers that earlier runs have changed; None before the first run."""
        self._python: PythonValues | None = None
        """Attributes that the first run changed (without values); None before the first run."""

    def before(self) -> StateBefore:
        """Record the state before a run."""
        found = []
        for module, name in self._watched:
            if (buffer := module._buffers[name]) is not None:
                is_copied = self._moved is None or (module, name) in self._moved
                value = buffer.clone() if is_copied else None
                found.append(SeenBuffer(module, name, buffer, buffer._version, value))
        if self._python is not None:
            return StateBefore(found, self._python.renewed())
        reached = ReachableState(self._modules)
        # Parameters are placed by strategies, not by the run.
        own = [
            each
            for each in reached.holders
            if not each.is_global and nn.Parameter not in map(type, each.saved)
        ]
        return StateBefore(found, PythonValues(own, reached.generators, global_draws()))

    def moved(self, before: StateBefore) -> StateBefore:
        """Return the part of the recorded state that the run has changed."""
        python = before.python
        if self._python is None:
            is_drawn = python.draws is not None and not same_draws(python.draws, global_draws())
            python = PythonValues(
                [each for each in python.holders if each.is_changed()],
                [(g, state) for g, state in python.generators if not g.get_state().equal(state)],
                python.draws if is_drawn else None,
            )
            values = [value for each in python.holders for value in each.renewed().saved]
            made = [(value, value.get_state()) for value in values
                    if issubclass(type(value), torch.Generator)]  # fmt: skip
            # Contents are dropped, because they may hold tensors.
            emptied = [each._replace(saved=()) for each in python.holders]
            self._python = PythonValues(emptied, python.generators + made, python.draws)
        found = [
            seen
            for seen in before.buffers
            if seen.buffer._version != seen.version or (seen.module, seen.name) in self._unseen
        ]
        for seen in found:
            if seen.value is None:
                warnings.warn(
                    f"{seen.name} of a {type(seen.module).__name__} first changes in this step: "
                    "recompute sees its new value now, and the right one from the next step on",
                    CaptureWarning, 2,
                )  # fmt: skip
        self._moved = (self._moved or set()) | {(seen.module, seen.name) for seen in found}
        return StateBefore(found, python)

    @contextmanager
    def reset_to(self, before: StateBefore) -> Iterator[None]:
        """Reset the state to ``before`` inside the context, and restore the present state after."""
        now = before.python.renewed()
        before.python.write()
        norms = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        found = [(norm, {name: norm._buffers[name] for name in _STATISTICS}) for norm in norms]
        for norm, own in found:
            spare = {name: None if (statistic := own[name]) is None else torch.empty_like(statistic)
                     for name in (_MEAN, _VARIANCE)}  # fmt: skip
            # Without a counter the second run does not count the batch a second time.
            norm._buffers.update({**spare, _COUNT: None})
        values = [(seen.buffer, seen.buffer.clone()) for seen in before.buffers]
        with torch.no_grad():
            for seen in before.buffers:
                if seen.value is not None:
                    seen.buffer.copy_(seen.value)
        try:
            yield
        finally:
            for norm, own in found:
                norm._buffers.update(own)
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)
            now.write()


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


def recomputed(
    state: ModuleState,
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    restores_rng: bool = True,
    keeping: Hooks | None = None,
) -> Any:
    """Call a function whose saved tensors are recomputed in its backward pass.

    ``state`` is the state of the modules that the function calls. Once the function has written
    into its inputs, nothing can be recomputed from them. Tensors that autograd saves after such a
    write are therefore saved by the hooks ``keeping``, or as they are by default.
    """
    run = _RecomputedRun(state, function, args, kwargs, keeping or (saved_as_is, SavedTensor.get),
                         restores_rng=restores_rng)  # fmt: skip
    with saved_tensors_hooks(run.pack, run.unpack):
        result = function(*args, **kwargs)
    run.before = state.moved(run.before)
    return result


class SavedTensor(NamedTuple):
    """A saved tensor with its version, because PyTorch does not check tensors packed by hooks."""

    tensor: torch.Tensor
    version: int

    def get(self) -> torch.Tensor:
        """Return the tensor; raises `RunError` if it was written to since."""
        if self.tensor._version != self.version:
            raise RunError(
                f"a tensor {list(self.tensor.shape)} that the backward pass needs was changed in "
                "place after it was saved",
                hint="write y = y + 1 for y += 1 where an op before it needs y",
            )
        return self.tensor


def saved_as_is(tensor: torch.Tensor) -> SavedTensor:
    """Save a tensor without its grad_fn, because a grad_fn keeps the entire graph alive."""
    return SavedTensor(tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version)


class _AllSaved(BaseException):
    """Stops a second run; derived from `BaseException`, so that model code does not catch it."""


class _SavedInputs(torch.autograd.Function):
    """Saves inputs through autograd, so that outer hooks may offload them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _RecomputedRun:
    """One call of a function, with the state that its second run needs."""

    def __init__(
        self, state: ModuleState, function: Function, args: Sequence[Any],
        kwargs: Mapping[str, Any], keeping: Hooks, *, restores_rng: bool,
    ) -> None:  # fmt: skip
        self._state, self._function = state, function
        self._keep, self._kept = keeping
        leaves, self._structure = tree_flatten((tuple(args), dict(kwargs)))
        # A tensor that is passed twice must be one object in the second run, too: attention takes
        # another kernel if query, key and value are the same tensor.
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        position = {key: at for at, key in enumerate(tensors)}
        self._position = [position.get(id(leaf), -1) for leaf in leaves]
        self._others = [None if id(leaf) in position else leaf for leaf in leaves]
        inputs = list(tensors.values())
        anchor = torch.empty(0, requires_grad=True)
        # The result, not its grad_fn alone: PyTorch 2.11 frees what that saved without it.
        self._inputs: torch.Tensor = _SavedInputs.apply(anchor, *inputs)  # type: ignore[no-untyped-call]
        kinds = dict.fromkeys((*(tensor.device.type for tensor in inputs[:1]), "cpu"))
        self._autocast = {kind: autocast_dtype(kind) for kind in kinds}
        self._is_cached = torch.is_autocast_cache_enabled()
        self._device = torch.get_default_device()
        self._rng = _TorchGenerators(inputs) if restores_rng else None
        self._versions = [(_version_counter(tensor), tensor._version) for tensor in inputs]
        """Version counter of each input, and its value before the first run."""
        self.before = state.before()
        self._shapes: list[torch.Size] = []
        """Shapes of the tensors that autograd saved in the first run."""
        self._recomputed: list[torch.Tensor | None] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        """Save an index in place of a tensor, or the tensor itself if it cannot be recomputed."""
        if self._is_changed():
            return self._keep(tensor)
        self._shapes.append(tensor.shape)
        return len(self._shapes) - 1

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor of an index; a backward pass requests each index once."""
        if not isinstance(packed, int):
            return self._kept(packed)
        number = packed
        # `autograd.grad` within the forward pass unpacks before all tensors were saved.
        if number >= len(self._recomputed) or self._recomputed[number] is None:
            self._recompute()
        # Dropped here, so that autograd alone decides how long the tensor lives.
        tensor, self._recomputed[number] = self._recomputed[number], None
        assert tensor is not None
        return tensor

    def _is_changed(self) -> bool:
        return any(counter._version != version for counter, version in self._versions)

    def _recompute(self) -> None:
        if self._is_changed():
            # Autograd does not check versions of tensors that hooks have packed.
            raise RunError(
                "an input of a recomputed part of the model was changed in place after its call, "
                "so it cannot be recomputed",
                hint="write x = x + part(x) for x += part(x), or give more memory so that it runs "
                "once",
            )
        shapes, saved = self._shapes, list[SavedTensor]()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            # The index is valid: `_AllSaved` ends the run at the last shape.
            if tensor.shape != shapes[len(saved)]:
                raise _different(f"{tuple(shapes[len(saved)])}, then {tuple(tensor.shape)}")
            tensor = tensor.detach() if tensor.requires_grad else tensor
            saved.append(SavedTensor(tensor, tensor._version))
            if len(saved) == len(shapes):
                raise _AllSaved
            return tensor

        function: Any = self._inputs.grad_fn
        inputs = function.saved_tensors
        leaves = [inputs[at] if at >= 0 else other
                  for at, other in zip(self._position, self._others, strict=True)]  # fmt: skip
        args, kwargs = tree_unflatten(leaves, self._structure)
        with self._as_in_first_run():
            try:
                with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
                    self._function(*args, **kwargs)
            except _AllSaved:
                pass
            # Versions are checked before buffers are restored, which changes versions too.
            self._recomputed = [each.get() for each in saved]
        if len(saved) < len(shapes):
            raise _different(f"{len(shapes)} tensors, then {len(saved)}")

    @contextmanager
    def _as_in_first_run(self) -> Iterator[None]:
        """Restore generators, autocast, default device and module state of the first run."""
        with ExitStack() as stack:
            if self._rng is not None:
                stack.enter_context(self._rng.restored())
            for kind, dtype in self._autocast.items():
                if dtype is not None or autocast_dtype(kind) is not None:
                    stack.enter_context(torch.autocast(
                        kind, dtype=dtype, enabled=dtype is not None, cache_enabled=self._is_cached
                    ))  # fmt: skip
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            stack.enter_context(self._state.reset_to(self.before))
            yield


class _TorchGenerators:
    """States of PyTorch's random number generators."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._on_cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)
        kinds = (tensor.device.type for tensor in tensors if tensor.device.type != "cpu")
        self._kind = next(kinds, "cuda")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the recorded states inside the context, and the present states after it."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            torch.set_rng_state(self._on_cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            yield


def _version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares the version counter of ``tensor``, but none of its
    memory."""
    counter = tensor.detach()
    counter.data = counter.new_empty(0)
    return counter


def _different(shapes: str) -> RunError:
    return RunError(
        f"a part of the model saves different tensors when it is recomputed: {shapes}",
        hint="make it compute the same for the same input, or give more memory so that it runs "
        "once",
    )
