"""30 models x 7 strategies: losses of 20 steps beside plain training in one process; resumable.

    PYTHONPATH=src:tests:. python benchmarks/runtime/strategy_equality.py [--out FILE] [--seconds N]
    PYTHONPATH=src:tests:. python benchmarks/runtime/strategy_equality.py --table FILE

Each row trains a model of the zoo, or one as people write them, on 2 or 4 gloo ranks in float64
without dropout, and the same model in plain PyTorch on the whole batch. The largest relative
difference of a loss has to be below 1e-6. Rows that are in the file already are left out, so that a
run can be stopped and continued; ``--seconds`` begins no row after so long. Batch norms are frozen
where a strategy takes microbatches or recomputes, because they see parts of a batch there.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import forked
import torch
from runtime.small_zoo import SMALL_ZOO
from runtime.train_loops import adamw
from runtime.train_models import USER_MODELS
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

import hocket
from hocket.base.errors import HocketError, NoFeasiblePlanError
from hocket.capture.loss import ChosenLoss
from hocket.capture.step import apply_model
from hocket.planners.memory.given_budget import budget_of
from hocket.transformer import ParallelConfig

STEPS, SAMPLES, TOLERANCE = 20, 8, 1e-6
STRATEGIES = {
    "ddp": ParallelConfig(data=2, global_batch=SAMPLES),
    "unequal ddp": ParallelConfig(data=2, global_batch=SAMPLES, shares=(5, 3)),
    "fsdp": ParallelConfig(data=2, global_batch=SAMPLES, zero=3),
    "pipeline": ParallelConfig(pipeline=2, global_batch=SAMPLES, microbatch=4),
    "tensor": ParallelConfig(tensor=2, global_batch=SAMPLES),
    "ddp x pipeline": ParallelConfig(data=2, pipeline=2, global_batch=SAMPLES, microbatch=2),
    "budget x ddp": ParallelConfig(data=2, global_batch=SAMPLES),
}
WHOLE_BATCH = ("ddp", "unequal ddp", "tensor")
"""Strategies whose batch norms see the rows of all ranks."""
LEFT_OUT = ("autocast", "bags")
"""Computes in bfloat16; has sparse gradients, which no rank strategy sums."""
MODELS = [*SMALL_ZOO, *(name for name in USER_MODELS if name not in LEFT_OUT)]
DROPOUTS = ("p", "dropout", "dropout_rate", "attention_dropout", "activation_dropout",
            "dropout_prob", "resid_dropout", "hidden_dropout", "attn_dropout")  # fmt: skip


def built(name: str, is_frozen: bool) -> tuple[nn.Module, Any, Any]:
    """A model in float64 without dropout, a batch of `SAMPLES`, and how that becomes a loss."""
    torch.manual_seed(0)
    if name in SMALL_ZOO:
        (model, batch), forward = SMALL_ZOO[name](), None
    else:
        model, batches, forward = USER_MODELS[name]()
        batch = batches[0]
    model = model.double().train()
    for module in model.modules():
        for attribute in DROPOUTS:
            if isinstance(vars(module).get(attribute), float):
                setattr(module, attribute, 0.0)
        if is_frozen and isinstance(module, _BatchNorm):
            module.eval()
    return model, tree_map(_more_rows, batch), forward


def _more_rows(value: Any) -> Any:
    """A tensor with more samples: shifted copies of those that it has."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    value = value.double() if value.is_floating_point() else value
    copies = [value.roll(shift, -1) for shift in range(-(-SAMPLES // len(value)))]
    return torch.cat(copies)[:SAMPLES]


def compare(tell: Any, name: str, strategy: str) -> dict[str, Any]:
    """One rank of a row: the largest differences from plain training."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, batch, forward = built(name, is_frozen=strategy not in WHOLE_BATCH)
    twin = copy.deepcopy(model)
    plain, found_loss = adamw(twin), ChosenLoss(None)
    try:
        train = _prepared(model, batch, forward, strategy)
    except HocketError as error:
        return {"outcome": "refused", "why": error.message[:160]}
    worst = 0.0
    for _ in range(STEPS):
        loss = train.step(batch).item()
        expected = found_loss((forward or apply_model)(twin, batch))
        plain.zero_grad()
        expected.backward()
        plain.step()
        worst = max(worst, abs(loss - expected.item()) / abs(expected.item()))
    state = train.state_dict()["model"]
    weights = max(
        float((state[n].double() - t.double()).abs().max()) for n, t in twin.state_dict().items()
    )
    outcome = "equal" if worst < TOLERANCE else "DIFFERENT"
    return {"outcome": outcome, "loss": worst, "weights": weights}


def _prepared(model: nn.Module, batch: Any, forward: Any, strategy: str) -> Any:
    config = STRATEGIES[strategy]
    if strategy != "budget x ddp":
        return hocket.prepare(model, adamw(model), batch, plan=config, forward=forward)
    try:
        return hocket.prepare(
            model, adamw(model), batch, plan=config, forward=forward, memory="1KiB"
        )
    except NoFeasiblePlanError as refused:
        named = re.search(r'memory="([^"]+)"', refused.hint or "")
        assert named is not None
        memory = int(1.1 * budget_of(named[1]))
    return hocket.prepare(model, adamw(model), batch, plan=config, forward=forward, memory=memory)


def main() -> None:
    """Train the rows that are missing, one line each, and print how many are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("strategy_equality.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args()
    path = options.table or options.out
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done, began_s = {(row["model"], row["strategy"]) for row in rows}, time.monotonic()
    for name in () if options.table else options.models:
        for strategy, config in STRATEGIES.items():
            if (name, strategy) in done or time.monotonic() - began_s > options.seconds:
                continue
            row = {"model": name, "strategy": strategy}
            try:
                row |= forked.answers(config.num_devices, compare, name, strategy)[0]
            except AssertionError as error:
                row |= {"outcome": "failed", "why": str(error).strip().splitlines()[-1][:160]}
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    print(_table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| strategy | equal | different | refused | failed | largest difference of a loss |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for strategy in STRATEGIES:
        own = [row for row in rows if row["strategy"] == strategy]
        count = Counter(row["outcome"] for row in own)
        worst = max((row["loss"] for row in own if "loss" in row), default=0.0)
        cells = [count[outcome] for outcome in ("equal", "DIFFERENT", "refused", "failed")]
        lines.append(f"| {strategy} | {' | '.join(map(str, cells))} | {worst:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
