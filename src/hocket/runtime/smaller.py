"""A smaller batch of the same plan: what each device does stays, with fewer samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.cost.roofline import costs_from_settings
from hocket.graph.batches import at_batch, with_other_batch
from hocket.graph.graph import Graph
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel


def with_graph(problem: Problem, graph: Graph) -> Problem:
    """The same problem with another graph."""
    costs = costs_from_settings(graph, problem.cluster, problem.costs.settings)
    return replace(problem, work=graph, op_costs=costs)


def smaller_shares(problem: Problem, shares: Parallel, scale: float) -> tuple[Problem, Parallel]:
    """A part of the batch, shared out in the same proportions; each replica has a sample."""
    whole = shares.num_samples
    num_samples = max(len(shares.replicas), round(whole * scale))
    taken = apportioned(num_samples, [replica.num_samples for replica in shares.replicas])
    replicas = tuple(
        replace(replica, microbatches=_fewer(replica.microbatches, samples))
        for replica, samples in zip(shares.replicas, taken, strict=True)
    )
    small = at_batch(problem.graph, num_samples)
    graph = with_other_batch(small, num_samples, problem.graph, whole)
    return with_graph(problem, graph), replace(shares, replicas=replicas)


def apportioned(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers of sum ``total``, by weight, at least one each (largest remainders).

    ``total`` is at least the number of weights and at most their sum.
    """
    spare, beyond = total - len(weights), [weight - 1 for weight in weights]
    whole = max(sum(beyond), 1)
    parts = [1 + spare * weight // whole for weight in beyond]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(spare * beyond[i] % whole))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def _fewer(microbatches: Sequence[int], num_samples: int) -> tuple[int, ...]:
    kept = microbatches[: min(len(microbatches), num_samples)]
    return tuple(apportioned(num_samples, kept))
