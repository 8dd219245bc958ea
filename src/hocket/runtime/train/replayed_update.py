"""Replay the step of an optimizer as a CUDA graph, where that is the same as calling it.

After a step that is launched at once the host still asks for each kernel of the update, which takes
longer than a small model computes. Fused optimizers of PyTorch keep all that changes on the device:
as long as parameters, gradients, states and settings lie where they lay and say what they said,
their step is the same kernels again. Anything else is called as before: other optimizers, hooks, a
learning rate that a schedule has changed. O(parameters) comparisons per update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizers

from hocket.base.errors import one_line
from hocket.runtime.train.replay import NUM_WARM

_KNOWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
Capture = Callable[[Callable[[], Any]], Callable[[], None]]


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of what a function asks for."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class ReplayedUpdate:
    """Steps of an optimizer: called, and replayed once they repeat."""

    def __init__(self, capture: Capture = captured) -> None:
        self._capture = capture
        self._replay: Callable[[], None] | None = None
        self._origin: tuple[Any, ...] | None = None
        """What the steps before were of."""
        self._num_alike = 0
        self.refusal = ""
        """Why steps are not replayed; empty where they are or will be."""

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """One step."""
        can_repeat = not self.refusal and _can_repeat(optimizer)
        origin = tuple(_origin(optimizer)) if can_repeat else None
        if origin is None or origin != self._origin:
            self._origin, self._replay, self._num_alike = origin, None, 0
        self._num_alike += 1
        if origin is not None and self._num_alike > NUM_WARM and self._replay is None:
            try:
                self._replay = self._capture(lambda: _capturable_step(optimizer))
            # What cannot be captured is no failure: it is called.
            except Exception as error:
                self.refusal = one_line(error)
        if self._replay is None:
            optimizer.step()
        else:
            self._replay()


def _can_repeat(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that a step changes is on the device, and nobody else looks on."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizers._global_optimizer_pre_hooks,
        torch_optimizers._global_optimizer_post_hooks,
    )
    return (
        type(optimizer) in _KNOWN
        and all(group["fused"] for group in optimizer.param_groups)
        and not any(hooks)
    )


def _origin(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Where everything is that a step reads, and its settings."""
    for group in optimizer.param_groups:
        yield tuple(_told(value) for key, value in group.items() if key != "params")
        for parameter in group["params"]:
            yield _told(parameter), _told(parameter.grad)
            yield tuple(map(_told, optimizer.state.get(parameter, {}).values()))


def _told(value: Any) -> Any:
    return (value.data_ptr(), value.device) if isinstance(value, torch.Tensor) else value


def _capturable_step(optimizer: torch.optim.Optimizer) -> None:
    """A step while a graph is captured, which optimizers want to be told of."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        optimizer.step()
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value
