"""Splits that libraries make, re-made live: Accelerate's device map and torch's pipeline stages.

    .venv/bin/python benchmarks/placement/peers.py              # some minutes
    .venv/bin/python benchmarks/placement/peers.py gpt2         # names that contain a word

One V100-32G and two T4. Accelerate's `infer_auto_device_map` gets the memory of the devices and the
size of the parameters; `torch.distributed.pipelining.pipeline` is asked for one stage per device at
equal numbers of blocks, as its documentation shows. Each split is written as an expert file, placed
op by op and simulated like every other plan. Results: ``docs/concepts/placement.md``.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import suite
from quality import geometric_mean

from hocket.capture import capture, load_model
from hocket.graph.graph import Phase
from hocket.plan.make import make_problem
from hocket.plan.problem import Problem
from hocket.planners.auto import AUTO, portfolio
from hocket.planners.candidates import propose
from hocket.planners.placement.baselines import EXPERT_SCHEMA, expert

MODELS = {"gpt2": 8, "gpt2-medium": 4, "bert-large": 8, "vit-base": 32, "resnet50": 64, "mlp": 64}
"""Model to batch; those of the zoo that torch's pipelining can trace."""

Split = dict[str, int]
"""Module path to device."""


def accelerate_split(model: Any, _batch: Any, problem: Problem) -> Split:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    memory = {index: int(size) for index, size in enumerate(problem.memory_bytes)}
    blocks = getattr(model, "_no_split_modules", None) or []
    limits = get_balanced_memory(model, memory, no_split_module_classes=blocks)
    found = infer_auto_device_map(model, limits, no_split_module_classes=blocks)
    return {path: int(device) for path, device in found.items()}


def torch_split(model: Any, batch: Any, problem: Problem) -> Split:
    from torch.distributed.pipelining import SplitPoint, pipeline

    blocks = list(_blocks(name for name, _ in model.named_modules()))
    count = problem.cluster.num_devices
    begins = {blocks[len(blocks) * i // count]: SplitPoint.BEGINNING for i in range(1, count)}
    pipe = pipeline(model, (), mb_kwargs=dict(batch), split_spec=begins)
    split: Split = {}
    for stage in range(pipe.num_stages):
        for name, _ in pipe.get_stage_module(stage).named_parameters():
            split[name.rpartition(".")[0]] = stage  # a tied matrix stands in several: the last
    return split


def _blocks(paths: Iterable[str]) -> Iterable[str]:
    """Modules whose last name is a number and whose parents have none."""
    for path in paths:
        *parents, last = path.split(".")
        if last.isdigit() and not any(parent.isdigit() for parent in parents):
            yield path


PEERS: dict[str, Callable[[Any, Any, Problem], Split]] = {
    "accelerate": accelerate_split,
    "torch pipeline": torch_split,
}


def step_of(split: Split, problem: Problem) -> float:
    """Simulated step of a split; nan where it does not fit."""
    graph, names = problem.graph, problem.cluster.device_names
    known = set(graph.modules)
    used = {path: device for path, device in split.items() if _is_used(path, known)}
    for op in np.flatnonzero(graph.op_phase == Phase.FORWARD):
        module = graph.module_of(int(op))
        if not any(module == path or module.startswith(f"{path}.") for path in used):
            # Neither library says where ops between modules run: with the input, or the loss.
            used[module or graph.op_names[op]] = 0 if module else len(names) - 1
    placed = {name: [path for path in used if used[path] == d] for d, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "split.json"
        path.write_text(json.dumps({"schema": EXPERT_SCHEMA, "devices": placed}))
        return propose(problem, "expert", expert(path)).step_s or math.nan


def _is_used(path: str, known: set[str]) -> bool:
    """Whether ops of the step belong to a module: buffers and dead branches have none."""
    return any(module == path or module.startswith(f"{path}.") for module in known)


def main() -> None:
    words = sys.argv[1:]
    warnings.simplefilter("ignore")
    cluster = suite.cluster_named(suite.UNEQUAL)
    ratios: dict[str, list[float]] = {name: [] for name in PEERS}
    print(f"| model | {' | '.join(f'{name} | its time, s' for name in PEERS)} | auto | time, s |")
    print("|---|" + "---|---|" * (len(PEERS) + 1))
    for name, batch_size in MODELS.items():
        if words and not any(word in name for word in words):
            continue
        model, batch = load_model(name, batch=batch_size)
        problem = make_problem(capture(model, batch, name=name), cluster)
        best = portfolio(problem)[-1]
        assert best.planner == AUTO
        assert best.step_s is not None
        cells = []
        for peer, make in PEERS.items():
            started = time.perf_counter()
            split = make(model, batch, problem)
            seconds = time.perf_counter() - started
            step_s = step_of(split, problem)
            ratios[peer].append(step_s / best.step_s)
            cells.append(f"{1e3 * step_s:,.4g} ({step_s / best.step_s:.2f}x) | {seconds:.2f}")
        cells.append(f"{1e3 * best.step_s:,.4g} | {best.plan_seconds:.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\nSteps in milliseconds; nan: does not fit.\n")
    for peer, values in ratios.items():
        print(f"- {peer} takes {geometric_mean(values):.3f} times as long as auto")


if __name__ == "__main__":
    main()
