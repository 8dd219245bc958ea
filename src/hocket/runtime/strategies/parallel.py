"""Compose the strategy of a parallel plan from tensor, pipeline and data parallelism.

Tensor parallelism changes the model's layers before tracing, a pipeline cuts the traced step into
stages, and data parallelism wraps the result. All ranks run the same script on the same batches,
and each rank selects its samples. There are two types of plans: degrees of parallelism (dp, tp,
pp), and a batch split over replicas of a captured graph with individual stages and microbatches.
The file also loads weights of meta-device models, and refuses models and batches that do not match
the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hocket.base.arrays import IntArray
from hocket.base.errors import InputFileError, UsageError
from hocket.base.warn import warn_user
from hocket.capture.program import Program
from hocket.graph.graph import Graph, Phase, Role
from hocket.hardware.allocation import aligned
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Parallel, Replica, Schedule, Waves
from hocket.plan.training import TransformerTraining
from hocket.planners.parallel.schedules import make_schedule
from hocket.runtime.batches import settled
from hocket.runtime.checkpoint import TensorCut
from hocket.runtime.optimizer_parts import HostUpdate
from hocket.runtime.strategies.accumulate import Accumulated
from hocket.runtime.strategies.batch_split import (
    has_ignored_labels,
    microbatches,
    num_rows,
    split_rows,
    take_rows,
)
from hocket.runtime.strategies.ddp import (
    DataParallel,
    PriorityDataParallel,
    batch_norms_in_training,
    join_batch_norms,
)
from hocket.runtime.strategies.eager import EagerModel
from hocket.runtime.strategies.fsdp import ShardedModel
from hocket.runtime.strategies.layer_stack import find_stack, layer_of, layer_paths
from hocket.runtime.strategies.parallel_task import (
    ParallelTask,
    ParallelWarning,
    RankPart,
    agree_on_model,
)
from hocket.runtime.strategies.pipeline import Pipeline
from hocket.runtime.strategies.rank_mesh import RankMesh
from hocket.runtime.strategies.round_robin import RoundRobinPipeline
from hocket.runtime.strategies.stage_cuts import cut_at_ops, cut_by_layers
from hocket.runtime.strategies.tensor import shard_layers
from hocket.runtime.strategies.traced import TracedModel
from hocket.runtime.strategies.waves import make_waves, wave_order
from hocket.runtime.strategy import Strategy, predicted_s
from hocket.runtime.traced_recompute import RecomputedBlocks
from hocket.runtime.traced_step import placement_like
from hocket.runtime.transformer_refusals import refuse_degrees
from hocket.simulate.parallel.recompute_and_host import second_run
from hocket.simulate.parallel.replayed import replayed_step_s
from hocket.transformer import ParallelConfig


def parallel_strategy(task: ParallelTask, problem: Problem, plan: Plan) -> Strategy:
    """Prepare this rank's part of a plan; refuses a model or batch that differs from the plan."""
    task = replace(task, predicted_s=predicted_s(problem, plan, task.device))
    parallel = plan[Parallel]
    if parallel.layers is None:
        _require_batch(parallel.num_samples, task.batch)
        return _split_batch_strategy(task, problem, plan)
    config = parallel.config
    if isinstance(problem.work, TransformerTraining):
        _require_layers(task.model, problem.training.model.layers)
    _require_batch(config.global_batch, task.batch)
    return _degrees_strategy(task, config, plan.get(Schedule), accumulates=True)


def stated_degrees_strategy(task: ParallelTask, config: ParallelConfig) -> Strategy:
    """Prepare a parallel config that has no plan.

    The global batch size is the size of the task's batch, unless the config states one.
    Microbatches have one sample by default, so only pipelines run several.
    """
    if config.global_batch == 1 and config.shares is None:
        config = replace(config, global_batch=num_rows(task.batch))
    _require_batch(config.global_batch, task.batch)
    return _degrees_strategy(task, config, None, accumulates=False)


def _degrees_strategy(
    task: ParallelTask, config: ParallelConfig, schedule: Schedule | None, *, accumulates: bool
) -> Strategy:
    """Prepare a parallel config; ranks without a pipeline may accumulate microbatches."""
    refuse_degrees(config)
    _warn_of_memory(config)
    is_split = accumulates or config.pipeline > 1
    sizes = (1,) * (config.num_microbatches if is_split else 1)
    recomputed: Sequence[str] = ()
    if config.recompute == "full":
        recomputed = layer_paths(task.model)
        task = replace(task, recipe=replace(task.recipe, again=_all_layers(task.model)))
    if config.num_devices == 1:
        return _single_device_strategy(task, sizes)
    mesh = RankMesh.of_config(config, task.device)
    agree_on_model(task.model, task.device)
    pipeline = None
    if config.pipeline > 1:
        schedule = schedule or make_schedule(
            config.schedule, config.pipeline, len(sizes), config.chunks
        )
        pipeline = cut_by_layers(task.model, config, schedule), schedule
    return _rank_strategy(task, RankPart(
        mesh=mesh, batch_split=config.shares or (1,) * config.data, microbatches=sizes,
        zero=config.zero, tensor=config.tensor, joins_norms=len(sizes) == 1, pipeline=pipeline,
        recomputed=recomputed,
    ))  # fmt: skip


def _split_batch_strategy(task: ParallelTask, problem: Problem, plan: Plan) -> Strategy:
    """Prepare a batch split over replicas of the problem's graph.

    A weight may be in different stages of different replicas. The ranks that hold it sum its
    gradient.
    """
    graph, parallel = problem.graph, plan[Parallel]
    _require_same_weights(graph, task.model)
    replicas = parallel.replicas
    if len(parallel.devices) == 1:
        task = _in_waves(_using_less_memory(task, graph, replicas[0]), problem, plan, 0)
        return _single_device_strategy(task, replicas[0].microbatches)
    # Stages are cut at ops, so the kernels of the plan are traced.
    task = _with_planned_kernels(task, graph)
    if parallel.is_round_robin:
        return RoundRobinPipeline(task, graph, parallel)
    num_stages = [parallel.num_stages(replica) for replica in replicas]
    mesh = RankMesh.of_replicas(num_stages, task.device, tensor=parallel.tensor)
    if parallel.tensor > 1:
        # Planned trees connect all ranks, but tensor-parallel ranks hold different weights.
        task = replace(task, reduce_backend=None)
    agree_on_model(task.model, task.device)
    task = _replayed_where_shorter(task, problem, parallel, plan.get(Communication))
    own = replicas[mesh.data_rank]
    task = _in_waves(_using_less_memory(task, graph, own), problem, plan, mesh.data_rank)
    pipeline = None
    if parallel.num_stages(own) > 1:
        schedule = make_schedule(parallel.schedule, parallel.num_stages(own), len(own.microbatches))
        pipeline = cut_at_ops(graph, own.cuts), schedule
    return _rank_strategy(task, RankPart(
        mesh=mesh,
        batch_split=[replica.num_samples for replica in replicas],
        microbatches=own.microbatches,
        zero=3 if parallel.sharded else 0,
        tensor=parallel.tensor,
        joins_norms=not parallel.is_staged and all(len(r.microbatches) == 1 for r in replicas),
        pipeline=pipeline,
        recomputed=_covered_modules(graph, own.recomputed) if parallel.sharded else (),
        is_offloaded=own.update == "host",
    ))  # fmt: skip


def _single_device_strategy(task: ParallelTask, sizes: Sequence[int]) -> Strategy:
    """Prepare the full model on the only device of a plan, in this process."""
    seed = task.options.seed
    if len(sizes) == 1:
        return task.on_one_device(task.batch, seed)
    _warn_of_norms(task.model)
    inner = task.on_one_device(microbatches(task.batch, sizes, task.count)[0][0], None)
    return _accumulated(task, inner, sizes, seed=seed)


def _accumulated(
    task: ParallelTask, inner: Strategy, sizes: Sequence[int], *, seed: int | None = None
) -> Strategy:
    """Run microbatches of these sizes, in waves if the plan has them."""
    if len(sizes) == 1:
        return inner
    waves = None
    if task.waves is not None and isinstance(inner, TracedModel):
        waves = make_waves(inner, task.waves, task.device)
    elif task.waves is not None:
        _warn(
            "the step of this model cannot be traced, so its waves run one after the other, with "
            "the same numbers"
        )
    return Accumulated(inner, sizes, task, seed=seed, waves=waves)


def _rank_strategy(task: ParallelTask, part: RankPart) -> Strategy:
    """Prepare tensor and pipeline parallelism of this rank, wrapped by data parallelism."""
    model, mesh = task.model, part.mesh
    if task.memory is not None:
        _refuse_budget(task, part)
        # Joined batch norms would exchange statistics again when they are recomputed.
        part = replace(part, joins_norms=False)
    rows = settled(
        take_rows(task.batch, split_rows(num_rows(task.batch), part.batch_split)[mesh.data_rank])
    )
    if not part.joins_norms:
        _warn_of_norms(model)
    if len(part.batch_split) > 1:
        if part.joins_norms:
            join_batch_norms(model, mesh.data_group)
        if task.count is None and has_ignored_labels(task.batch):
            _warn(
                "some labels are -100, so a mean over tokens weighs samples differently than "
                "replicas do; say what counts: count=lambda batch: (batch['labels'][:, 1:] != "
                "-100).sum()"
            )
    cuts: Mapping[int, TensorCut] = {}
    if part.tensor > 1:
        cuts = shard_layers(model, mesh.tensor_group, mesh.tensor_rank, part.tensor)
    inner: Strategy
    pipeline = None
    if part.pipeline is not None:
        inner = pipeline = Pipeline(task, part, rows)
        _load_meta_tensors(task, mesh, pipeline.is_needed, cuts)
        pipeline.place_weights()
    else:
        _load_meta_tensors(task, mesh, lambda tensor: True, cuts)
        inner, cuts = _without_stages(task, part, rows, cuts)
    kind = DataParallel if task.start_propagation is None else PriorityDataParallel
    return kind(inner, task, part, cuts=cuts, pipeline=pipeline)


def _without_stages(
    task: ParallelTask, part: RankPart, rows: Any, cuts: Mapping[int, TensorCut]
) -> tuple[Strategy, Mapping[int, TensorCut]]:
    """Prepare a replica without a pipeline; returns its strategy and the updated ``cuts``.

    FSDP2 replaces parameters by shards, so their ids change.
    """
    sizes = part.microbatches
    if task.start_propagation is not None:
        task.model.to(task.device)
        return EagerModel(task.model, task.recipe, task.device), cuts
    if part.zero == 3 and len(part.batch_split) > 1:
        named = {name: cuts.get(id(p)) for name, p in task.model.named_parameters()}
        sharded = ShardedModel(
            task.model, task.optimizer, task.recipe, part.mesh.data_axis,
            recomputed=part.recomputed,
            is_offloaded=part.is_offloaded and task.device.type != "cpu",
        )  # fmt: skip
        # FSDP2 has replaced the parameters, so cuts are found again by name.
        now = dict(task.model.named_parameters())
        cuts = {id(now[name]): cut for name, cut in named.items() if cut is not None}
        return _accumulated(task, sharded, sizes), cuts
    first = microbatches(rows, sizes, task.count)[0][0] if len(sizes) > 1 else rows
    return _accumulated(task, task.on_one_device(first, None), sizes), cuts


# ── options of a plan ────────────────────────────────────────────────────────────────────────────


def _with_planned_kernels(task: ParallelTask, graph: Graph) -> ParallelTask:
    device = graph.meta.get("device")
    if not isinstance(device, str):
        return task
    return replace(task, recipe=replace(task.recipe, device=device))


def _replayed_where_shorter(
    task: ParallelTask, problem: Problem, parallel: Parallel, planned: Communication | None
) -> ParallelTask:
    """Disable overlap if graph replay followed by all reductions is predicted to be faster."""
    is_plain = not parallel.is_staged and parallel.tensor == 1 and not parallel.sharded
    if task.device.type != "cuda" or not is_plain or task.predicted_s is None:
        return task
    step_s = replayed_step_s(problem, parallel, planned)
    if step_s >= task.predicted_s:
        return task
    return replace(task, overlaps=False, predicted_s=step_s)


def _in_waves(task: ParallelTask, problem: Problem, plan: Plan, replica: int) -> ParallelTask:
    """Set the order in which two streams run a replica's microbatches, if the plan has waves."""
    waves = plan.get(Waves)
    if waves is None:
        return task
    # The order of ops is that of the plan, so the kernels of the plan are traced.
    task = _with_planned_kernels(task, problem.graph)
    return replace(task, waves=wave_order(problem, plan[Parallel], waves, replica))


def _using_less_memory(task: ParallelTask, graph: Graph, own: Replica) -> ParallelTask:
    """Apply the recomputed blocks and host updates of a replica."""
    recipe = task.recipe
    if own.recomputed:
        recipe = replace(recipe, again=_blocks_like(graph, own.recomputed))
    # On a CPU parameters are on the host already.
    if own.update == "host" and task.device.type != "cpu":
        recipe = replace(recipe, make_update=HostUpdate())
    return replace(task, recipe=recipe)


def _blocks_like(planned: Graph, blocks: Sequence[tuple[int, int]]) -> RecomputedBlocks:
    """Return the planned recomputed blocks, transferable to steps with another batch size."""
    block_of = second_run(planned, tuple(blocks)).block_of

    def found(graph: Graph, program: Program) -> IntArray:
        return placement_like(graph, planned, block_of)

    return found


def _all_layers(model: nn.Module) -> RecomputedBlocks:
    """Return recomputed blocks with one block per layer of the model's stack."""
    stack, _ = find_stack(model)

    def found(graph: Graph, program: Program) -> IntArray:
        layers = [layer_of(call.module, stack) for call in program.calls]
        return np.array([-1 if layer is None else layer for layer in layers], dtype=np.int32)

    return found


def _covered_modules(planned: Graph, blocks: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Return the outermost modules whose ops are all in the recomputed blocks."""
    recomputed = second_run(planned, tuple(blocks)).block_of >= 0
    is_covered: dict[str, bool] = {}
    for op in np.flatnonzero(planned.op_phase == Phase.FORWARD).tolist():
        path = planned.module_of(op)
        while path:
            is_covered[path] = is_covered.get(path, True) and bool(recomputed[op])
            path = path.rpartition(".")[0]
    return tuple(
        path for path, covered in is_covered.items()
        if covered and not is_covered.get(path.rpartition(".")[0], False)
    )  # fmt: skip


# ── weights of models on the meta device ─────────────────────────────────────────────────────────


def _load_meta_tensors(
    task: ParallelTask,
    mesh: RankMesh,
    is_needed: Callable[[torch.Tensor], bool],
    cuts: Mapping[int, TensorCut],
) -> None:
    """Read the meta tensors that this rank needs from the task's safetensors files."""
    model = task.model
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    wanted = {name: t for name, t in named.items() if t.is_meta and is_needed(t)}
    if not wanted:
        return
    if task.weights is None:
        raise UsageError(
            f"{next(iter(wanted))!r} has no memory, and no file was named to read it from",
            hint="give weights=, a file or folder of safetensors with the model's names",
        )
    place, found = Path(task.weights), set()
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    for name, whole in _tensors_of(files, wanted):
        tensor, cut = wanted[name], cuts.get(id(wanted[name]))
        value = whole if cut is None else cut.piece(whole, mesh.tensor_rank)
        if tensor.shape != value.shape:
            raise InputFileError(
                f"{name!r} is {list(value.shape)} in the file and {list(tensor.shape)} in the model"
            )
        real: torch.Tensor = value.to(mesh.device, tensor.dtype, copy=True)
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        # Swapped in place, so that optimizers and tied modules keep their references.
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
        found.add(name)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise InputFileError(
            f"there is no {missing[0]!r}", where=str(place),
            hint="build only what is in the files on the meta device; buffers that are computed "
            "when a model is built must be real",
        )  # fmt: skip


def _tensors_of(
    files: Sequence[Path], wanted: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in set(file.keys()) & wanted.keys():
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputFileError(f"cannot read the weights: {error}", where=str(path)) from error


# ── refusals and warnings ────────────────────────────────────────────────────────────────────────


def _require_layers(model: nn.Module, planned: int) -> None:
    path, found = find_stack(model)
    if found != planned:
        raise UsageError(
            f"the plan is for {planned} layers, and {path or type(model).__name__} has {found}",
            hint="plan this very model",
        )


def _require_batch(num_samples: int, batch: Any) -> None:
    if num_rows(batch) != num_samples:
        raise UsageError(
            f"the plan is for {num_samples} samples per step, the batch has {num_rows(batch)}",
            hint="give the whole batch of all ranks, or plan for this size",
        )


def _require_same_weights(graph: Graph, model: nn.Module) -> None:
    """Refuse a model whose weights differ from the planned graph in names or bytes."""
    planned = {
        graph.tensor_names[t]: int(graph.tensor_bytes[t])
        for t in range(graph.num_tensors)
        if graph.tensor_role[t] == Role.PARAMETER and graph.tensor_producer[t] < 0
    }
    for name, parameter in model.named_parameters():
        num_bytes = parameter.numel() * parameter.itemsize
        # Tensor sizes in a GPU profile are rounded up by the allocator.
        if planned.pop(name, num_bytes) not in (num_bytes, aligned(num_bytes)):
            raise UsageError(
                f"{name!r} has {num_bytes} bytes, another number than the planned one",
                hint="plan this very model",
            )
    if planned:
        raise UsageError(
            f"the plan is for a model with {next(iter(planned))!r}, which "
            f"{type(model).__name__} does not have",
            hint="plan this very model",
        )


def _refuse_budget(task: ParallelTask, part: RankPart) -> None:
    """Refuse a memory budget for anything but plain data parallelism."""
    is_plain = part.pipeline is None and part.tensor == 1 and not part.zero
    if not is_plain or task.options.async_update or task.start_propagation is not None:
        raise UsageError(
            "a memory budget per device works with plain data parallelism, whose updates are "
            "finished when a step returns",
            hint="plan data parallelism without stages, shards and priorities, or leave memory= "
            "and async_update= out",
        )


def _warn(text: str) -> None:
    warn_user(text, ParallelWarning)


def _warn_of_memory(config: ParallelConfig) -> None:
    """Warn of options that only save memory and are not applied."""
    left_out = [
        what
        for what, is_planned in (
            ("recomputation of attention alone", config.recompute == "selective"),
            ("sequence parallelism", config.sequence_parallel),
        )
        if is_planned
    ]
    if left_out:
        _warn(
            f"{' and '.join(left_out)} of the plan is not applied to your module: its numbers are "
            "the same, and it holds more activations than planned"
        )


def _warn_of_norms(model: nn.Module) -> None:
    norms = batch_norms_in_training(model)
    if norms:
        _warn(
            f"batch norm {norms[0]!r} normalises each microbatch by itself, as with accumulated "
            "gradients in PyTorch: numbers differ from those of the whole batch at once"
        )
