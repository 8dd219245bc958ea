"""Train the unsplit net, and each part on its own.

A part learns to distinguish its classes and "others" (cross-entropy); its classes have at least
half of the loss's weight. The net's outputs, with the probabilities of all other classes added up,
are soft targets in addition to the labels (Hinton et al., "Distilling the knowledge in a neural
network", 2015). Parts never communicate. Parts that are trained together see the same batches, so
that the teacher is evaluated once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hocket.base.errors import RunError, UsageError
from hocket.classes.settings import NetTraining
from hocket.classes.stepping import (
    LabelledBatch,
    Learner,
    Lesson,
    LossOf,
    OnStep,
    mixed_precision,
    run_steps,
)

Augment = Callable[[torch.Tensor], torch.Tensor]
Draw = Callable[[], torch.Tensor]
_AT_ONCE = 512
"""Number of inputs per forward call."""
_NO_OTHERS = -30.0
"""Log-probability of "others" for a part with all classes."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """Inputs with their class labels."""

    inputs: torch.Tensor
    labels: torch.Tensor


def train_whole(
    net: nn.Module, data: Labelled, recipe: NetTraining, augment: Augment | None, on_step: OnStep
) -> int:
    """Train a net on labels, in place; return the number of steps."""

    return learn([whole_lesson(net, data, recipe, augment)], recipe, on_step)


def whole_lesson(
    net: nn.Module, data: Labelled, recipe: NetTraining, augment: Augment | None
) -> Lesson:
    """Lesson that trains a net on labels."""

    def loss_of(outputs: torch.Tensor, batch: LabelledBatch) -> torch.Tensor:
        return functional.cross_entropy(outputs, batch.labels)

    return _lesson([net], [loss_of], None, data, recipe, _in_turn(data, recipe), augment)


def train_parts(
    parts: Sequence[nn.Module],
    classes: Sequence[tuple[int, ...]],
    teacher: nn.Module | None,
    data: Labelled,
    recipe: NetTraining,
    augment: Augment | None = None,
    on_step: OnStep = lambda done, total: None,
) -> int:
    """Train parts side by side on the same batches, in place; return the number of steps."""
    lesson = parts_lesson(parts, classes, teacher, data, recipe, augment)
    return learn([lesson], recipe, on_step)


def parts_lesson(
    parts: Sequence[nn.Module],
    classes: Sequence[tuple[int, ...]],
    teacher: nn.Module | None,
    data: Labelled,
    recipe: NetTraining,
    augment: Augment | None = None,
) -> Lesson:
    """The `Lesson` (nets trained on the same batches) of parts; the teacher, if any, is distilled.

    All inputs are drawn in random order, and a part's own classes have at least half of the weight.
    """
    counts = torch.bincount(data.labels).double()
    losses = [
        PartLoss(mine, len(counts), recipe, data.labels.device, _evening(counts, mine))
        for mine in classes
    ]
    draw = _in_turn(data, recipe)
    return _lesson(parts, losses, teacher, data, recipe, draw, augment)


def _evening(counts: torch.Tensor, classes: tuple[int, ...]) -> list[float]:
    """Loss weights of "others" and of each class that give a part's classes half of the total.

    If the part's classes are at least half of the data, all inputs have weight 1: a larger weight
    for few others would waste the other inputs.
    """
    own = [float(counts[each]) for each in classes]
    total = float(counts.sum())
    others = total - sum(own)
    if sum(own) >= others:
        return [1.0] * (1 + len(own))
    half = total / 2
    return [half / others] + [half / len(own) / each if each else 0.0 for each in own]


class PartLoss:
    """Loss of a part; its lookup tensors are created here, because steps may be captured as CUDA
    graphs.
    """

    def __init__(
        self,
        classes: tuple[int, ...],
        num_classes: int,
        recipe: NetTraining,
        device: torch.device,
        weights: Sequence[float] | None = None,
    ) -> None:
        place_of = own_labels(torch.arange(num_classes), classes).to(device)
        weight_of = torch.tensor(weights or [1.0] * (1 + len(classes)), device=device)[place_of]
        self._place_of, self._weight_of = place_of, weight_of
        self._mine, self._rest = places(classes, num_classes, device)
        self._share, self._temperature = recipe.soft_weight, recipe.temperature

    def __call__(self, outputs: torch.Tensor, batch: LabelledBatch) -> torch.Tensor:
        """Mean loss of a batch."""
        each = functional.cross_entropy(outputs, self._place_of[batch.labels], reduction="none")
        if batch.opinions is not None and self._share:
            # A higher temperature shows how similar the other classes are for the teacher.
            soft = folded(batch.opinions / self._temperature, self._mine, self._rest)
            student = functional.log_softmax(outputs / self._temperature, dim=1)
            apart = (soft.exp() * (soft - student)).sum(dim=1)
            each = (1 - self._share) * each + self._share * self._temperature**2 * apart
        return (each * self._weight_of[batch.labels]).mean()


def own_labels(labels: torch.Tensor, classes: tuple[int, ...]) -> torch.Tensor:
    """Labels in a part's numbering: 0 for others, then its classes."""
    own = torch.zeros_like(labels)
    for place, each in enumerate(classes, start=1):
        own[labels == each] = place
    return own


def places(
    classes: tuple[int, ...], num_classes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Column indices of a part's classes and of all others."""
    rest = [each for each in range(num_classes) if each not in classes]
    return torch.tensor(classes, device=device), torch.tensor(rest, device=device)


def folded(logits: torch.Tensor, mine: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of "others" and of some classes, from the logits of all classes."""
    shares = functional.log_softmax(logits.float(), dim=1)
    others = (
        shares.index_select(1, rest).logsumexp(dim=1, keepdim=True)
        if len(rest)
        else torch.full_like(shares[:, :1], _NO_OTHERS)
    )
    return torch.cat([others, shares.index_select(1, mine)], dim=1)


def _in_turn(data: Labelled, recipe: NetTraining) -> Draw:
    """Draw batches in random order; shuffle anew when fewer inputs than a batch are left."""
    device = data.labels.device
    generator = torch.Generator(device).manual_seed(recipe.seed)
    count = min(recipe.batch, len(data.labels))
    order, at = torch.empty(0, dtype=torch.long, device=device), 0

    def draw() -> torch.Tensor:
        nonlocal order, at
        if at + count > len(order):
            # Whole batches only, because captured steps have one shape.
            order, at = torch.randperm(len(data.labels), generator=generator, device=device), 0
        at += count
        return order[at - count : at]

    return draw


@contextmanager
def _quickest_convolutions(is_cuda: bool) -> Iterator[None]:
    """Let cuDNN choose convolution kernels by timing, which pays because all steps have equal
    shapes.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = is_cuda or before
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _lesson(
    nets: Sequence[nn.Module],
    losses: Sequence[LossOf],
    teacher: nn.Module | None,
    data: Labelled,
    recipe: NetTraining,
    draw: Draw,
    augment: Augment | None,
) -> Lesson:
    device = next(nets[0].parameters()).device
    first = draw()
    form = _form_of(nets[0], data.inputs)
    inputs = data.inputs[first].to(device, memory_format=form)
    for net in nets:
        net.to(memory_format=form)  # type: ignore[call-overload]
    asked = teacher if teacher is not None and recipe.soft_weight else None
    with torch.no_grad():
        opinions = None if asked is None else asked.eval()(inputs).float()
    answer = torch.compile(asked) if asked is not None and recipe.compiled else asked
    batch = LabelledBatch(inputs, data.labels[first].to(device), opinions)

    def refill() -> None:
        index = draw()
        picked = data.inputs[index].to(device)
        batch.fill(augment(picked) if augment is not None else picked, data.labels[index])

    def ask_teacher() -> None:
        assert answer is not None
        assert batch.opinions is not None
        with torch.no_grad(), mixed_precision(device):
            batch.opinions.copy_(answer(batch.inputs))

    learners = [Learner(net, loss_of, recipe) for net, loss_of in zip(nets, losses, strict=True)]
    return Lesson(learners, batch, refill, ask_teacher if asked is not None else None)


def _form_of(net: nn.Module, inputs: torch.Tensor) -> torch.memory_format:
    """Memory format of a net: channels last for images on a GPU, which its convolutions prefer."""
    is_cuda = next(net.parameters()).device.type == "cuda"
    return torch.channels_last if is_cuda and inputs.ndim == 4 else torch.contiguous_format


def learn(lessons: Sequence[Lesson], recipe: NetTraining, on_step: OnStep) -> int:
    """Train the nets of all lessons side by side, in place; return the number of steps."""
    device = lessons[0].batch.inputs.device
    is_cuda = device.type == "cuda"
    draws = torch.random.fork_rng(devices=[device] if is_cuda else [])
    # Training must not change the random state of the surrounding program.
    with draws, _quickest_convolutions(is_cuda):
        torch.manual_seed(recipe.seed)
        try:
            steps = run_steps(lessons, recipe, on_step)
        except RuntimeError as error:
            if not recipe.compiled:
                raise
            raise UsageError(
                f"compiled steps fail: {str(error).strip().partition(chr(10))[0]}",
                hint="leave out --compile",
            ) from error
    for lesson in lessons:
        for learner in lesson.learners:
            _check_finite(learner.net)
    return steps


def _check_finite(net: nn.Module) -> None:
    if not all(bool(each.isfinite().all()) for each in net.parameters()):
        raise RunError(
            "the training ran away: weights are no numbers any more",
            hint="give a lower --learning-rate or more steps",
        )


@torch.no_grad()
def outputs_of(net: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Outputs of a net in evaluation mode, computed on the device of the inputs."""
    # Inputs are larger than nets, so the net is moved to them.
    before, device = next(net.parameters()).device, inputs.device
    net.to(device).eval()
    parts = [
        net(inputs[at : at + _AT_ONCE].to(device)).float().cpu()
        for at in range(0, len(inputs), _AT_ONCE)
    ]
    net.to(before)
    return torch.cat(parts)
