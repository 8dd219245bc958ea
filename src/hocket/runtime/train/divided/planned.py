"""Plans that divide a model or share out its batch, carried by a person's module."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hocket.base.errors import UsageError
from hocket.graph.graph import Graph, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Lanes, Parallel, Replica, Schedule
from hocket.plan.training import TransformerTraining
from hocket.planners.parallel.schedules import make_schedule
from hocket.runtime.offload.optimizer_parts import HostUpdate
from hocket.runtime.strategy import Strategy
from hocket.runtime.train.divided.again import blocks_like, covered_modules
from hocket.runtime.train.divided.build import (
    DividedTask,
    RankPart,
    agree,
    alone,
    carried,
    degrees_strategy,
    require_batch,
    require_layers,
)
from hocket.runtime.train.divided.cutting import cut_at_ops
from hocket.runtime.train.divided.mesh import Mesh, UnevenMesh
from hocket.runtime.train.divided.shares import num_rows
from hocket.runtime.train.divided.turns import Turns
from hocket.runtime.train.predicted_step import predicted_s
from hocket.runtime.train.waves import wave_order
from hocket.simulate.parallel.replayed import replayed_step_s
from hocket.transformer import ParallelConfig

# Shares of a batch, as `hocket plan` makes them, carried in a person's loop.
#
# Every replica has stages and microbatches of its own number. A weight may be with another stage in
# each replica; its gradients are summed by the ranks that have it.


def split_batch_strategy(
    task: DividedTask,
    problem: Problem,
    shares: Parallel,
    lanes: Lanes | None = None,
    planned: Communication | None = None,
) -> Strategy:
    """Carry the model by all ranks of shares of the problem's graph.

    ``planned`` is the plan's own exchange of gradients.
    """
    graph = problem.graph
    _require_same_weights(graph, task.model)
    replicas = shares.replicas
    if len(shares.devices) == 1:
        task = _in_lanes(task, problem, shares, lanes, 0)
        return alone(_holding_less(task, graph, replicas[0]), replicas[0].microbatches)
    noted = graph.meta.get("device")
    if isinstance(noted, str):
        # Stages are cut at ops, so the same kernels are recorded.
        task = replace(task, recipe=replace(task.recipe, device=noted))
    if shares.is_round_robin:
        return Turns(task, graph, shares)
    num_stages = [shares.num_stages(replica) for replica in replicas]
    mesh = (
        UnevenMesh(num_stages, task.device, tensor=shares.tensor)
        if shares.is_staged
        else Mesh(ParallelConfig(data=len(replicas), tensor=shares.tensor), task.device)
    )
    if shares.tensor > 1:
        # Planned exchanges are between all ranks, and these have different parts of weights.
        task = replace(task, sums_by=None)
    agree(task)
    task = _replayed_where_shorter(task, problem, shares, planned)
    own = replicas[mesh.data_rank]
    task = _holding_less(task, graph, own)
    task = _in_lanes(task, problem, shares, lanes, mesh.data_rank)
    pipeline = None
    if shares.num_stages(own) > 1:
        schedule = make_schedule(shares.schedule, shares.num_stages(own), len(own.microbatches))
        pipeline = cut_at_ops(graph, own.cuts), schedule
    return carried(task, RankPart(
        mesh=mesh,
        shares=[replica.num_samples for replica in replicas],
        sizes=own.microbatches,
        zero=3 if shares.sharded else 0,
        tensor=shares.tensor,
        joins_norms=not shares.is_staged and all(len(r.microbatches) == 1 for r in replicas),
        pipeline=pipeline,
        again=covered_modules(graph, own.recomputed) if shares.sharded else (),
        is_offloaded=own.update == "host",
    ))  # fmt: skip


def _replayed_where_shorter(
    task: DividedTask, problem: Problem, shares: Parallel, planned: Communication | None
) -> DividedTask:
    """The task without overlap, if a replayed step and all sums after it are predicted shorter."""
    is_plain = not shares.is_staged and shares.tensor == 1 and not shares.sharded
    if task.device.type != "cuda" or not is_plain or task.predicted_s is None:
        return task
    step_s = replayed_step_s(problem, shares, planned)
    if step_s >= task.predicted_s:
        return task
    return replace(task, overlaps=False, predicted_s=step_s)


def _in_lanes(
    task: DividedTask, problem: Problem, shares: Parallel, lanes: Lanes | None, replica: int
) -> DividedTask:
    """The task with the order in which a replica's two lanes take its microbatches."""
    if lanes is None:
        return task
    noted = problem.graph.meta.get("device")
    if isinstance(noted, str):
        # Lanes take the ops of the plan in turns, so the same kernels are recorded.
        task = replace(task, recipe=replace(task.recipe, device=noted))
    return replace(task, waves=wave_order(problem, shares, lanes, replica))


def _holding_less(task: DividedTask, graph: Graph, own: Replica) -> DividedTask:
    """The task as the replica of this rank does it: blocks run again, updates on the host."""
    recipe = task.recipe
    if own.recomputed:
        recipe = replace(recipe, again=blocks_like(graph, own.recomputed))
    if own.update == "host" and task.device.type != "cpu":
        recipe = replace(recipe, make_update=HostUpdate())
    return replace(task, recipe=recipe)


def _require_same_weights(graph: Graph, model: nn.Module) -> None:
    """Refuse another model than the planned one, by the names and bytes of its weights."""
    planned = {
        graph.tensor_names[t]: int(graph.tensor_bytes[t])
        for t in range(graph.num_tensors)
        if graph.tensor_role[t] == Role.PARAMETER and graph.tensor_producer[t] < 0
    }
    for name, parameter in model.named_parameters():
        num_bytes = parameter.numel() * parameter.itemsize
        if planned.pop(name, num_bytes) != num_bytes:
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


def divides(plan: Plan) -> bool:
    """True if a plan divides a training, rather than placing single ops."""
    return plan.get(Parallel) is not None


def parallel_strategy(task: DividedTask, problem: Problem, plan: Plan) -> Strategy:
    """What carries such a plan; refuses another model or batch than the planned one."""
    task = replace(task, predicted_s=predicted_s(problem, plan, task.device))
    parallel = plan[Parallel]
    if parallel.layers is None:
        require_batch(parallel.num_samples, task.batch)
        return split_batch_strategy(
            task, problem, parallel, plan.get(Lanes), plan.get(Communication)
        )
    config = parallel.config
    if isinstance(problem.work, TransformerTraining):
        require_layers(task.model, problem.training.model.layers)
    require_batch(config.global_batch, task.batch)
    return degrees_strategy(task, config, plan.get(Schedule), accumulates=True)


def stated_degrees_strategy(task: DividedTask, config: ParallelConfig) -> Strategy:
    """What carries degrees that a person states; who states nothing else means the batch given.

    A microbatch is one sample where nobody said anything, so only pipelines take several.
    """
    if config.global_batch == 1 and config.shares is None:
        config = replace(config, global_batch=num_rows(task.batch))
    require_batch(config.global_batch, task.batch)
    return degrees_strategy(task, config, None, accumulates=False)
