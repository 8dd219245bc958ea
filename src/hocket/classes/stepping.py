"""Training steps of several nets side by side, each with its own loss and optimizer.

On a GPU the step of each net is captured once as a CUDA graph and replayed on its own stream.
Launching a small net takes longer than computing it, and several nets together fill the device. On
a CPU, or if a net cannot be captured, steps run eagerly. The learning rate rises for a fifth of the
training and then decays along a cosine; with a time limit, it follows the elapsed fraction of time
(Li et al., "Budgeted training", 2020).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hocket.base.errors import one_line
from hocket.classes.settings import NetTraining

OnStep = Callable[[int, int], None]
_RISE = 0.2
_LARGEST_NORM = 5.0
_MOMENTUM = 0.9
_WARM_UPS = 3
_LEAST_S = 1e-3
_AHEAD = 16
"""Number of steps that may be queued on a GPU before it is synchronised and the time is checked."""
_ATTENTIONS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Attention back ends without cuDNN's, which torch 2.11 prefers on H100 and H200: its gradients may
be NaN if all scores of a query are far below 0 (pytorch issue 196678, cudnn-frontend 1072)."""


@dataclass(frozen=True, eq=False)
class LabelledBatch:
    """Batch of one training step; it stays at the same addresses in all steps."""

    inputs: torch.Tensor
    labels: torch.Tensor
    opinions: torch.Tensor | None
    """Teacher's outputs for the inputs; None without a teacher."""

    def fill(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Copy the next inputs and labels into this batch."""
        self.inputs.copy_(inputs)
        self.labels.copy_(labels)


LossOf = Callable[[torch.Tensor, LabelledBatch], torch.Tensor]


class Learner:
    """A net, its loss and its optimizer."""

    def __init__(self, net: nn.Module, loss_of: LossOf, recipe: NetTraining) -> None:
        self.net, self._loss_of = net, loss_of
        self._forward: Callable[[torch.Tensor], torch.Tensor] = (
            torch.compile(net) if recipe.compiled else net
        )
        self._device = next(net.parameters()).device
        self._parameters = [each for each in net.parameters() if each.requires_grad]
        self._optimizer: MomentumDescent | torch.optim.AdamW = (
            MomentumDescent(self._parameters, recipe.weight_decay)
            if recipe.optimizer == "sgd"
            else _adamw(self._parameters, recipe.weight_decay, self._device)
        )

    def learn(self, batch: LabelledBatch) -> None:
        """Run one training step: forward, backward, update."""
        with mixed_precision(self._device), sdpa_kernel(_ATTENTIONS):
            outputs = self._forward(batch.inputs)
        self._loss_of(outputs.float(), batch).backward()  # type: ignore[no-untyped-call]
        # A freshly cut net may start with very large gradients.
        nn.utils.clip_grad_norm_(self._parameters, _LARGEST_NORM)
        self._optimizer.step()
        # After the step and not before it: a step that is captured must start without memory from
        # elsewhere.
        self._optimizer.zero_grad(set_to_none=True)

    def set_rate(self, rate: float) -> None:
        """Set the next step's learning rate, in place if a CUDA graph reads it."""
        if isinstance(self._optimizer, MomentumDescent):
            self._optimizer.rate.fill_(rate)
            return
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def finish(self) -> None:
        """Put the net into evaluation mode and contiguous memory format."""
        self.net.eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """At the end of the block, restore the weights and zero the optimizer state."""
        before = [each.detach().clone() for each in self.net.state_dict().values()]
        try:
            yield
        finally:
            with torch.no_grad():
                for now, then in zip(self.net.state_dict().values(), before, strict=True):
                    now.copy_(then)
                for state in self._optimizer.state.values():
                    for value in state.values():
                        value.zero_()
            self._optimizer.zero_grad(set_to_none=True)


class MomentumDescent:
    """Stochastic gradient descent with Nesterov momentum, as in `torch.optim.SGD`.

    That optimizer takes the learning rate as a number, which a CUDA graph would keep for ever.
    """

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self._parameters, self._weight_decay = parameters, weight_decay
        self.state = {each: {"moment": torch.zeros_like(each)} for each in parameters}
        self.rate = torch.zeros((), device=parameters[0].device)

    def zero_grad(self, set_to_none: bool) -> None:
        """Set all gradients to None."""
        for each in self._parameters:
            each.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters."""
        pairs = [(each, each.grad) for each in self._parameters if each.grad is not None]
        moments = [self.state[each]["moment"] for each, _ in pairs]
        weights: list[torch.Tensor] = [each for each, _ in pairs]
        gradients = torch._foreach_add(
            [gradient for _, gradient in pairs], weights, alpha=self._weight_decay
        )
        torch._foreach_mul_(moments, _MOMENTUM)
        torch._foreach_add_(moments, gradients)
        torch._foreach_add_(gradients, moments, alpha=_MOMENTUM)
        torch._foreach_mul_(gradients, -self.rate)
        torch._foreach_add_(weights, gradients)


def _adamw(
    parameters: list[nn.Parameter], weight_decay: float, device: torch.device
) -> torch.optim.AdamW:
    is_cuda = device.type == "cuda"
    rate = torch.zeros((), device=device) if is_cuda else 0.0
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=weight_decay, capturable=is_cuda)


def mixed_precision(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 on a GPU; casts of weights are not cached between calls."""
    return torch.autocast(
        device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
    )


class _CapturedWork:
    """A function on fixed memory, captured as a CUDA graph with a stream of its own."""

    def __init__(self, work: Callable[[], object]) -> None:
        # A CUDA graph contains addresses only, so the memory that the work refers to must stay
        # allocated.
        self._work = work
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            work()
        torch.cuda.synchronize()

    def start(self) -> None:
        """Replay the graph after the work queued so far on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    def finish(self) -> None:
        """Make the current stream wait for the graph."""
        torch.cuda.current_stream().wait_stream(self._stream)


class _Written:
    """A function that is called eagerly, with the interface of `_CapturedWork`."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def start(self) -> None:
        self._work()

    def finish(self) -> None:
        pass


def captured_work(work: Callable[[], object], device: torch.device) -> _CapturedWork | _Written:
    """Capture a function that is called many times as a CUDA graph, if that is possible."""
    if device.type != "cuda":
        return _Written(work)
    try:
        return _CapturedWork(work)
    except RuntimeError as error:
        torch.cuda.synchronize()
        warnings.warn(
            f"steps cannot be recorded as a CUDA graph and take longer: {one_line(error)}",
            stacklevel=2,
        )
        return _Written(work)


@dataclass(frozen=True, eq=False)
class Lesson:
    """Nets that are trained on the same batches."""

    learners: Sequence[Learner]
    batch: LabelledBatch
    refill: Callable[[], None]
    """Copies the next inputs into the batch."""
    ask_teacher: Callable[[], None] | None
    """Stores a teacher's outputs for the batch; None without a teacher."""


class _RecordedLesson:
    """A lesson whose steps are captured as CUDA graphs if the device allows it."""

    def __init__(self, lesson: Lesson) -> None:
        self._lesson = lesson
        device = lesson.batch.inputs.device
        lesson.refill()
        ask = lesson.ask_teacher
        self._teacher = captured_work(ask, device) if ask is not None else _Written(lambda: None)
        self._teacher.start()
        self._teacher.finish()
        self._students = []
        for learner in lesson.learners:
            learner.net.train()
            with learner.unchanged():
                self._students.append(captured_work(self._one_step(learner), device))
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _one_step(self, learner: Learner) -> Callable[[], None]:
        return lambda: learner.learn(self._lesson.batch)

    def step(self, rate: float) -> None:
        """Train every net on the next batch and the teacher's outputs for it."""
        with torch.cuda.stream(self._stream):
            self._lesson.refill()
            self._teacher.start()
            self._teacher.finish()
            for learner, student in zip(self._lesson.learners, self._students, strict=True):
                learner.set_rate(rate)
                student.start()
            for student in self._students:
                student.finish()


def run_steps(lessons: Sequence[Lesson], recipe: NetTraining, on_step: OnStep) -> int:
    """Train all learners of all lessons step by step; return the number of steps."""
    is_cuda = lessons[0].batch.inputs.is_cuda
    begin_s = time.monotonic()
    recorded = [_RecordedLesson(lesson) for lesson in lessons]
    start_s = time.monotonic()
    # Capturing takes time too; the learning rate decays over the remaining time.
    left_s = max((recipe.limit_s or math.inf) - (start_s - begin_s), _LEAST_S)
    step = 0
    while step < recipe.steps:
        # Without synchronisation the queue would grow by thousands of steps, and a time limit would
        # be detected too late.
        if is_cuda and step % _AHEAD == 0:
            torch.cuda.synchronize()
        gone = max(step / recipe.steps, (time.monotonic() - start_s) / left_s)
        if step and gone >= 1:
            break
        for each in recorded:
            each.step(recipe.learning_rate * rate_share(gone))
        step += 1
        on_step(step, recipe.steps)
    if is_cuda:
        torch.cuda.synchronize()
    for lesson in lessons:
        for learner in lesson.learners:
            learner.finish()
    return step


def rate_share(gone: float) -> float:
    """Fraction of the highest learning rate after a fraction ``gone`` of the training."""
    if gone < _RISE:
        return 0.04 + 0.96 * gone / _RISE
    return 0.5 * (1 + math.cos(math.pi * (gone - _RISE) / (1 - _RISE)))
