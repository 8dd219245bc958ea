"""Capture repeated steps and updates as CUDA graphs, and replay them.

A CUDA graph repeats kernels with the addresses and constants of its capture, so each step is
identified by a key of all of these. The first steps with a key are eager, so that libraries choose
kernels and allocate workspaces; the next one is captured, and later ones are replayed. A new key
starts over. A step that cannot be captured stays eager, and the reason is reported.

Optimizer updates are captured separately (`ReplayedUpdate`), because launching their kernels can
take the host longer than a small model computes. PyTorch's fused optimizers have all changing
values on the device. As long as addresses of parameters, gradients and states and all settings are
unchanged, a step runs the same kernels. Other optimizers, optimizer hooks, or a learning rate
changed by a scheduler make an update eager. O(parameters) comparisons per update.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizers
from torch.utils._pytree import tree_leaves, tree_map

from hocket.base.errors import one_line
from hocket.runtime.optimizer_parts import count_fused
from hocket.runtime.trace_options import autocast_dtype

NUM_WARM = 2
"""Number of eager steps before the capture."""
REPLAYED = "replayed as a CUDA graph"
NOT_CUDA = "CUDA graphs need a CUDA device"
AS_ASKED = "as requested"
_REPLAYABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
Captured = TypeVar("Captured")


def eager(reason: str) -> str:
    """Describe steps that are not replayed, with the reason."""
    return f"eager: {reason}"


def never_replayed(device: torch.device) -> str:
    """Describe steps for which replay is disabled, or impossible on the device."""
    return eager(AS_ASKED if device.type == "cuda" else NOT_CUDA)


class Same:
    """A key that equals only the key of the same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class GraphReplay(Generic[Captured]):
    """Decides for each step whether it is eager, captured or replayed."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        """Reason why steps are not replayed, or an empty string."""
        self.captured: Captured | None = None
        self._key: Any = None
        self._num_alike = 0

    @property
    def message(self) -> str:
        """Describe how the next step with the same key runs."""
        if self.refusal:
            return eager(self.refusal)
        if self.captured is not None or self._num_alike >= NUM_WARM:
            return REPLAYED
        left = NUM_WARM - self._num_alike
        return eager(f"{left} more {'step' if left == 1 else 'steps'} before the capture")

    def find(self, key: Any, capture: Callable[[], Captured]) -> Captured | None:
        """Return the captured step to replay, or None for an eager step.

        Calls ``capture`` once enough steps with this key were eager.
        """
        if self.refusal:
            return None
        if key != self._key:
            self._key, self._num_alike, self.captured = key, 0, None
        if self.captured is None and self._num_alike >= NUM_WARM:
            try:
                self.captured = capture()
            # Whatever a kernel or a library raises: training continues without a graph.
            except Exception as error:
                # The end of a failed capture raises an error of its own, which hides the first one.
                causes = [error, *([error.__context__] if error.__context__ else [])]
                self.refusal = "; after ".join(map(one_line, causes))
                del causes
        if self.refusal and torch.cuda.is_available():
            # Tracebacks hold the last references to the memory pool of a failed graph.
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
        self._num_alike += 1
        return self.captured


# ── optimizer steps ──────────────────────────────────────────────────────────────────────────────

Capture = Callable[[Callable[[], Any]], Callable[[], None]]


def captured_graph(run: Callable[[], Any]) -> Callable[[], None]:
    """Capture a function as a CUDA graph; return a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class ReplayedUpdate:
    """Runs steps of an optimizer: the first eagerly, repeated ones by graph replay."""

    def __init__(self, capture: Capture = captured_graph) -> None:
        self._capture = capture
        self.replay: GraphReplay[Callable[[], None]] = GraphReplay()
        self._eager_reason = ""

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Run one step."""
        replay, self._eager_reason = None, eager_update_reason(optimizer)
        if not self._eager_reason:
            replay = self.replay.find(
                tuple(_update_key(optimizer)),
                lambda: self._capture(lambda: _capturable_step(optimizer)),
            )
        if replay is None:
            optimizer.step()
        else:
            replay()

    @property
    def message(self) -> str:
        """Describe how the next update is launched."""
        return eager(self._eager_reason) if self._eager_reason else self.replay.message


def with_update(passes: str, update: object) -> str:
    """Describe how passes are launched, and how the update is if that differs."""
    message = update.message if isinstance(update, ReplayedUpdate) else passes
    return passes if message == passes else f"{passes}; update {message}"


def eager_update_reason(optimizer: torch.optim.Optimizer, *, is_made_fused: bool = False) -> str:
    """Return the reason why an update must be eager, or an empty string.

    With ``is_made_fused`` the caller uses fused kernels, regardless of the optimizer's setting.
    """
    hooks = {
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizers._global_optimizer_pre_hooks.values(),
        *torch_optimizers._global_optimizer_post_hooks.values(),
        # The hook of `optimizer_parts` only counts steps.
    } - {count_fused}
    if type(optimizer) not in _REPLAYABLE:
        return f"{type(optimizer).__name__} may keep state on the host"
    if not is_made_fused and not all(group["fused"] for group in optimizer.param_groups):
        return "its optimizer was not made with fused=True"
    return "its optimizer has hooks" if hooks else ""


def _update_key(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the optimizer's settings, and the addresses of all tensors that a step reads."""
    for group in optimizer.param_groups:
        yield tuple(address_of(value) for key, value in group.items() if key != "params")
        for parameter in group["params"]:
            yield address_of(parameter), address_of(parameter.grad)
            yield tuple(map(address_of, optimizer.state.get(parameter, {}).values()))


def address_of(value: Any) -> Any:
    """Return address and device of a tensor; return other values unchanged."""
    return (value.data_ptr(), value.device) if isinstance(value, torch.Tensor) else value


def _capturable_step(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer step during a capture, with ``capturable`` set meanwhile."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        optimizer.step()
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value


# ── parts of captured steps ──────────────────────────────────────────────────────────────────────
#
# A CUDA graph fixes memory addresses and choices of kernels at its capture. `model_key` returns
# those that depend on the model, so that a changed model is captured again; `StaticBatch` copies
# each batch into the memory that the graph reads; `on_stream` runs warm-up steps on a side stream,
# so that autograd and libraries allocate their workspaces for it before the capture. O(parameters +
# modules) per step.


def model_key(model: nn.Module, device: torch.device) -> tuple[Any, ...]:
    """Return the properties of a model on which the kernels and addresses of a step depend.

    These are the training modes of modules, the addresses of parameters and buffers, the frozen
    parameters, and autocast's dtype if autocast is enabled.
    """
    return (
        autocast_dtype(device.type),
        tuple(module.training for module in model.modules()),
        tuple(buffer.data_ptr() for buffer in model.buffers()),
        tuple((each.data_ptr(), each.requires_grad) for each in model.parameters()),
    )


def cloned(tree: Any) -> Any:
    """Clone the outputs of a graph, because the next replay overwrites its memory."""
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


class StaticBatch:
    """A batch in the memory that a CUDA graph reads; later batches are copied into it."""

    def __init__(self, batch: Any) -> None:
        self.batch = cloned(batch)

    def refill(self, batch: Any) -> None:
        """Copy the tensors of another batch with the same structure."""
        for own, given in zip(tree_leaves(self.batch), tree_leaves(batch), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given, non_blocking=True)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Launch kernels on a side stream, ordered after earlier work and before later work.

    Without a ``stream`` they are launched on the current stream.
    """
    if stream is None:
        yield
        return
    here = torch.cuda.current_stream(device)
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        here.wait_stream(stream)
