"""Keep a budget: the fastest of a step's plans that stays within a number of bytes, with proof.

The peak is what the simulator saw of the very ops that the plan becomes. Beside it stand the fewest
bytes that any plan needs, and the time that no plan of these ways takes less than.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_bytes, typed_bytes
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.frontier import Frontier, find_frontier
from hocket.planners.memory.least import least_bytes
from hocket.planners.memory.maker import CHUNKS
from hocket.planners.memory.time_bound import bound_s
from hocket.planners.memory.update_order import UpdateOrders


@dataclass(frozen=True, eq=False, repr=False)
class BudgetFit:
    """What fits into a budget, and how far from the best possible it is."""

    frontier: Frontier
    budget_bytes: int

    def __repr__(self) -> str:
        name, within = self.frontier.problem.graph.name, format_bytes(self.budget_bytes)
        return f"BudgetFit({name!r}, within {within}, chosen {self.chosen!r})"

    @cached_property
    def chosen(self) -> Fitted | None:
        """The fastest plan within the budget; None where none keeps it."""
        return self.frontier.best(self.budget_bytes)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """No plan needs less."""
        return least_bytes(self.frontier.uses, CHUNKS[-1])

    @cached_property
    def bound_s(self) -> float | None:
        """No plan of these ways within the budget takes less; None where none keeps it."""
        of_blocks = (self.frontier.numbers, *self.frontier.finer)
        found = [bound_s(numbers, self.budget_bytes) for numbers in of_blocks]
        return min((seconds for seconds in found if seconds is not None), default=None)

    @property
    def gap(self) -> float | None:
        """By what part of the chosen plan's step another could be shorter."""
        if self.chosen is None or self.bound_s is None:
            return None
        return max(0.0, 1 - self.bound_s / self.chosen.step_s)

    @cached_property
    def update_orders(self) -> UpdateOrders | None:
        """What the order of updates on the host gains in the chosen plan; None without any."""
        return (self.chosen or self.frontier.smallest).update_orders

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that would do."""
        return self.frontier.smallest.peak_bytes

    @property
    def enough_on_host_bytes(self) -> int | None:
        """What would do on the host where its limit is why nothing fits; None where it is not."""
        return None if self.chosen else self.frontier.enough_on_host(self.budget_bytes)

    @property
    def limits(self) -> str:
        """The budget, and what may wait on the host where that has a part in it."""
        budget = format_bytes(self.budget_bytes)
        if self.enough_on_host_bytes is None:
            return budget
        return f"{budget} with {format_bytes(int(self.frontier.host_bytes))} on the host"

    def plan(self) -> Plan:
        """The plan with its memory section; raises `NoFeasiblePlanError` where nothing fits."""
        chosen = self.chosen
        if chosen is None:
            on_host = self.enough_on_host_bytes
            host = "" if on_host is None else f", or let {typed_bytes(on_host)} wait on the host"
            raise NoFeasiblePlanError(
                f"{self.frontier.problem.graph.name} does not fit into {self.limits}: the leanest "
                f"plan needs {format_bytes(self.smallest_bytes)}",
                hint=f"give it {typed_bytes(self.smallest_bytes)}{host}, or make batch or sequence "
                "smaller",
            )
        plan = self.frontier.plan
        if chosen.memory is not None:
            budgets = (self.budget_bytes,) * self.frontier.problem.cluster.num_devices
            plan = plan.having(replace(chosen.memory, budget_bytes=budgets))
        return plan.claiming(
            # What whoever simulates the plan will see.
            step_s=chosen.timeline.makespan_s,
            repeated_step_s=None if chosen.memory is None else chosen.step_s,
            peak_bytes=tuple(chosen.timeline.peak_bytes.tolist()),
            step_bound_s=self.bound_s,
            gap=self.gap,
        )


def keep_budget(
    problem: Problem,
    plan: Plan,
    budget_bytes: int,
    *,
    host_bytes: float = float("inf"),
    async_update: bool = False,
) -> BudgetFit:
    """Plan the memory of a step that is placed on one device."""
    frontier = find_frontier(problem, plan, host_bytes=host_bytes, async_update=async_update)
    return BudgetFit(frontier, budget_bytes)
