"""What a step does besides its calls: other tensors for buffers, the generator set, hooks.

The calls alone would compute something else then: with what a buffer was before the first step, or
with other draws where `torch.utils.checkpoint` draws the same again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hocket.capture.fake import NamedTensor
from hocket.capture.record import Recorder
from hocket.capture.recording import Recording
from hocket.graph import Role

HeldByName = dict[tuple[str, str], torch.Tensor]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_FIELDS = frozenset(vars(nn.Module()))
_SETTERS = ("set_rng_state", "manual_seed")


def held_tensors(model: nn.Module) -> HeldByName:
    """Buffers and tensors that are plain attributes, by the path of their module and their name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if isinstance(value, torch.Tensor)
    }


def note_replaced(recorder: Recorder, model: nn.Module, before: HeldByName) -> None:
    """Note a buffer, or an attribute that the step reads, which is another tensor after the step.

    An attribute that is only written, such as a loss that a module leaves there, changes nothing.
    """
    after = held_tensors(model)
    read = {number for call in recorder.recording.calls for number in call.reads}
    for (path, name), tensor in before.items():
        if after.get((path, name)) is tensor:
            continue
        is_buffer = name in model.get_submodule(path)._buffers
        if is_buffer or recorder.value_of(tensor) in read:
            place = f"{path}.{name}" if path else name
            recorder.recording.unseen = (
                f"it gives {place!r} another tensor in each step; write into it instead: "
                f"self.{name}.copy_(…)"
            )


def left_tensors(model: nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Tensors in plain attributes and in lists and dicts that are such, by id, with their place."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _OWN_FIELDS:
                continue
            inner = value.values() if isinstance(value, dict) else value
            items = inner if isinstance(value, dict | list | tuple) else (value,)
            place = f"{path}.{name}" if path else name
            found |= {id(each): (place, each) for each in items if isinstance(each, torch.Tensor)}
    return found


def note_state(
    recorder: Recorder,
    before: Container[int],
    model: nn.Module,
    run_again: Callable[[Recorder], object],
    second: Recorder,
) -> None:
    """Note a tensor that the step has left and a next step reads, as a recurrent state.

    One that depends on neither batch, parameters nor draws is a cache, and the same in every step.
    """
    tainted = _dependent_storages(recorder.recording)
    left = {
        place: tensor
        for number, (place, tensor) in left_tensors(model).items()
        if number not in before and recorder.storage_of(tensor) in tainted
    }
    if not left:
        return
    for place, tensor in left.items():
        second.add_source(place, Role.BUFFER, tensor)
    storages = {second.storage_of(tensor): place for place, tensor in left.items()}
    run_again(second)
    values = second.recording.values
    for number in (n for call in second.recording.calls for n in call.reads):
        if (where := storages.get(values[number].storage)) is not None:
            recorder.recording.unseen = f"a step reads {where!r}, which the step before has left"


def _dependent_storages(recording: Recording) -> set[int | None]:
    """Storages whose content depends on the batch, on parameters or on draws."""
    values = recording.values
    found: set[int | None] = {
        values[source.value].storage
        for source in recording.sources
        if source.role in (Role.INPUT, Role.PARAMETER)
    }
    for call in recording.calls:
        if call.draws or any(values[number].storage in found for number in call.reads):
            made = (*(n for n in call.outputs if n is not None), *call.writes)
            found |= {values[number].storage for number in made}
    return found


def note_written(recorder: Recorder) -> None:
    """Note a parameter that the step writes, as rows of `nn.Embedding(max_norm=…)` are, and trains.

    Its update would be of another version of it than the one that is there before the step.
    """
    recording = recorder.recording
    storage_of = [value.storage for value in recording.values]
    written = {storage_of[number] for call in recording.calls for number in call.writes}
    for source in recording.sources:
        if source.value in recording.gradients and storage_of[source.value] in written:
            recording.unseen = f"it writes into the parameter {source.name!r}, which it trains"


def note_hooked(recording: Recording, sources: Iterable[NamedTensor]) -> None:
    """Note a parameter with a hook that is called once its gradient is there.

    Such a hook may do anything, most often the update itself; calls do not show it.
    """
    for name, _, tensor in sources:
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
            recording.unseen = f"a hook runs when the gradient of {name!r} is there"


def hooked_modules(model: nn.Module) -> list[str]:
    """Paths of modules with hooks of the user's, which run while a step is traced and not in it.

    Those of PyTorch itself, as of weight norm, compute a part of the step, which is traced.
    """
    return [
        path or type(module).__name__
        for path, module in model.named_modules()
        for table in _HOOKS
        for hook in getattr(module, table).values()
        if not str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.")
    ]


@contextmanager
def noting_seeds(recorder: Recorder) -> Iterator[None]:
    """Have the recorder know when the step sets PyTorch's generator."""
    before = {name: getattr(torch, name) for name in _SETTERS}
    own = threading.get_ident()

    def noted(setter: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Another thread may train meanwhile, and draw the same numbers again.
            recorder.is_seeded |= threading.get_ident() == own
            return setter(*args, **kwargs)

        return call

    try:
        for name, setter in before.items():
            setattr(torch, name, noted(setter))
        yield
    finally:
        for name, setter in before.items():
            setattr(torch, name, setter)
