"""In which order the host updates blocks whose gradients have come: P3 over the link of one device.

The backward pass makes the gradients of the last blocks first, and the next forward pass needs the
first blocks first. The executor takes the lowest block that has come and lets the forward pass wait
block by block, so that updates go on beside it. What a step among many takes then, and what that
gains over waiting for all, is simulated (`simulate/rewriting/following.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.graph.graph import Stream
from hocket.simulate.rewriting.following import BY_NEED, HostOrder, busiest_s, period_s
from hocket.simulate.rewriting.step import BudgetedStep
from hocket.simulate.rewriting.uses import Uses

_AS_THEY_COME, _BY_NEED = "as gradients come", "by need"
HOST_ORDERS = {
    "after the backward pass": HostOrder(by_need=False, crosses=False, overlaps=False),
    _AS_THEY_COME: HostOrder(by_need=False, crosses=False),
    _BY_NEED: BY_NEED,
}
"""By their names, the executor's own last."""


@dataclass(frozen=True)
class UpdateOrders:
    """What a step takes when the host updates in each order, and what no order goes below."""

    step_s: dict[str, float]
    """By the names of the orders."""
    bound_s: float

    @property
    def gain(self) -> float:
        """Of the executor's order over updates as gradients come, all waited for."""
        return self.step_s[_AS_THEY_COME] / self.step_s[_BY_NEED]


def host_update_orders(step: BudgetedStep, uses: Uses, least_s: float) -> UpdateOrders | None:
    """The orders of a step's updates on the host, of which none makes it take less than
    ``least_s``; None where it has none there."""
    if not (step.rewritten.graph.op_stream == Stream.HOST).any():
        return None
    times_s = {name: max(period_s(step, uses, how), least_s) for name, how in HOST_ORDERS.items()}
    return UpdateOrders(times_s, busiest_s(step))
