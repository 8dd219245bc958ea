"""Modules that are computed again for their backward pass, as if it had been once.

Numbers stand for what autograd saves in the first call. When the backward pass asks for one of
them, the function is called again, and what autograd would save then is what they stand for; once
all is there the call is broken off. That is how checkpoints of PyTorch work that are not reentrant.
These take less of the host's time for each saved tensor: where ops are small, a step takes 1.9 to
2.1 plain ones with these and 2.5 to 3.1 with PyTorch's (`benchmarks/memory/host_time.py`). Buffers
are as they were, and move once (`unmoved`), as do numbers of Python that modules have
(`own_numbers`), random numbers are drawn again where asked for, and autocast is as it was.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import CellType
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
from hocket.capture.swap import copied_container
from hocket.runtime.autocast import autocast_dtype

# Python state of modules that are computed twice: numbers, generators, lists, dicts, closures.
#
# A counter that the first call has moved is for the second call what it was for the first, and so
# is a generator that it drew from, also those of Python and of NumPy; afterwards all are as the
# first call left them. All are looked at around the very first call, and around later ones those
# that moved in it.


_KINDS = (bool, int, float, str, type(None))
_OWN_FIELDS = frozenset(vars(nn.Module()))


class Contents:
    """What a list, dict or set holds, or the cell of a closure."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def noted(self) -> Any:
        """The contents, as a copy that does not follow changes."""
        holder = self._holder
        is_cell = isinstance(holder, CellType)
        return holder.cell_contents if is_cell else copied_container(holder)

    def put(self, value: Any) -> None:
        """Have the holder hold these again."""
        if isinstance(self._holder, CellType):
            self._holder.cell_contents = value
            return
        self._holder.clear()
        (self._holder.extend if hasattr(self._holder, "extend") else self._holder.update)(value)


Place = tuple[nn.Module | None, str] | Contents
"""An attribute of a module, a generator of the process, or what a container holds."""
_PYTHON, _NUMPY = (None, "random"), (None, "numpy")
Numbers = Mapping[Place, Any]
"""What attributes are."""


class _Drawing(NamedTuple):
    """A generator of random numbers, and where it stands."""

    generator: torch.Generator
    state: torch.Tensor


class OwnNumbers:
    """The attributes of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._moved: list[Place] | None = None
        """None before the first call."""

    def before(self) -> Numbers:
        """What may move, before a call."""
        places = self._all() if self._moved is None else self._moved
        return {place: _noted(place) for place in places}

    def moved(self, before: Numbers) -> Numbers:
        """That of it which the call has moved."""
        if self._moved is None:
            now = {place: _noted(place) for place in before if _is_still_number(place)}
            self._moved = [
                place
                for place in now
                if not (_are_same_items if isinstance(place, Contents) else _is_same)(
                    now[place], before[place]
                )
            ]
        return {place: before[place] for place in self._moved if place in before}

    @contextmanager
    def held(self, moved: Numbers) -> Iterator[None]:
        """They are as before the first call, and afterwards as they are now."""
        now = {place: _noted(place) for place in moved}
        for place, value in moved.items():
            _put(place, value)
        try:
            yield
        finally:
            for place, value in now.items():
                _put(place, value)

    def _all(self) -> Iterator[Place]:
        yield from (_PYTHON, _NUMPY)
        for module in self._modules:
            for name, value in vars(module).items():
                if _is_number(value):
                    yield module, name
                elif name not in _OWN_FIELDS:
                    yield from _contents_of(value)


def _is_number(value: Any) -> bool:
    return type(value) in _KINDS or isinstance(value, torch.Generator)


def _contents_of(value: Any) -> Iterator[Contents]:
    """An attribute that can change without being replaced: a container, or a function's cells."""
    if isinstance(value, list | dict | set | deque):
        yield Contents(value)
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # a cell may be empty
            content = cell.cell_contents
            yield Contents(content if isinstance(content, list | dict | set | deque) else cell)


def _is_still_number(place: Place) -> bool:
    if isinstance(place, Contents):
        return True
    module, name = place
    return module is None or _is_number(vars(module).get(name))


def _noted(place: Place) -> Any:
    if isinstance(place, Contents):
        return place.noted()
    module, name = place
    if module is None:
        return random.getstate() if place == _PYTHON else np.random.get_state(legacy=False)
    value = vars(module).get(name)
    return _Drawing(value, value.get_state()) if isinstance(value, torch.Generator) else value


def _put(place: Place, value: Any) -> None:
    if isinstance(place, Contents):
        place.put(value)
        return
    module, name = place
    if module is None:
        (random.setstate if place == _PYTHON else np.random.set_state)(value)
        return
    if isinstance(value, _Drawing):
        value.generator.set_state(value.state)
        value = value.generator
    vars(module)[name] = value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, _Drawing) and isinstance(other, _Drawing):
        return one.generator is other.generator and torch.equal(one.state, other.state)
    if isinstance(one, dict) and isinstance(other, dict):
        return bool(_position(one) == _position(other))
    return type(one) is type(other) and bool(one == other)


def _are_same_items(one: Any, other: Any) -> bool:
    """True if two contents are the same objects; equal numbers are the same."""
    if not isinstance(one, list | dict | set | deque):
        return _are_same_objects(one, other)
    ours, theirs = list(one), list(other)
    if isinstance(one, dict):
        ours, theirs = [*ours, *one.values()], [*theirs, *other.values()]
    return len(ours) == len(theirs) and all(map(_are_same_objects, ours, theirs))


def _are_same_objects(one: Any, other: Any) -> bool:
    return one is other or (type(one) in _KINDS and _is_same(one, other))


def _position(state: Mapping[str, Any]) -> Any:
    """Where NumPy's generator stands, as what can be compared."""
    inner = state["state"].items()
    found = {key: v.tobytes() if isinstance(v, np.ndarray) else v for key, v in inner}
    return found, state.get("has_gauss")


# Buffers of modules that are computed twice: running means and the like move once a step.
#
# In place of the running statistics of batch norms, whose training results do not depend on them,
# the second call writes to others, which nobody reads. Whatever else the first call was seen to
# write to is for the second call what it was for the first, and put back after it. All that may be
# written to is copied for the very first call, and what was, for later ones: a buffer that first
# moves in a later step is only put back then, which is told.


_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATISTICS = _MEAN, _VARIANCE, _COUNT = "running_mean", "running_var", "num_batches_tracked"


class SeenBuffer(NamedTuple):
    """A buffer before a call."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor | None
    """A copy, where one was made."""


class Unmoved:
    """The buffers of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inner = list(dict.fromkeys(each for outer in modules for each in outer.modules()))
        self._norms = [each for each in inner
                       if isinstance(each, _NormBase) and type(each) in _PLAIN_NORMS]  # fmt: skip
        self._watched = [(each, name) for each in inner if type(each) not in _PLAIN_NORMS
                         for name in each._buffers]  # fmt: skip
        # Kernels of norms write to their running means unseen by autograd.
        self._unseen = {place for place in self._watched if isinstance(place[0], _NormBase)}
        self._moved: set[tuple[nn.Module, str]] | None = None
        """None before the first call."""
        self.numbers = OwnNumbers(inner)
        self._spare: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}

    def spares(self) -> list[torch.Tensor]:
        """What is written to in the second call, made where the buffers are by now."""
        for norm in self._norms:
            for name in (_MEAN, _VARIANCE):
                self._spared(norm._buffers[name])
        return list(self._spare.values())

    def before(self) -> list[SeenBuffer]:
        """The watched buffers before a call."""
        found = []
        for module, name in self._watched:
            if (buffer := module._buffers[name]) is not None:
                is_copied = self._moved is None or (module, name) in self._moved
                value = buffer.clone() if is_copied else None
                found.append(SeenBuffer(module, name, buffer, buffer._version, value))
        return found

    def moved(self, before: Sequence[SeenBuffer]) -> list[SeenBuffer]:
        """Those of them that the call has written to or replaced."""
        found = [
            seen
            for seen in before
            if seen.module._buffers[seen.name] is not seen.buffer
            or seen.buffer._version != seen.version
            or (seen.module, seen.name) in self._unseen
        ]
        for seen in found:
            if seen.value is None and seen.buffer._version != seen.version:
                warnings.warn(
                    f"{seen.name} of a {type(seen.module).__name__} has first moved in this step; "
                    "what is computed again finds it moved, from the next step on as it was",
                    CaptureWarning, 2,
                )  # fmt: skip
        places = {(seen.module, seen.name) for seen in found}
        self._moved = places if self._moved is None else self._moved | places
        return found

    @contextmanager
    def held(self, moved: Sequence[SeenBuffer]) -> Iterator[None]:
        """They are as before the first call, and whatever is written to them meanwhile is as if it
        had not been."""
        norms = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        found = [(norm, {name: norm._buffers[name] for name in _STATISTICS}) for norm in norms]
        for norm, own in found:
            spare = {name: self._spared(own[name]) for name in (_MEAN, _VARIANCE)}
            norm._buffers.update({**spare, _COUNT: None})
        now = [seen.module._buffers[seen.name] for seen in moved]
        kept = [(seen.buffer, seen.buffer.clone()) for seen in moved]
        for seen in moved:
            seen.module._buffers[seen.name] = seen.buffer
            if seen.value is not None:
                _write(seen.buffer, seen.value)
        try:
            yield
        finally:
            for norm, own in found:
                norm._buffers.update(own)
            for seen, buffer in zip(moved, now, strict=True):
                seen.module._buffers[seen.name] = buffer
            for buffer, value in kept:
                _write(buffer, value)

    def _spared(self, like: torch.Tensor | None) -> torch.Tensor | None:
        if like is None:
            return None
        key = like.shape, like.dtype, like.device
        if key not in self._spare:
            self._spare[key] = torch.zeros_like(like)
        return self._spare[key]


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)


# Modules that are computed again for their backward pass, as if it had been once.
#
# Numbers stand for what autograd saves in the first call. When the backward pass asks for one of
# them, the function is called again, and what autograd would save then is what they stand for;
# once all is there the call is broken off. That is how checkpoints of PyTorch work that are not
# reentrant. These take less of the host's time for each saved tensor: where ops are small, a step
# takes 1.9 to 2.1 plain ones with these and 2.5 to 3.1 with PyTorch's
# (`benchmarks/memory/host_time.py`). Buffers are as they were, and move once (`unmoved`), as do
# numbers of Python that modules have (`own_numbers`), random numbers are drawn again where asked
# for, and autocast is as it was.


Function = Callable[..., Any]
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""What stands for a tensor that autograd saves, and the tensor that something stands for."""


def computed_again(
    buffers: Unmoved,
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    repeats_draws: bool = True,
    keeping: Hooks | None = None,
) -> Any:
    """What a function gives; what it saves is made again in its backward pass.

    ``buffers`` are those of the modules that it calls. Once it has changed in place what it was
    given, nothing can be made again out of that; what it saves from there on is kept, by hooks of
    autograd where there are any.
    """
    call = _Call(buffers, function, args, kwargs, keeping or (kept_as_is, KeptAsIs.unchanged),
                 repeats_draws=repeats_draws)  # fmt: skip
    with saved_tensors_hooks(call.pack, call.unpack):
        result = function(*args, **kwargs)
    call.seen = buffers.moved(call.seen)
    call.numbers = buffers.numbers.moved(call.numbers)
    return result


class KeptAsIs(NamedTuple):
    """A tensor that autograd saves, and how often it had been changed by then: PyTorch looks for
    changes of what it saves itself, and not of what hooks have packed."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        """The tensor; raises where it is not what was saved."""
        if self.tensor._version != self.version:
            raise RunError(
                f"a tensor {list(self.tensor.shape)} that the backward pass needs was changed in "
                "place after it was saved",
                hint="write y = y + 1 for y += 1 where an op before it needs y",
            )
        return self.tensor


def kept_as_is(tensor: torch.Tensor) -> KeptAsIs:
    """Without the op that made it: a result that knows the op which saves it would keep that op,
    and all that the step saved, alive until a backward pass comes."""
    return KeptAsIs(tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version)


class _AllThere(BaseException):
    """What was asked for is made; not an error, so that no function takes it for one."""


class _SavedInputs(torch.autograd.Function):
    """Autograd saves the inputs as it saves everything: hooks around see them, and a change in
    place is told."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Call:
    """One call of a function, and how it is made again."""

    def __init__(
        self, buffers: Unmoved, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any],
        keeping: Hooks, *, repeats_draws: bool,
    ) -> None:  # fmt: skip
        self._buffers, self._function = buffers, function
        self._keep, self._kept = keeping
        leaves, self._structure = tree_flatten((tuple(args), dict(kwargs)))
        # What was one tensor must be one again: attention takes another way where query, key and
        # value are.
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        place = {number: at for at, number in enumerate(tensors)}
        self._place = [place.get(id(leaf), -1) for leaf in leaves]
        self._others = [None if id(leaf) in place else leaf for leaf in leaves]
        given = list(tensors.values())
        anchor = torch.empty(0, requires_grad=True)
        # All of it, and not its function alone: PyTorch 2.11 frees what that saved without it.
        self._inputs: torch.Tensor = _SavedInputs.apply(anchor, *given)  # type: ignore[no-untyped-call]
        kinds = dict.fromkeys((*(tensor.device.type for tensor in given[:1]), "cpu"))
        self._autocast = {kind: autocast_dtype(kind) for kind in kinds}
        self._is_cached = torch.is_autocast_cache_enabled()
        self._device = torch.get_default_device()
        self._draws = _Draws(given) if repeats_draws else None
        self._given = [(_count_of(tensor), tensor._version) for tensor in given]
        """How often what it was given is changed, now and before the first call."""
        self.seen = buffers.before()
        self.numbers = buffers.numbers.before()
        self._shapes: list[torch.Size] = []
        """Of what autograd saved the first time."""
        self._made: list[torch.Tensor | None] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        """The number that stands for a tensor, or what is kept of it."""
        if self._is_changed():
            return self._keep(tensor)
        self._shapes.append(tensor.shape)
        return len(self._shapes) - 1

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that a number stands for; it is asked for once in a backward pass."""
        if not isinstance(packed, int):
            return self._kept(packed)
        number = packed
        if not self._made or self._made[number] is None:
            self._make()
        tensor, self._made[number] = self._made[number], None
        assert tensor is not None
        return tensor

    def _is_changed(self) -> bool:
        return any(count._version != version for count, version in self._given)

    def _make(self) -> None:
        if self._is_changed():
            # Not left to autograd: what hooks have packed is given back whatever became of it.
            raise RunError(
                "what a part of the model was given is changed in place afterwards, and it cannot "
                "be computed again",
                hint="write x = x + part(x) for x += part(x), or keep more memory so that it runs "
                "once",
            )
        shapes, made = self._shapes, list[KeptAsIs]()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape != shapes[len(made)]:
                raise _different(f"{tuple(shapes[len(made)])} first and {tuple(tensor.shape)} then")
            tensor = tensor.detach() if tensor.requires_grad else tensor
            made.append(KeptAsIs(tensor, tensor._version))
            if len(made) == len(shapes):
                raise _AllThere
            return tensor

        function: Any = self._inputs.grad_fn
        saved = function.saved_tensors
        leaves = [saved[at] if at >= 0 else other
                  for at, other in zip(self._place, self._others, strict=True)]  # fmt: skip
        args, kwargs = tree_unflatten(leaves, self._structure)
        with self._as_before():
            try:
                with torch.enable_grad(), saved_tensors_hooks(pack, _itself):
                    self._function(*args, **kwargs)
            except _AllThere:
                pass
            # Before buffers are put back, which is a change of them, too.
            self._made = [each.unchanged() for each in made]
        if len(made) < len(shapes):
            raise _different(f"{len(shapes)} tensors first and {len(made)} then")

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """What a computation depends on besides its arguments is as it was."""
        with ExitStack() as stack:
            if self._draws is not None:
                stack.enter_context(self._draws.again())
            for kind, dtype in self._autocast.items():
                if dtype is not None or autocast_dtype(kind) is not None:
                    stack.enter_context(torch.autocast(
                        kind, dtype=dtype, enabled=dtype is not None, cache_enabled=self._is_cached
                    ))  # fmt: skip
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            stack.enter_context(self._buffers.held(self.seen))
            stack.enter_context(self._buffers.numbers.held(self.numbers))
            yield


class _Draws:
    """Where the generators of random numbers stand."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._on_cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)
        kinds = (tensor.device.type for tensor in tensors if tensor.device.type != "cpu")
        self._kind = next(kinds, "cuda")

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same numbers are drawn once more; afterwards others go on where they were."""
        with torch.random.fork_rng(self._devices, device_type=self._kind):
            torch.set_rng_state(self._on_cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            yield


def _count_of(tensor: torch.Tensor) -> torch.Tensor:
    """What has the tensor's count of changes in place, and none of its memory."""
    count = tensor.detach()
    count.data = count.new_empty(0)
    return count


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _different(told: str) -> RunError:
    return RunError(
        f"a part of the model saves other tensors when it is computed again: {told}",
        hint="let it do the same for the same input, or keep more memory so that it runs once",
    )
