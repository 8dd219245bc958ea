"""Effects of a step beyond its calls: replaced buffers, a seeded generator, hooks.

The calls alone would compute something else then: with what a buffer was before the first step, or
with other draws where `torch.utils.checkpoint` draws the same again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hocket.capture.fake import NamedTensor
from hocket.capture.record import Recorder
from hocket.capture.recording import Recording, Ref, map_tree
from hocket.graph import Phase, Role

HeldByName = dict[tuple[str, str], torch.Tensor]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SETTERS = ("set_rng_state", "manual_seed")


def held_tensors(model: nn.Module) -> HeldByName:
    """Buffers and tensors that are plain attributes, by the path of their module and their name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if issubclass(type(value), torch.Tensor)
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


class SecondRun(Recorder):  # type: ignore[no-untyped-call]
    """Records a step once more, after a first run has changed what the model holds."""

    def __init__(self, module_names: dict[int, str], first: Recorder) -> None:
        super().__init__(module_names)
        self._first = first
        self._tainted = _dependent_storages(first.recording)
        self.has_read_state = False
        """True once an op has read what the first run has computed from batch, parameters or
        draws, as a recurrent state is; what depends on none of them is a cache."""

    def take_unknown(self, tensor: torch.Tensor) -> None:
        """Take a tensor of the first run as a source."""
        self.has_read_state |= self._first.storage_of(tensor) in self._tainted
        self.add_source("left", Role.BUFFER, tensor)
        constant = self._first.constant_of(tensor)
        number = self.value_of(tensor)
        if constant is not None and number is not None:
            self.known_constants[number] = constant


def note_python_state(
    first: Recorder, second: SecondRun, changed_by_first: bool, changed_by_second: bool
) -> None:
    """Note Python state that makes steps differ from the traced one.

    Numbers that the first run has changed may stay: a size that is set once, a cache that is
    filled. Then the second run must make the same calls, or the traced step would be the first
    one for ever.
    """
    if second.has_read_state:
        first.recording.unseen = "a step reads a tensor that the step before has left"
    elif changed_by_second:
        first.recording.unseen = "it changes numbers or lists of its own in each step"
    elif changed_by_first and _dependent_calls(first) != _dependent_calls(second):
        first.recording.unseen = "its first step computes something else than the following ones"


def _dependent_calls(recorder: Recorder) -> list[str]:
    """Forward calls whose results depend on batch, parameters or draws, with their arguments."""
    recording = recorder.recording
    tainted = _dependent_storages(recording)
    layout = lambda leaf: (  # noqa: E731
        recording.values[leaf.number].layout if isinstance(leaf, Ref) else leaf
    )
    return [
        f"{call.function} {map_tree((call.args, call.kwargs), layout)}"
        for call in recording.calls
        if call.phase == Phase.FORWARD
        and any(recording.values[n].storage in tainted for n in (*call.reads, *call.made))
    ]


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
            found |= {values[number].storage for number in call.made}
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
