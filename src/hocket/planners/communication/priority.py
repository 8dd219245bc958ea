"""Order of gradient all-reduces: wait-free, by priority, sliced; and the gain of each.

Every order is simulated (`simulate/gradients.py`) on the layers' times and the rate of the planned
all-reduce. Slices get the best of a few sizes. Gradients that cross the end of a step are not
used if communication takes less than a fifth of the compute time, or if the gain is below 1 %:
they need hooks at every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections.parallel import Parallel
from hocket.plan.sections.priority import Priority, takes_priority
from hocket.simulate.gradients import (
    GradientChannel,
    GradientOrder,
    LayerWork,
    lower_bound_s,
    step_s,
)
from hocket.simulate.parallel.batch_costs import gradients_of

SLICES_BYTES = (40_000, 160_000, 640_000, 2_560_000)
"""Sizes of slices that are tried."""
_MOST_SLICES = 20_000
"""Most slices of all gradients: slices are simulated one by one, so smaller ones are not tried."""
LEAST_GAIN = 1.01
"""Smallest speedup for which priorities are used."""
LEAST_COMMUNICATION = 0.2
"""Smallest ratio of communication to compute time for which priorities are used."""


@dataclass(frozen=True)
class PropagationOffer:
    """One order of gradients and its predicted step time."""

    how: GradientOrder
    step_s: float


@dataclass(frozen=True)
class PropagationChoice:
    """All simulated orders, and the one to use."""

    offers: tuple[PropagationOffer, ...]
    chosen: PropagationOffer
    lower_bound_s: float
    computes_s: float
    travels_s: float
    why: str

    def gain(self) -> float:
        """Speedup of the chosen order over wait-free backpropagation."""
        return self.offer("wait-free").step_s / self.chosen.step_s

    def offer(self, name: str) -> PropagationOffer:
        """Return the offer with this name."""
        return next(offer for offer in self.offers if offer.how.name == name)


def layers_of(graph: Graph, op_s: FloatArray) -> list[LayerWork]:
    """Compute time and gradient size per parameter of a training step, ordered by first use.

    A forward op belongs to the parameter that was used last, a backward op to that of its forward
    op. Optimizer ops are left out, because they take equally long in every order.
    """
    first_use: dict[int, int] = {}
    for tensor in np.flatnonzero(graph.tensor_role == Role.PARAMETER).tolist():
        users = graph.users_of(tensor)
        forward = users[graph.op_phase[users] == Phase.FORWARD]
        if len(forward):
            first_use[tensor] = int(forward[0])
    if not first_use or not (graph.op_phase == Phase.BACKWARD).any():
        raise UsageError(
            "the graph is no training step of a model with parameters",
            hint="capture one with its backward pass: hocket capture gpt2 -o step.json",
        )
    order = sorted(first_use, key=lambda tensor: (first_use[tensor], tensor))
    starts = [first_use[tensor] for tensor in order]
    layer = np.maximum(np.searchsorted(starts, np.arange(graph.num_ops), side="right") - 1, 0)
    is_backward = graph.op_phase == Phase.BACKWARD
    known = is_backward & (graph.partner >= 0)
    layer[known] = layer[graph.partner[known]]
    # A backward op without forward op belongs to the same layer as the backward op before it.
    last = len(order) - 1
    for op in np.flatnonzero(is_backward).tolist():
        last = layer[op] = int(layer[op]) if known[op] else last
    spent_s = np.zeros((2, len(order)))
    for row, phase in enumerate((Phase.FORWARD, Phase.BACKWARD)):
        np.add.at(spent_s[row], layer[graph.op_phase == phase], op_s[graph.op_phase == phase])
    sizes = graph.tensor_bytes[order].tolist()
    return [LayerWork(*each) for each in zip(*spent_s.tolist(), sizes, strict=True)]


def choose_propagation(layers: Sequence[LayerWork], channel: GradientChannel) -> PropagationChoice:
    """Simulate all orders and choose the fastest that is worth its cost."""
    computes_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    num_bytes = sum(layer.gradient_bytes for layer in layers)
    travels_s = num_bytes / channel.rate_bps
    wait_free = GradientOrder("wait-free", by_priority=False, crosses=False)
    # Slices without priorities are only shown for comparison, so one size is enough.
    fair_bytes = max(float(SLICES_BYTES[1]), num_bytes / _MOST_SLICES)
    unsliced = [
        GradientOrder("after backward", by_priority=False, crosses=False, overlaps=False),
        wait_free,
        GradientOrder("slices only", by_priority=False, crosses=False, slice_bytes=fair_bytes),
        GradientOrder("priority, whole layers", by_priority=True, crosses=True),
    ]
    sliced = [
        GradientOrder("priority, slices", by_priority=True, crosses=True, slice_bytes=size)
        for size in SLICES_BYTES
        if num_bytes <= size * _MOST_SLICES or size == SLICES_BYTES[-1]
    ]
    best = min(sliced, key=lambda how: step_s(layers, channel, how))
    offers = tuple(PropagationOffer(how, step_s(layers, channel, how)) for how in (*unsliced, best))
    plain = next(offer for offer in offers if offer.how is wait_free)
    fastest = min(offers, key=lambda offer: offer.step_s)
    chosen, why = fastest, f"{fastest.how.name} is fastest"
    if travels_s < LEAST_COMMUNICATION * computes_s:
        part = 100 * travels_s / computes_s if computes_s else inf
        chosen, why = plain, f"communication is {part:.0f} % of computing: nothing to gain"
    elif plain.step_s < LEAST_GAIN * fastest.step_s:
        chosen, why = plain, "no order gains one in a hundred over wait-free backpropagation"
    bound_s = lower_bound_s(layers, channel)
    return PropagationChoice(offers, chosen, bound_s, computes_s, travels_s, why)


def with_priority(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with gradients sent by priority, if that is worth it."""
    choice = choose_for_replicas(problem, plan)
    if choice is None or not choice.chosen.how.crosses:
        return plan
    largest = max(int(problem.graph.tensor_bytes[gradients_of(problem.graph)].max(initial=4)), 4)
    # A slice larger than the largest gradient would be the same as no slices.
    size = int(min(choice.chosen.how.slice_bytes, largest))
    return plan.having(Priority(slice_bytes=size, crosses=True))


def choose_for_replicas(problem: Problem, plan: Plan) -> PropagationChoice | None:
    """Return the best order of gradients for replicas of one device and one microbatch each.

    None for any other plan: there is nothing to order.
    """
    shares = plan.get(Parallel)
    if shares is None or not takes_priority(shares):
        return None
    if not (problem.graph.op_phase == Phase.BACKWARD).any():
        return None
    return _choose_for_shares(problem, shares)


@lru_cache(maxsize=8)
def _choose_for_shares(problem: Problem, shares: Parallel) -> PropagationChoice:
    number = problem.cluster.device_names.index
    # Replicas run concurrently on their parts of the batch; all wait for the slowest.
    op_s = np.max(
        [
            problem.costs.op_s[problem.costs.device_row[number(replica.devices[0])]]
            * (replica.num_samples / shares.num_samples)
            for replica in shares.replicas
        ],
        axis=0,
    )
    layers = layers_of(problem.graph, op_s)
    size = sum(layer.gradient_bytes for layer in layers)
    from hocket.planners.communication.collective import plan_collective

    chosen = plan_collective(problem.cluster, "allreduce", shares.devices, size_bytes=size).chosen
    channel = GradientChannel(float(chosen.rate_bps), latency_s=chosen.latency_s)
    return choose_propagation(layers, channel)
