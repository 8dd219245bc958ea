"""Training of the whole net, and of each part on its own.

A part learns "others" and its classes (cross-entropy), where half of each batch are its classes in
equal shares; the whole net's opinion, with all other classes added up, is a soft target beside the
labels (Hinton et al., "Distilling the knowledge in a neural network", 2015). Parts never
communicate. Stochastic gradient descent with momentum, one cycle of the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hocket.classes.settings import NetTraining

Augment = Callable[[torch.Tensor], torch.Tensor]
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Labelled:
    """Inputs with their classes."""

    inputs: torch.Tensor
    labels: torch.Tensor


def train_whole(
    net: nn.Module, data: Labelled, recipe: NetTraining, augment: Augment | None, on_step: OnStep
) -> None:
    """Train a net on labels, in place."""

    def draw(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(len(data.labels), (recipe.batch,), generator=generator)

    def loss(outputs: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, labels)

    _train(net, data, recipe, draw, loss, augment, on_step)


def train_part(
    part: nn.Module,
    classes: tuple[int, ...],
    teacher: nn.Module | None,
    data: Labelled,
    recipe: NetTraining,
    augment: Augment | None = None,
    on_step: OnStep = lambda done, total: None,
) -> None:
    """Train a part on its classes against all others, in place."""
    own = own_labels(data.labels, classes)
    others, *mine = (torch.nonzero(own == label).flatten() for label in range(len(classes) + 1))
    # A part with all classes has no others.
    pools = [(others, recipe.batch // 2)] if len(others) else []
    rest = recipe.batch - sum(count for _, count in pools)
    pools += [(pool, max(1, rest // len(mine))) for pool in mine if len(pool)]

    def draw(generator: torch.Generator) -> torch.Tensor:
        picks = [
            pool[torch.randint(len(pool), (count,), generator=generator).to(pool.device)]
            for pool, count in pools
        ]
        return torch.cat(picks)

    def loss(outputs: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hard = functional.cross_entropy(outputs, own_labels(labels, classes))
        if teacher is None or not recipe.soft_weight:
            return hard
        with torch.no_grad():
            soft = folded(teacher(inputs) / recipe.temperature, classes)
        student = functional.log_softmax(outputs / recipe.temperature, dim=1)
        apart = functional.kl_div(student, soft, reduction="batchmean", log_target=True)
        return (1 - recipe.soft_weight) * hard + recipe.soft_weight * recipe.temperature**2 * apart

    if teacher is not None:
        teacher.eval()
    _train(part, data, recipe, draw, loss, augment, on_step)


def own_labels(labels: torch.Tensor, classes: tuple[int, ...]) -> torch.Tensor:
    """Labels as a part counts them: 0 for others, then its classes."""
    own = torch.zeros_like(labels)
    for place, each in enumerate(classes, start=1):
        own[labels == each] = place
    return own


def folded(logits: torch.Tensor, classes: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of "others" and of some classes, from those of all classes."""
    shares = functional.log_softmax(logits.float(), dim=1)
    rest = [each for each in range(logits.shape[1]) if each not in classes]
    others = (
        shares[:, rest].logsumexp(dim=1, keepdim=True)
        if rest
        else torch.full_like(shares[:, :1], -30.0)
    )
    return torch.cat([others, shares[:, list(classes)]], dim=1)


def _train(
    net: nn.Module,
    data: Labelled,
    recipe: NetTraining,
    draw: Callable[[torch.Generator], torch.Tensor],
    loss_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    augment: Augment | None,
    on_step: OnStep,
) -> None:
    device = next(net.parameters()).device
    is_cuda = device.type == "cuda"
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=recipe.learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=recipe.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.2
    )
    net.train()
    torch.backends.cudnn.benchmark = is_cuda
    with torch.random.fork_rng(devices=[device] if is_cuda else []):
        torch.manual_seed(recipe.seed)
        for step in range(recipe.steps):
            index = draw(generator).to(data.labels.device)
            inputs, labels = data.inputs[index].to(device), data.labels[index].to(device)
            if augment is not None:
                inputs = augment(inputs)
            with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
                loss = loss_of(net(inputs), inputs, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            on_step(step + 1, recipe.steps)
    net.eval()


@torch.no_grad()
def outputs_of(net: nn.Module, inputs: torch.Tensor, batch: int = 512) -> torch.Tensor:
    """What a net says to inputs, in evaluation mode; computed where the inputs are."""
    before, device = next(net.parameters()).device, inputs.device
    net.to(device).eval()
    parts = [
        net(inputs[at : at + batch].to(device)).float().cpu() for at in range(0, len(inputs), batch)
    ]
    net.to(before)
    return torch.cat(parts)
