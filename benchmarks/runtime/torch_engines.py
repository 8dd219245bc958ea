"""PyTorch's own parallel engines on the models of `strategy_equality`: which models they can train.

    PYTHONPATH=src:tests:. python benchmarks/runtime/torch_engines.py [--models NAME …]

DistributedDataParallel, `fully_shard`, `torch.distributed.pipelining.pipeline` (traced, cut before
the middle layer, GPipe with two microbatches) and `parallelize_module` (columns and rows as our
tensor parallelism cuts them) on two gloo ranks, in float64 without dropout, for five steps. A row
is equal if every loss is within 1e-6 of plain training on the whole batch.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

import forked
import torch
import torch.distributed as dist
from runtime.train_loops import adamw
from strategy_equality import MODELS, SAMPLES, TOLERANCE, built
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hocket.capture.loss import ChosenLoss
from hocket.capture.step import apply_model
from hocket.runtime.strategies.layer_stack import find_stack
from hocket.transformer.families import named_family

STEPS, RANKS = 5, 2
UNTIED = "-untied"
"""Suffix of models whose output layer gets a weight of its own."""


class WithLoss(nn.Module):
    """A model that takes the tensors of a batch and returns its loss."""

    def __init__(self, model: nn.Module, forward: Any, batch: Any) -> None:
        super().__init__()
        self.model, self._forward = model, forward or apply_model
        self._form = tree_flatten(batch)[1]

    def forward(self, *leaves: Any) -> torch.Tensor:
        return ChosenLoss(None)(self._forward(self.model, tree_unflatten(leaves, self._form)))


def _rows(batch: Any, start: int, stop: int) -> list[Any]:
    return [
        x[start:stop] if isinstance(x, torch.Tensor) and x.dim() else x for x in tree_leaves(batch)
    ]


def _local_step(model: nn.Module, wrapped: nn.Module, batch: Any) -> Any:
    """A step whose loss is the mean over the rows of both ranks."""
    optimizer, own = adamw(wrapped), SAMPLES // RANKS
    rows = _rows(batch, dist.get_rank() * own, (dist.get_rank() + 1) * own)

    def step() -> float:
        optimizer.zero_grad()
        loss = wrapped(*rows)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / RANKS
        dist.all_reduce(mean)
        return float(mean)

    return step


def ddp(model: nn.Module, batch: Any, forward: Any) -> Any:
    return _local_step(model, DistributedDataParallel(WithLoss(model, forward, batch)), batch)


def sharded(model: nn.Module, batch: Any, forward: Any) -> Any:
    wrapped = WithLoss(model, forward, batch)
    fully_shard(wrapped)
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(RANKS))
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides
    return _local_step(model, wrapped, batch)


class Outputs(nn.Module):
    """A model that takes the inputs of a batch and returns what its loss compares with labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> torch.Tensor:
        found = self.model(*inputs)
        return found if isinstance(found, torch.Tensor) else found["logits"]


def _entropy(shift: int) -> Any:
    """Cross-entropy of the token (or class) that lies ``shift`` places further on."""

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if shift:
            scores, labels = scores[:, :-shift], labels[:, shift:]
        return functional.cross_entropy(scores.flatten(0, -2), labels.flatten())

    return loss


def _apart(model: nn.Module, batch: Any, forward: Any) -> tuple[list[Any], Any, Any]:
    """Return inputs, labels and loss of a batch: torch's stages pass activations alone, so labels
    have to be apart from the model."""
    inputs = batch if isinstance(batch, dict) else dict(enumerate(batch))
    key = "labels" if "labels" in inputs else max(inputs)
    rest, labels = [value for name, value in inputs.items() if name != key], inputs[key]
    with torch.no_grad():
        expected = WithLoss(model, forward, batch)(*tree_leaves(batch))
        scores = Outputs(model)(*rest)
        for loss in (_entropy(0), _entropy(1), functional.mse_loss):
            try:
                if torch.allclose(loss(scores, labels).double(), expected.double()):
                    return rest, labels, loss
            except (RuntimeError, ValueError, IndexError):
                continue
    raise TypeError("its loss is not a function of outputs and labels")


def staged(model: nn.Module, batch: Any, forward: Any) -> Any:
    path, length = find_stack(model)
    middle = ".".join(filter(None, ("model", path, str(length // 2))))
    inputs, labels, loss_of = _apart(model, batch, forward)
    pipe = pipeline(
        Outputs(model), mb_args=tuple(_rows(inputs, 0, SAMPLES // 2)),
        split_spec={middle: SplitPoint.BEGINNING},
    )  # fmt: skip
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    optimizer = adamw(stage.submod)
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if dist.get_rank() == 0:
            schedule.step(*inputs)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        mean = (
            torch.stack(losses).mean().detach() if losses else torch.zeros((), dtype=torch.float64)
        )
        dist.broadcast(mean, RANKS - 1)
        return float(mean)

    return step


def tensor(model: nn.Module, batch: Any, forward: Any) -> Any:
    path, length = find_stack(model)
    mesh, plan = init_device_mesh("cpu", (RANKS,)), {}
    for number in range(length):
        prefix = ".".join(filter(None, (path, str(number))))
        family = named_family({name for name, _ in model.get_submodule(prefix).named_modules()})
        if family is None:
            raise TypeError("no rule for the names of its layers")
        plan |= {f"{prefix}.{name}": ColwiseParallel() for name in family.columns}
        plan |= {f"{prefix}.{name}": RowwiseParallel() for name in family.rows}
    parallelize_module(model, mesh, plan)
    wrapped, optimizer = WithLoss(model, forward, batch), adamw(model)

    def step() -> float:
        optimizer.zero_grad()
        loss = wrapped(*tree_leaves(batch))
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


ENGINES = {"ddp": ddp, "fully_shard": sharded, "pipelining": staged, "parallelize_module": tensor}


def compare(tell: Any, name: str, engine: str) -> dict[str, Any]:
    """One rank of a row: the largest difference of a loss from plain training."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, batch, forward = built(name.removesuffix(UNTIED), is_frozen=True)
    if name.endswith(UNTIED):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    twin = WithLoss(copy.deepcopy(model), forward, batch)
    plain, worst = adamw(twin), 0.0
    # Whatever an engine raises is the result of the row.
    try:
        step = ENGINES[engine](model, batch, forward)
        for _ in range(STEPS):
            loss, expected = step(), twin(*tree_leaves(batch))
            plain.zero_grad()
            expected.backward()
            plain.step()
            worst = max(worst, abs(loss - expected.item()) / abs(expected.item()))
    except Exception as raised:
        error: BaseException = raised
        dist.destroy_process_group()  # so that the other rank does not wait
        while error.__cause__ is not None:
            error = error.__cause__
        return {"outcome": "fails", "why": f"{type(error).__name__}: {error}"[:300]}
    return {"outcome": "equal" if worst < TOLERANCE else "DIFFERENT", "loss": worst}


def main() -> None:
    """Print a line per model and engine, and how many models each engine trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {engine: Counter() for engine in options.engines}
    for name in options.models:
        for engine, count in counts.items():
            try:
                rows = forked.answers(RANKS, compare, name, engine)
                failed = [row for row in rows if row["outcome"] == "fails"]
                # One rank fails by itself, the other by the lost connection.
                own = [row for row in failed if "onnection" not in row["why"]]
                row = (own or failed or rows)[0]
            except AssertionError as error:
                row = {"outcome": "fails", "why": str(error).strip().splitlines()[-1][:200]}
            count[row["outcome"]] += 1
            print(json.dumps({"model": name, "engine": engine, **row}), flush=True)
    print("| engine | equal | different | fails |\n|---|---|---|---|")
    for engine, count in counts.items():
        print(f"| {engine} | {count['equal']} | {count['DIFFERENT']} | {count['fails']} |")


if __name__ == "__main__":
    main()
