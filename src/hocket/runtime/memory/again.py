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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from hocket.base.errors import RunError
from hocket.runtime.autocast import autocast_dtype
from hocket.runtime.memory.unmoved import Unmoved

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
