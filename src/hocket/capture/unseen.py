"""Detect side effects that are not recorded calls: replaced buffers, Python state, seeds, hooks.

If only the calls were run, results would differ: a replaced buffer would keep its value from before
the first step, or `torch.utils.checkpoint` would not repeat its random draws. A detected side
effect is described in ``Recording.unseen``, and a trace with one does not run in place of the
model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
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


def held_tensors(model: nn.Module) -> HeldByName:
    """Buffers and plain tensor attributes, by module path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if issubclass(type(value), torch.Tensor)
    }


def note_replaced(recorder: Recorder, model: nn.Module, before: HeldByName) -> None:
    """Note buffers, and tensor attributes that the step reads, that the step has replaced.

    An attribute that is only written, such as a loss stored on a module, does not affect the step.
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
    """Recorder of a second step, which starts from the state that the first step has left."""

    def __init__(self, module_names: dict[int, str], first: Recorder) -> None:
        super().__init__(module_names)
        self._first = first
        self._tainted = _dependent_storages(first.recording)
        self.has_read_state = False
        """True if an op has read state that the first run computed from batch, parameters or random
        draws, such as a recurrent state. State that depends on none of these is a cache."""

    def take_unknown(self, tensor: torch.Tensor) -> None:
        """Accept a tensor of the first run as a source."""
        self.has_read_state |= self._first.storage_of(tensor) in self._tainted
        self.add_source("left", Role.BUFFER, tensor)
        constant = self._first.constant_of(tensor)
        number = self.value_of(tensor)
        if constant is not None and number is not None:
            self.known_constants[number] = constant


def note_python_state(
    first: Recorder, second: SecondRun, numbers: tuple[list[Any], list[Any], list[Any]]
) -> None:
    """Note Python state that makes later steps differ from the traced one.

    ``numbers`` are the numbers in the state before, between and after both runs. Numbers that only
    the first run changes are allowed, for example a size that is set once or the length of a cache.
    The second run must then make the same calls, otherwise the trace would be valid for the first
    step only.
    """
    before, between, after = numbers
    if second.has_read_state:
        first.recording.unseen = "a step reads a tensor that the step before has left"
    elif between != after:
        first.recording.unseen = "it changes numbers or lists of its own in each step"
    elif before != between and _dependent_calls(first) != _dependent_calls(second):
        first.recording.unseen = "its first step computes something else than the following ones"


def _dependent_calls(recorder: Recorder) -> list[str]:
    """Forward calls, with arguments, whose results depend on batch, parameters or random draws."""
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
    """Storages whose content depends on batch, parameters or random draws."""
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
    """Note a trained parameter to which the step itself writes, as ``nn.Embedding(max_norm=…)``
    does.

    The optimizer's update in the program would apply to the version from before that write.
    """
    recording = recorder.recording
    storage_of = [value.storage for value in recording.values]
    written = {storage_of[number] for call in recording.calls for number in call.writes}
    for source in recording.sources:
        if source.value in recording.gradients and storage_of[source.value] in written:
            recording.unseen = f"it writes into the parameter {source.name!r}, which it trains"


def note_hooked(recording: Recording, sources: Iterable[NamedTensor]) -> None:
    """Note a parameter with a post-accumulate-grad hook.

    Such a hook often runs the optimizer update, which is not among the recorded calls.
    """
    for name, _, tensor in sources:
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
            recording.unseen = f"a hook runs when the gradient of {name!r} is there"


def hooked_modules(model: nn.Module) -> list[str]:
    """Paths of modules with user hooks, which run during tracing but not in traced steps.

    PyTorch's own hooks, such as those of weight norm, compute a part of the step and are traced.
    """
    return [
        path or type(module).__name__
        for path, module in model.named_modules()
        for table in _HOOKS
        for hook in getattr(module, table).values()
        if not str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.")
    ]


@contextmanager
def following_generator(recorder: Recorder) -> Iterator[None]:
    """Report to the recorder when the step reads, restores or seeds PyTorch's generator.

    Activation checkpoints read the state before a module runs, and restore it when the module runs
    a second time. Any other state makes later draws unknown.
    """
    own = {name: getattr(torch, name) for name in ("get_rng_state", "set_rng_state", "manual_seed")}
    here = threading.get_ident()

    def get_state() -> torch.Tensor:
        state: torch.Tensor = own["get_rng_state"]()
        if threading.get_ident() == here:
            recorder.draws.note_state(state)
        return state

    def set_state(state: torch.Tensor) -> None:
        # Another thread may train meanwhile, and draw the same numbers again.
        if threading.get_ident() == here and not recorder.draws.set_back(state):
            recorder.is_seeded = True
        own["set_rng_state"](state)

    def seed(number: Any) -> torch.Generator:
        recorder.is_seeded |= threading.get_ident() == here
        generator: torch.Generator = own["manual_seed"](number)
        return generator

    followed = {"get_rng_state": get_state, "set_rng_state": set_state, "manual_seed": seed}
    try:
        for name, function in followed.items():
            setattr(torch, name, function)
        yield
    finally:
        for name, function in own.items():
            setattr(torch, name, function)
