"""Replay the step of an optimizer as a CUDA graph, where that is the same as calling it.

After a step that is launched at once the host still asks for each kernel of the update, which takes
longer than a small model computes. Fused optimizers of PyTorch keep all that changes on the device:
as long as parameters, gradients, states and settings lie where they lay and say what they said,
their step is the same kernels again. Anything else is called as before: other optimizers, hooks, a
learning rate that a schedule has changed. O(parameters) comparisons per update.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.optim import optimizer as torch_optimizers

from hocket.base.errors import one_line
from hocket.runtime.offload.optimizer_parts import count_fused

# One rule for everything that is warmed up, captured and replayed as a CUDA graph.
#
# A graph repeats calls with the addresses and numbers that were right when it was captured. So
# what is to be replayed states all of those as a key. The first steps with a key run call by call,
# so that libraries choose their kernels and take what memory they need; the next one is captured,
# and from then on it is replayed. Another key begins anew. What cannot be captured is no failure:
# it goes on call by call, and says why.


NUM_WARM = 2
"""Steps call by call before the capture."""
REPLAYED = "replayed as a CUDA graph"
NOT_CUDA = "graphs are for CUDA devices"
AS_ASKED = "as asked for"


def called(why: str) -> str:
    """How steps run that are not replayed, for people."""
    return f"call by call: {why}"


def never_replayed(device: torch.device) -> str:
    """The same of steps that nobody means to replay."""
    return called(AS_ASKED if device.type == "cuda" else NOT_CUDA)


Captured = TypeVar("Captured")


class Same:
    """A key that is met by one object alone, whatever it holds."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class Repeats(Generic[Captured]):
    """Whether a step is one of those before again, and what was captured of them."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        """Why steps are not replayed; empty where they are or will be."""
        self.captured: Captured | None = None
        self._key: Any = None
        self._num_alike = 0

    @property
    def told(self) -> str:
        """How the next step with the same key runs, for people."""
        if self.refusal:
            return called(self.refusal)
        if self.captured is not None or self._num_alike >= NUM_WARM:
            return REPLAYED
        left = NUM_WARM - self._num_alike
        return called(f"{left} more {'step' if left == 1 else 'steps'} alike before a graph")

    def find(self, key: Any, capture: Callable[[], Captured]) -> Captured | None:
        """What to replay; None where this step is to run call by call."""
        if self.refusal:
            return None
        if key != self._key:
            self._key, self._num_alike, self.captured = key, 0, None
        if self.captured is None and self._num_alike >= NUM_WARM:
            try:
                self.captured = capture()
            # Whatever a kernel or a library raises: steps go on without a graph.
            except Exception as error:
                # The end of a capture that has failed raises too, and says less than what failed.
                causes = [error, *([error.__context__] if error.__context__ else [])]
                self.refusal = "; after ".join(map(one_line, causes))
                del causes
        if self.refusal and torch.cuda.is_available():
            # The pool of a graph that failed goes with its last reference, which tracebacks hold.
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
        self._num_alike += 1
        return self.captured


# Replay the step of an optimizer as a CUDA graph, where that is the same as calling it.
#
# After a step that is launched at once the host still asks for each kernel of the update, which
# takes longer than a small model computes. Fused optimizers of PyTorch keep all that changes on
# the device: as long as parameters, gradients, states and settings lie where they lay and say what
# they said, their step is the same kernels again. Anything else is called as before: other
# optimizers, hooks, a learning rate that a schedule has changed. O(parameters) comparisons per
# update.


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
        self.repeats: Repeats[Callable[[], None]] = Repeats()
        self._hindrance = ""

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """One step."""
        replay, self._hindrance = None, update_hindrance(optimizer)
        if not self._hindrance:
            replay = self.repeats.find(
                tuple(_origin(optimizer)),
                lambda: self._capture(lambda: _capturable_step(optimizer)),
            )
        if replay is None:
            optimizer.step()
        else:
            replay()

    @property
    def told(self) -> str:
        """How the next update is launched, and why not as a whole; for people."""
        return called(self._hindrance) if self._hindrance else self.repeats.told


def with_update(passes: str, update: object) -> str:
    """How passes are launched, and the update where it is launched otherwise."""
    told = update.told if isinstance(update, ReplayedUpdate) else passes
    return passes if told == passes else f"{passes}; the update {told}"


def update_hindrance(optimizer: torch.optim.Optimizer, *, is_made_fused: bool = False) -> str:
    """Why an update has to be called: what it changes is on the host, or somebody looks on. With
    ``is_made_fused`` whoever calls it takes fused kernels, whatever the optimizer says."""
    hooks = {
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizers._global_optimizer_pre_hooks.values(),
        *torch_optimizers._global_optimizer_post_hooks.values(),
    } - {count_fused}
    if type(optimizer) not in _KNOWN:
        return f"{type(optimizer).__name__} may keep something on the host"
    if not is_made_fused and not all(group["fused"] for group in optimizer.param_groups):
        return "its optimizer was not made with fused=True"
    return "hooks of its optimizer look on" if hooks else ""


def _origin(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Where everything is that a step reads, and its settings."""
    for group in optimizer.param_groups:
        yield tuple(place_of(value) for key, value in group.items() if key != "params")
        for parameter in group["params"]:
            yield place_of(parameter), place_of(parameter.grad)
            yield tuple(map(place_of, optimizer.state.get(parameter, {}).values()))


def place_of(value: Any) -> Any:
    """Where a tensor is; anything else as it is."""
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
