"""Choose the strategy that executes a plan.

`choose_strategy` returns a parallel, memory-budget or op-placement strategy, depending on the plan
or on the options without a plan. `hocket.prepare` uses it for the user's loop, `hocket run` for
synthetic batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.base.warn import warn_user
from hocket.capture.fake import model_tensors
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.files import SavedPlan
from hocket.plan.make import ON_THIS_MACHINE, find_cluster
from hocket.plan.plan import Plan
from hocket.plan.sections import Communication, Memory, Parallel, Priority
from hocket.plan.verify import require_structure
from hocket.runtime.collectives.priority_sync import Propagation, wrap
from hocket.runtime.collectives.process_group import PLANNED, register
from hocket.runtime.strategies.budget import budget_strategy
from hocket.runtime.strategies.ddp import priority_obstacle
from hocket.runtime.strategies.parallel import parallel_strategy, stated_degrees_strategy
from hocket.runtime.strategies.parallel_task import ParallelTask, ParallelWarning, agree_on_model
from hocket.runtime.strategies.placed import Placing, placed_strategy
from hocket.runtime.strategy import Prepared, TrainingTask, claimed_step_s
from hocket.transformer import ParallelConfig

Given = SavedPlan | ParallelConfig
"""A plan with its problem, or bare degrees of parallelism."""


def is_parallel(given: Given | None) -> bool:
    """True for plans that train with several replicas, stages, shards or microbatches."""
    return isinstance(given, ParallelConfig) or (
        given is not None and given.plan.get(Parallel) is not None
    )


def may_take_budget(given: Given | None) -> bool:
    """True for plans that allow an additional memory budget for each rank.

    Plans of one device and of round-robin pipelines determine themselves which tensors stay on the
    device.
    """
    if isinstance(given, ParallelConfig):
        return given.num_devices > 1
    parallel = given.plan.get(Parallel) if given is not None else None
    return parallel is not None and len(parallel.devices) > 1 and not parallel.is_round_robin


def choose_strategy(
    task: TrainingTask,
    given: Given | None = None,
    *,
    on: str | Path | Cluster = ON_THIS_MACHINE,
    memory: int | str | None = None,
) -> Prepared:
    """Prepare the strategy that executes a plan; all ranks call it together.

    Without a plan, one is searched: the fastest within ``memory`` on one device if a budget is
    given, else a placement on the devices of ``on``. With a data-parallel plan, ``memory`` is the
    budget of each device.
    """
    # Trials while tracing must not change the random draws of the loop.
    with torch.random.fork_rng():
        if isinstance(given, ParallelConfig):
            named = Plan(planner="parallel config", notes={"how": repr(given)})
            return Prepared(
                stated_degrees_strategy(_parallel_task(task, None, memory), given), named, None
            )
        if given is not None and given.plan.get(Parallel) is not None:
            strategy = parallel_strategy(
                _parallel_task(task, given, memory), given.problem, given.plan
            )
            step_s = strategy.predicted_s or claimed_step_s(given.problem, given.plan)
            return Prepared(strategy, given.plan, step_s)
        _require_memory(task.model)
        if task.is_ranked:
            agree_on_model(task.model, task.device)
        if memory is not None or (given is not None and given.plan.get(Memory) is not None):
            return budget_strategy(task, given, on, memory)
        return placed_strategy(task, Placing(saved=given, on=on))


def _require_memory(model: nn.Module) -> None:
    """Refuse parameters on the meta device, which only parallel plans read from files."""
    empty = [name for name, _, tensor in model_tensors(model) if tensor.is_meta]
    if empty:
        raise UsageError(
            f"{empty[0]} is on the meta device and has no memory",
            hint="build the model outside of torch.device('meta'), or model.to_empty(device='cpu') "
            "and load its weights",
        )


def _parallel_task(
    task: TrainingTask, saved: SavedPlan | None, memory: int | str | None
) -> ParallelTask:
    """Describe the part of this rank in a parallel training."""
    start = _propagation_of(task, saved)
    has_graph = saved is not None and isinstance(saved.problem.work, Graph)
    return ParallelTask(
        **vars(task), memory=memory,
        costs_of=saved.problem if saved is not None and has_graph else None,
        reduce_backend=None if start else _reduce_backend(task, saved), start_propagation=start,
    )  # fmt: skip


def _reduce_backend(task: TrainingTask, saved: SavedPlan | None) -> str | None:
    """Return the backend that sums gradients: planned trees, if the plan has them."""
    if saved is None or saved.plan.get(Communication) is None:
        return None
    if task.device.type == "cpu":
        register(find_cluster)
        return PLANNED
    warn_user(
        "the plan has trees for gradients, but GPUs sum gradients by NCCL",
        ParallelWarning,
    )
    return None


def _propagation_of(
    task: TrainingTask, saved: SavedPlan | None
) -> Callable[[], Propagation] | None:
    """Return the function that starts priority gradient sync, or None if it is not used."""
    if saved is None or (priority := saved.plan.get(Priority)) is None:
        return None
    require_structure(saved.plan, saved.problem)
    if obstacle := priority_obstacle(task.model, task.optimizer, task.options):
        warn_user(
            f"the plan sends gradients by priority, but {obstacle}: gradients are summed at the "
            "end of each step, with the same numbers",
            ParallelWarning,
        )
        return None
    return lambda: wrap(
        task.model, task.optimizer, crosses=priority.crosses, slice_bytes=priority.slice_bytes,
        dtype=task.reduce_dtype,
    )  # fmt: skip
