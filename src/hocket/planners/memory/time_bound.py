"""Seconds that no memory plan of a step goes below, whatever the schedule of its copies.

A linear program as small as it can be: each block takes shares of the ways of its activations and
of the homes of its parameters, and each resource works for as long as all blocks ask of it; the
longest of these is made short. HiGHS, 8 columns a block and 5 rows beside one for each choice.
"""

from __future__ import annotations

import numpy as np

from hocket.planners.memory.numbers import HOMES, WAYS, BlockNumbers


def bound_s(numbers: BlockNumbers, budget_bytes: float) -> float | None:
    """Seconds that no plan of these ways and homes goes below, however its copies are timed; None
    where none keeps the budget.

    What is left behind and what is at home must fit when the forward pass ends, all that runs must
    run, no direction carries more than its rate, and the host updates no faster than it can, over a
    step among many: sums instead of a schedule.
    """
    num_ways, num_homes = numbers.stay.size, numbers.home.size
    # What the last block makes is made and used then, whatever the plan.
    stay, moved, again = (table.copy() for table in (numbers.stay, numbers.moved, numbers.again_s))
    for table in (stay, moved, again):
        table[-1] = 0.0
    compute_s = float(numbers.forward_s.sum() + numbers.backward_s.sum())
    incoming = numbers.brought + numbers.fetched + numbers.visiting
    at_home = (numbers.host_traffic / numbers.host_update_bps).ravel()
    nothing = np.zeros(num_ways)
    rows = np.array([
        [*nothing, *at_home, -1.0],
        [*again.ravel(), *numbers.update_s.ravel(), -1.0],
        [*(moved / numbers.link.in_bps).ravel(), *(incoming / numbers.link.in_bps).ravel(), -1.0],
        [*(moved / numbers.link.out_bps).ravel(),
         *(numbers.gradients / numbers.link.out_bps).ravel(), -1.0],
        [*(stay / max(budget_bytes, 1.0)).ravel(), *(numbers.home / max(budget_bytes, 1.0)).ravel(),
         0.0],
    ])  # fmt: skip
    room = 1.0 - numbers.base_bytes / max(budget_bytes, 1.0)
    groups = np.repeat(
        np.arange(2 * numbers.num_blocks),
        [len(WAYS)] * numbers.num_blocks + [len(HOMES)] * numbers.num_blocks,
    )
    columns = np.arange(num_ways + num_homes)
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    one_each = coo_array(
        (np.ones(len(columns)), (groups, columns)), (2 * numbers.num_blocks, len(columns) + 1)
    )
    cost = np.zeros(len(columns) + 1)
    cost[-1] = 1.0
    found = linprog(
        cost, A_ub=rows, b_ub=[0.0, -compute_s, 0.0, 0.0, room],
        A_eq=one_each.tocsr(), b_eq=np.ones(2 * numbers.num_blocks), method="highs",
    )  # fmt: skip
    return None if found.x is None or found.status != 0 else float(found.x[-1])
