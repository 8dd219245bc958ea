"""Plan the memory of a step within a budget: the fastest plan that fits, with lower bounds.

`keep_budget` searches the frontier of plans and returns a `BudgetFit`. Peak and step time are
simulated on exactly the ops that the plan executes. They are reported with a lower bound on the
bytes of any plan, and one on the step time of any plan with these policies (a linear program).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_bytes, typed_bytes
from hocket.graph.graph import Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.frontier import Frontier, find_frontier
from hocket.planners.memory.maker import CHUNKS
from hocket.planners.memory.numbers import ACTIVATION_POLICIES, PARAMETER_POLICIES, BlockNumbers
from hocket.simulate.rewriting.chunks import find_region
from hocket.simulate.rewriting.uses import Uses


def bound_s(numbers: BlockNumbers, budget_bytes: float) -> float | None:
    """Lower bound on the step time of all plans with these policies; None if none keeps the budget.

    A linear program that replaces the schedule of copies by sums over a step among many: each block
    takes fractions of the policies of its activations and parameters. Saved activations and
    resident parameters must fit at the end of the forward pass, all ops must run, copies in each
    direction take their bytes over the link's rate, and updates on the host take their memory
    traffic over the host's rate. The busiest of these resources is minimized.
    """
    from scipy.optimize import linprog
    from scipy.sparse import block_diag, eye_array, kron

    # In units of the budget: the solver's tolerances are absolute.
    link, unit = numbers.link, max(budget_bytes, 1.0)
    incoming = numbers.brought + numbers.fetched + numbers.swapped_in
    # [resource, block, policy]: seconds of the host's updates, of ops, of copies in and out, and
    # fractions of the budget.
    activations = np.array([
        np.zeros_like(numbers.stay), numbers.recompute_s, numbers.moved / link.in_bps,
        numbers.moved / link.out_bps, numbers.stay / unit,
    ])  # fmt: skip
    parameters = np.array([
        numbers.host_traffic / numbers.host_update_bps, numbers.update_s, incoming / link.in_bps,
        numbers.gradients / link.out_bps, numbers.on_device / unit,
    ])  # fmt: skip
    # Activations of the last block are used at once, whatever the plan.
    activations[:, -1] = 0.0
    step = [[-1.0]] * 4 + [[0.0]]
    busy = np.hstack([activations.reshape(5, -1), parameters.reshape(5, -1), step])
    compute_s = float(numbers.forward_s.sum() + numbers.backward_s.sum())
    one_each = block_diag([
        *(kron(eye_array(numbers.num_blocks), np.ones((1, len(policies))))
          for policies in (ACTIVATION_POLICIES, PARAMETER_POLICIES)),
        np.zeros((0, 1)),
    ], format="csr")  # fmt: skip
    found = linprog(
        np.append(np.zeros(busy.shape[1] - 1), 1.0), A_ub=busy,
        b_ub=[0.0, -compute_s, 0.0, 0.0, 1.0 - numbers.base_bytes / unit],
        A_eq=one_each, b_eq=np.ones(2 * numbers.num_blocks), method="highs",
    )  # fmt: skip
    return None if found.x is None or found.status != 0 else float(found.x[-1])


# The fewest bytes that any plan needs: what the largest op reads, makes and works in.
#
# Whatever is offloaded, fetched or recomputed, the storages of an op are on the device while it
# runs, and the batch and buffers are there at all times. Ops of the last block may go in chunks, of
# which only the part that exists for one chunk at a time is divided. O(ops + reads).


def least_bytes(uses: Uses, max_chunks: int) -> int:
    """Lower bound on the peak of every memory section of this step."""
    graph, blocks = uses.graph, uses.blocks
    region = find_region(graph, blocks)
    is_base = np.isin(graph.tensor_role, (Role.INPUT, Role.BUFFER)) & (graph.tensor_producer < 0)
    base = int(graph.held_bytes[is_base].sum())
    inside = np.zeros(graph.num_tensors, dtype=np.bool_)
    made_by = graph.tensor_producer
    inside[made_by >= 0] = np.isin(made_by[made_by >= 0], list(region.ops))
    size = graph.held_bytes.astype(np.float64)
    parted = inside & (graph.tensor_role != Role.PARAMETER)
    parted[list(region.whole)] = False
    size[parted] /= max_chunks
    size[is_base] = 0
    most = 0.0
    for op in np.flatnonzero(graph.op_phase != Phase.OPTIMIZER).tolist():
        tensors = [*graph.reads_of(op).tolist(), *graph.made_by(op)]
        roots = np.unique(graph.root_of[tensors])
        share = max_chunks if op in region.ops else 1
        most = max(most, float(size[roots].sum()) + float(graph.workspace_bytes[op]) / share)
    return base + int(most)


@dataclass(frozen=True, eq=False, repr=False)
class BudgetFit:
    """The best plan within a memory budget, with its distance from the lower bounds."""

    frontier: Frontier
    budget_bytes: int

    def __repr__(self) -> str:
        name, within = self.frontier.problem.graph.name, format_bytes(self.budget_bytes)
        return f"BudgetFit({name!r}, within {within}, chosen {self.chosen!r})"

    @cached_property
    def chosen(self) -> Fitted | None:
        """The fastest plan within the budget; None if no plan fits."""
        return self.frontier.best(self.budget_bytes)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Lower bound on the peak of any plan."""
        return least_bytes(self.frontier.uses, CHUNKS[-1])

    @cached_property
    def bound_s(self) -> float | None:
        """Lower bound on the step time within the budget; None if no plan fits."""
        # Plans may use any of these block cuts, so the least of the bounds is valid.
        of_blocks = (self.frontier.numbers, *self.frontier.finer)
        found = [bound_s(numbers, self.budget_bytes) for numbers in of_blocks]
        return min((seconds for seconds in found if seconds is not None), default=None)

    @property
    def gap(self) -> float | None:
        """Relative distance of the chosen plan's step time from its lower bound."""
        if self.chosen is None or self.bound_s is None:
            return None
        return max(0.0, 1 - self.bound_s / self.chosen.step_s)

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that some plan keeps."""
        return self.frontier.smallest.peak_bytes

    @property
    def enough_on_host_bytes(self) -> int | None:
        """Host memory that would be enough if its limit is why nothing fits; else None."""
        return None if self.chosen else self.frontier.enough_on_host(self.budget_bytes)

    @property
    def limits(self) -> str:
        """Text on the budget, and on the limit of host memory if that matters."""
        budget = format_bytes(self.budget_bytes)
        if self.enough_on_host_bytes is None:
            return budget
        return f"{budget} with {format_bytes(int(self.frontier.host_bytes))} on the host"

    def plan(self) -> Plan:
        """The plan with its memory section; raises `NoFeasiblePlanError` if nothing fits."""
        chosen = self.chosen
        if chosen is None:
            on_host = self.enough_on_host_bytes
            host = "" if on_host is None else f", or let {typed_bytes(on_host)} wait on the host"
            raise NoFeasiblePlanError(
                f"{self.frontier.problem.graph.name} does not fit into {self.limits}: "
                f"the minimum-memory plan needs {format_bytes(self.smallest_bytes)}",
                hint=f"give it {typed_bytes(self.smallest_bytes)}{host}, or make batch or sequence "
                "smaller",
            )
        plan = self.frontier.plan
        if chosen.memory is not None:
            budgets = (self.budget_bytes,) * self.frontier.problem.cluster.num_devices
            plan = plan.having(replace(chosen.memory, budget_bytes=budgets))
        return plan.claiming(
            # The same values that a simulation of the plan gives.
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
    """Plan the memory of a step on one device, within ``budget_bytes``."""
    frontier = find_frontier(problem, plan, host_bytes=host_bytes, async_update=async_update)
    return BudgetFit(frontier, budget_bytes)
