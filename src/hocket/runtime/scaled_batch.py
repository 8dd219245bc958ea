"""A smaller batch of the same plan: each device does the same with fewer samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.cost.roofline import costs_from_settings
from hocket.graph.batches import at_batch, with_other_batch
from hocket.graph.graph import Graph
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel
from hocket.runtime.strategies.batch_split import split_rows


def with_graph(problem: Problem, graph: Graph) -> Problem:
    """Return the same problem with another graph."""
    costs = costs_from_settings(graph, problem.cluster, problem.costs.settings)
    return replace(problem, work=graph, op_costs=costs)


def smaller_batch(problem: Problem, parallel: Parallel, scale: float) -> tuple[Problem, Parallel]:
    """Return a part of the batch, split in the same proportions; each replica has a sample."""
    whole = parallel.num_samples
    num_samples = max(len(parallel.replicas), round(whole * scale))
    taken = split_rows(num_samples, [replica.num_samples for replica in parallel.replicas])
    replicas = tuple(
        replace(replica, microbatches=_fewer(replica.microbatches, len(rows)))
        for replica, rows in zip(parallel.replicas, taken, strict=True)
    )
    small = at_batch(problem.graph, num_samples)
    graph = with_other_batch(small, num_samples, problem.graph, whole)
    return with_graph(problem, graph), replace(parallel, replicas=replicas)


def _fewer(microbatches: Sequence[int], num_samples: int) -> tuple[int, ...]:
    kept = microbatches[: min(len(microbatches), num_samples)]
    return tuple(len(rows) for rows in split_rows(num_samples, kept))
