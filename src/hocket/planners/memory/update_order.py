"""Order in which the host updates blocks whose gradients have arrived: P3 on one device's link.

The backward pass makes the gradients of the last blocks first, and the next forward pass needs the
first blocks first. The executor takes the lowest block that has come. By default all updates are
finished when a step ends; with ``async_update`` the next forward pass waits block by block, so that
updates overlap it. What a step among many takes in each case is simulated
(`simulate/rewriting/following.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.graph.graph import Stream
from hocket.simulate.rewriting.following import (
    ASYNC,
    FINISHED,
    HostOrder,
    busiest_s,
    period_s,
)
from hocket.simulate.rewriting.step import BudgetedStep
from hocket.simulate.rewriting.uses import Uses

_FINISHED, _ASYNC = "finished with the step", "async_update"
HOST_ORDERS = {
    "after the backward pass": HostOrder(by_need=False, crosses=False, overlaps=False),
    _FINISHED: FINISHED,
    _ASYNC: ASYNC,
}
"""Orders by name; the executor has the last two."""


@dataclass(frozen=True)
class UpdateOrders:
    """Step time for each order of updates on the host, and a lower bound for all orders."""

    step_s: dict[str, float]
    """Step times by the names of the orders."""
    bound_s: float

    @property
    def gain(self) -> float:
        """Speedup of asynchronous updates over those that are finished with the step."""
        return self.step_s[_FINISHED] / self.step_s[_ASYNC]


def host_update_orders(step: BudgetedStep, uses: Uses, least_s: float) -> UpdateOrders | None:
    """The orders of a step's updates on the host, of which none makes it take less than
    ``least_s``; None where it has none there."""
    if not (step.rewritten.graph.op_stream == Stream.HOST).any():
        return None
    times_s = {name: max(period_s(step, uses, how), least_s) for name, how in HOST_ORDERS.items()}
    return UpdateOrders(times_s, busiest_s(step))
