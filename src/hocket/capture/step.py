"""Run one step of a model under the recorder: forward, loss, backward, gradients.

`record_fake_step` runs the step on fake tensors, for an accelerator, a GPU or the CPU;
`record_real_step` runs it on copies of the real tensors. Both note side effects that the recorded
calls do not show.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_flatten

from hocket.base.errors import UsageError
from hocket.capture.attention import ACCELERATOR, fused_kernels
from hocket.capture.autocast import cuda_autocast
from hocket.capture.fake import (
    NamedTensor,
    all_tensors,
    dressed,
    fake_mode,
    fake_twins,
    flat_weights,
    lay_apart,
    map_batch,
)
from hocket.capture.held import SavedByNode, find_saved, note_held
from hocket.capture.loss import Loss, tensors_of
from hocket.capture.packed import masks_as_run
from hocket.capture.record import Recorder
from hocket.capture.recording import Recording, Ref, Returned
from hocket.capture.recurrent import accept_weights_apart, stand_in_recurrence
from hocket.capture.swap import PythonState, swapped_tensors
from hocket.capture.unseen import (
    SecondRun,
    following_generator,
    held_tensors,
    note_hooked,
    note_python_state,
    note_replaced,
    note_written,
)
from hocket.graph import Phase, Role

Forward = Callable[[nn.Module, Any], Any]
"""Function that applies a model to a batch and returns what the loss is computed from."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of the recording of a step."""

    loss: Loss
    training: bool
    """True for forward, loss and backward; False for inference."""
    forward: Forward | None = None
    """Applies the model to the batch; None calls the model."""
    device: str = "cpu"
    """Device type whose kernels are recorded."""
    in_one_piece: bool = True
    """True if recurrent layers have their weights in one buffer on a GPU, as in plain PyTorch."""


def record_fake_step(model: nn.Module, batch: Any, options: StepOptions) -> Recording:
    """Record a step on fake tensors."""
    named = all_tensors(model, batch)
    mode = fake_mode(model)
    stands_in = options.device == ACCELERATOR
    # Accelerators are recorded on fake CPU tensors, with their ops substituted.
    place = "cpu" if stands_in else options.device
    is_flat = options.in_one_piece and torch.device(place).type == "cuda"
    with mode:
        twins = fake_twins([t for _, _, t in named], place, flat_weights(model) if is_flat else [])
    fake_batch = map_batch(batch, twins)
    sources = [(name, role, twins[id(tensor)]) for name, role, tensor in named]
    originals = frozenset(t.untyped_storage()._cdata for _, _, t in named)
    quiet = _quiet(logging.getLogger("torch._subclasses.fake_tensor"))
    with swapped_tensors(model, twins, options.forward, options.loss) as fake_model:
        if not options.in_one_piece and flat_weights(fake_model):
            accept_weights_apart()
            with mode:
                lay_apart(fake_model)
        with _standing_in(batch) if stands_in else nullcontext(), mode, quiet:
            recording = _record(fake_model, fake_batch, sources, options, originals)
    note_hooked(recording, named)
    return recording


@contextmanager
def _standing_in(batch: Any) -> Iterator[None]:
    """Record ops that CPUs compute differently as an accelerator would compute them."""
    # Kernels are registered for the whole process; `swapped_tensors` admits one thread at a time.
    with fused_kernels(), cuda_autocast(), stand_in_recurrence(), masks_as_run(batch):
        yield


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence a logger whose messages about a failed op repeat the error that it raises."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def record_real_step(model: nn.Module, batch: Any, options: StepOptions) -> Recording:
    """Record a step that computes with real values, on copies of the model's tensors."""
    named = all_tensors(model, batch)
    copies = {
        id(t): dressed(t, t.detach().clone()) for _, role, t in named if role != Role.INPUT
    }  # fmt: skip
    sources = [(name, role, copies.get(id(t), t)) for name, role, t in named]
    swapped = swapped_tensors(model, copies, options.forward, options.loss)
    with torch.random.fork_rng(), swapped as real_model:
        recording = _record(real_model, batch, sources, options)
    note_hooked(recording, named)
    return recording


def _record(
    model: nn.Module,
    batch: Any,
    sources: Sequence[NamedTensor],
    options: StepOptions,
    originals: frozenset[int] | None = None,
) -> Recording:
    names = {id(module): path for path, module in model.named_modules()}
    recorder, held = Recorder(names, originals), held_tensors(model)
    roots = model, options.forward, options.loss
    for name, role, tensor in sources:
        recorder.add_source(name, role, tensor)
    before = PythonState(*roots)
    with _module_hooks(recorder), following_generator(recorder), recorder:
        output, kept, saved = _run_step(recorder, model, batch, options)
    if options.training:
        note_held(recorder, saved)
        _collect_gradients(recorder, sources)
        note_written(recorder)
    note_replaced(recorder, model, held)
    if before.has_drawn():
        recorder.recording.unseen = "it draws from Python's or numpy's generator"
    elif originals is not None and before.is_changed():
        # A cache is filled once, which is harmless; a counter changes in each step, which a trace
        # cannot repeat. A second run tells one from the other.
        second, between = SecondRun(names, recorder), PythonState(*roots)
        for name, role, tensor in sources:
            second.add_source(name, role, tensor)
            tensor.grad = None
        with second:
            _run_step(second, model, batch, options)
        numbers = (before.numbers, between.numbers, PythonState(*roots).numbers)
        note_python_state(recorder, second, numbers)
    recorder.recording.returned = _returned(recorder, output)
    kept_values = [recorder.value_of(tensor) for tensor in kept]
    recorder.recording.outputs = list(dict.fromkeys(v for v in kept_values if v is not None))
    return recorder.recording


def _run_step(
    recorder: Recorder, model: nn.Module, batch: Any, options: StepOptions
) -> tuple[Any, list[torch.Tensor], list[SavedByNode]]:
    """Output of the model, tensors kept of it, and tensors that autograd has saved."""
    with torch.autograd.set_multithreading_enabled(False):
        with nullcontext() if options.training else torch.no_grad():
            output = (options.forward or apply_model)(model, batch)
            kept = [options.loss(output)] if options.training else tensors_of(output)
        if not options.training:
            return output, kept, []
        saved = find_saved(recorder, kept[0])
        _run_backward(recorder, kept[0])
        return output, kept, saved


def _returned(recorder: Recorder, output: Any) -> Returned:
    leaves, form = tree_flatten(output)
    numbers = [recorder.value_of(x) if isinstance(x, torch.Tensor) else None for x in leaves]
    return Returned(
        form,
        tuple(
            None if number is None and isinstance(leaf, torch.Tensor)
            else leaf if number is None else Ref(number)
            for leaf, number in zip(leaves, numbers, strict=True)
        ),
    )  # fmt: skip


def _run_backward(recorder: Recorder, loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise UsageError(
            "the loss does not depend on any parameter that requires a gradient",
            hint="capture with optimizer=None for inference, or unfreeze a parameter",
        )
    recorder.phase = Phase.BACKWARD
    # Autocast is for the forward pass and the loss; its cast weights are not held after the step.
    on_cuda = torch.is_autocast_enabled("cuda")
    without_cuda = torch.autocast("cuda", enabled=False) if on_cuda else nullcontext()
    with torch.autocast("cpu", enabled=False), without_cuda:
        loss.backward()  # type: ignore[no-untyped-call]
    torch.clear_autocast_cache()


def _collect_gradients(recorder: Recorder, sources: Sequence[NamedTensor]) -> None:
    # A parameter may move to other memory during the step, as cuDNN's recurrent layers do.
    before = {source.name: source.value for source in recorder.recording.sources}
    for name, role, tensor in sources:
        if role != Role.PARAMETER or tensor.grad is None:
            continue
        parameter = before.get(name, recorder.value_of(tensor))
        gradient = recorder.value_of(tensor.grad)
        if parameter is not None and gradient is not None:
            recorder.recording.gradients[parameter] = gradient


@contextmanager
def _module_hooks(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module is running; modules called in other threads bypass it."""
    own = threading.get_ident()

    def enter(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == own:
            recorder.enter_module(module, args)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == own:
            recorder.leave_module(module, args, output)

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def apply_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: by keyword, by position, or with the one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)
