"""The same training on one device, without any division: what a parallel run must agree with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hocket.runtime.parallel.batch import token_batch, token_loss
from hocket.runtime.parallel.build import whole_model
from hocket.runtime.parallel.job import TrainingJob
from hocket.runtime.parallel.model import TIED
from hocket.runtime.parallel.trainer import new_optimizer
from hocket.runtime.threads import torch_threads


@dataclass(frozen=True)
class DividedReference:
    """Losses of all steps and gradients of the first."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]


def reference_run(job: TrainingJob) -> DividedReference:
    """Train the model of a job on one device with the whole batch at once."""
    # Small models run fastest on one thread, above all on a busy machine.
    with torch_threads(1):
        return _train(job)


def _train(job: TrainingJob) -> DividedReference:
    stage = whole_model(job.model, seed=job.seed, dtype=getattr(torch, job.dtype))
    parameters = dict(stage.named_parameters())
    optimizer = new_optimizer(list(parameters.values()), job.learning_rate)
    losses, gradients = [], {}
    for number in range(1, job.steps + 1):
        optimizer.zero_grad()
        sequences = range(job.division.global_batch)
        ids, targets = token_batch(job.model, sequences, seed=job.seed, step=number)
        loss = token_loss(stage(ids), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if job.model.tied_embeddings:
            _sum_tied(parameters)
        if number == 1:
            gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return DividedReference(tuple(losses), gradients)


def _sum_tied(parameters: dict[str, torch.nn.Parameter]) -> None:
    first, second = (parameters[name].grad for name in TIED)
    assert first is not None
    assert second is not None
    total = first + second
    first.copy_(total)
    second.copy_(total)
