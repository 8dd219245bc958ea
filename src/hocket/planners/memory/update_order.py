"""In which order the host updates blocks whose gradients have come: P3 over the link of one device.

The backward pass makes the gradients of the last blocks first, and the next forward pass needs the
first blocks first. Gradients go down, the host updates, parameters come up: three stations, of
which the slowest is the channel of `simulate/gradients.py` and the others what a block waits in
addition. The executor takes the lowest block that has come and lets the forward pass wait block by
block (`runtime/memory/updates.py`), so that updates go on beside it: what a step among many takes
then, and what that gains over waiting for all, is said here. O(ops + blocks log blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.graph.graph import Graph, Phase, Stream
from hocket.simulate.gradients import (
    GradientChannel,
    GradientOrder,
    LayerWork,
    lower_bound_s,
    step_s,
)
from hocket.simulate.rewriting.blocks import StepBlocks
from hocket.simulate.rewriting.step import BudgetedStep
from hocket.simulate.timeline import Timeline

AFTER_BACKWARD = GradientOrder("after the backward pass", False, crosses=False, overlaps=False)
AS_THEY_COME = GradientOrder("as gradients come", by_priority=False, crosses=False)
BY_NEED = GradientOrder("by need", by_priority=True, crosses=True)
_STATIONS = (Stream.COPY_OUT, Stream.HOST, Stream.COPY_IN)
_NANO = 1e9


@dataclass(frozen=True)
class UpdateOrders:
    """What a step takes when the host updates in each order, and what no order goes below."""

    step_s: dict[str, float]
    """By the names of the orders, the executor's own last."""
    bound_s: float

    @property
    def gain(self) -> float:
        """Of the executor's order over updates as gradients come, all waited for."""
        return self.step_s[AS_THEY_COME.name] / self.step_s[BY_NEED.name]


def host_update_orders(
    step: BudgetedStep, timeline: Timeline, blocks: StepBlocks
) -> UpdateOrders | None:
    """The orders of a step's updates on the host; None where it has none there."""
    if not (step.rewritten.graph.op_stream == Stream.HOST).any():
        return None
    spent_s, passes_s = _seconds(step, blocks)
    is_updated = spent_s[1] > 0
    # Passes with their share of what they wait for beside updates on the host.
    passes_s *= max(1.0, _without_host_s(step, timeline) / max(float(passes_s.sum()), 1e-12))
    slowest = int(np.argmax(spent_s[:, is_updated].sum(axis=1)))
    others_s = np.delete(spent_s[:, is_updated], slowest, axis=0).sum(axis=0)
    layers = [
        # The channel counts nanoseconds of the slowest station instead of bytes.
        LayerWork(forward_s, backward_s, round(_NANO * station_s) if is_at_home else 0)
        for forward_s, backward_s, station_s, is_at_home in zip(
            *passes_s.tolist(), spent_s[slowest].tolist(), is_updated.tolist(), strict=True
        )
    ]
    channel = GradientChannel(_NANO, latency_s=float(others_s.mean()))
    orders = (AFTER_BACKWARD, AS_THEY_COME, BY_NEED)
    return UpdateOrders(
        {how.name: step_s(layers, channel, how) for how in orders}, lower_bound_s(layers, channel)
    )


def _without_host_s(step: BudgetedStep, timeline: Timeline) -> float:
    """When all has ended that does not wait for an update on the host."""
    graph = step.rewritten.graph
    waits = (graph.op_stream == Stream.HOST) | _returns(graph)
    return float(timeline.op_end_s[~waits].max(initial=0.0))


def _returns(graph: Graph) -> BoolArray:
    """Copies of what the host has updated back to the device, where it stays."""
    reader, maker = _dependences(graph)
    after = np.zeros(graph.num_ops, dtype=np.bool_)
    after[reader[graph.op_stream[maker] == Stream.HOST]] = True
    return np.asarray(after & (graph.op_stream == Stream.COPY_IN))


def _sent_home(graph: Graph) -> BoolArray:
    """Copies to the host that updates there wait for: gradients."""
    reader, maker = _dependences(graph)
    before = np.zeros(graph.num_ops, dtype=np.bool_)
    before[maker[graph.op_stream[reader] == Stream.HOST]] = True
    return np.asarray(before & (graph.op_stream == Stream.COPY_OUT))


def _dependences(graph: Graph) -> tuple[LongArray, LongArray]:
    """Pairs of ops, of which one reads what the other makes."""
    reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.read_ptr))
    maker = graph.tensor_producer[graph.reads].astype(np.int64)
    return reader[maker >= 0], maker[maker >= 0]


def _seconds(step: BudgetedStep, blocks: StepBlocks) -> tuple[FloatArray, FloatArray]:
    """Per block: seconds of its updates at each station, and of its forward and backward pass."""
    graph, op_s = step.rewritten.graph, step.problem.costs.op_s[0]
    block, stream = blocks.block_of[step.rewritten.beside], graph.op_stream
    is_forward = graph.op_phase == Phase.FORWARD
    # What else crosses the link (activations, parameters for the backward pass) waits for none; in
    # the forward pass nothing comes but parameters.
    is_fetched = is_forward & (stream == Stream.COPY_IN)
    is_update = _sent_home(graph) | _returns(graph) | is_fetched | (step.rewritten.origin >= 0)
    kinds = [
        *((stream == station) & is_update for station in _STATIONS),
        *((stream == Stream.COMPUTE) & of_pass for of_pass in (is_forward, ~is_forward)),
    ]
    spent_s = np.zeros((len(kinds), blocks.num_blocks))
    for row, chosen in enumerate(kinds):
        np.add.at(spent_s[row], block[chosen], op_s[chosen])
    return spent_s[: len(_STATIONS)], spent_s[len(_STATIONS) :]
