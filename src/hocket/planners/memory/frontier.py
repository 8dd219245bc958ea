"""Plans of one step from the plain step down to the fewest bytes, each simulated.

The set of plans does not depend on the requested budget. It has the plain step, full recompute,
offloading everything, the minimum-memory plan, and plans of the linear program for budgets in
between. For every number k of blocks there is also a plan that saves the activations of k blocks
and recomputes the others, which is simulated only if a budget needs it. For a budget, the fastest
plan whose simulated peak fits is chosen. So a larger budget never makes a step longer, and no plan
is slower than full recompute or full offload if these fit. O(levels · (blocks³ + ops)).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.keeping import KeepingPlans
from hocket.planners.memory.linear import Turn
from hocket.planners.memory.maker import (
    ANYWHERE,
    LARGEST_TAIL,
    ON_DEVICE,
    ON_HOST,
    PLAIN,
    SMALL_TAIL,
    PlanMaker,
)
from hocket.planners.memory.numbers import FROM_HOST, KEPT, RECOMPUTED, BlockNumbers
from hocket.simulate.rewriting.uses import Uses

NUM_LEVELS = 32
"""Number of budgets for which the linear program is solved, with `TURNS` in rotation."""
FEWEST_LEVELS = 12
NUM_ALL_LEVELS_OPS = 6000
"""Steps with more ops get fewer levels, because every plan rewrites the step op by op."""
NUM_FEW_LEVELS_OPS, NUM_KEEPING_OF_MANY = 40_000, 4
"""Steps with more ops than the first get half of the fewest levels, and only the second number of
plans per family of `KeepingPlans`, because each plan of a thousand layers takes seconds."""
NOT_OFFLOADED = (KEPT, RECOMPUTED, FROM_HOST)
"""Activation policies without offloading of saved activations. Copies do not always overlap as well
as the linear program assumes, so a plan without them can be faster if the link is busy."""
TURNS = (
    Turn(ANYWHERE, 1.0), Turn(ON_DEVICE, 0.0), Turn(ANYWHERE, 0.0),
    Turn(ON_HOST, 1.0), Turn(ON_DEVICE, 1.0), Turn(ON_HOST, 0.0),
)  # fmt: skip
"""Assumptions and policies that the levels use in rotation. The overlap of copies is unknown before
the simulation, so both extremes are tried, with policies that stream parameters and without."""
BETWEEN = (Turn(ANYWHERE, 1.0), Turn(ANYWHERE, 0.0, NOT_OFFLOADED))
"""Turns for budgets between those of other plans."""
NEAR = 1.03
"""No plan is sought for a budget within this ratio of one that was tried."""
LARGE_SLOTS = 0.25
"""Blocks are cut by their inner lists if streamed parameters take more than this fraction of the
minimum-memory plan's peak."""
SMALL_SLOTS = 0.1
"""Smaller blocks gain nothing if streamed parameters take less than this fraction of a budget."""
FEWEST_GROUPS = 4
"""Smallest number of groups that the largest block is cut into, if its lists allow."""
GROUP_BYTES = 2**27
"""Bytes of parameters per group. Copies of this size reach the link's full rate; more groups would
take longer to plan."""
NUM_KEEPING = 8
"""Approximate number of plans per family of `KeepingPlans` that are simulated for every step."""


@dataclass(frozen=True, eq=False, repr=False)
class Frontier:
    """All plans of a step that were tried."""

    problem: Problem
    plan: Plan
    plans: tuple[Fitted, ...]
    uses: Uses
    numbers: BlockNumbers
    finer: tuple[BlockNumbers, ...]
    """Costs of the step with smaller blocks, one entry per way to cut them."""
    keeping: tuple[KeepingPlans, ...]
    """Families of plans that move nothing, by chunks of the loss."""
    host_bytes: float
    """Host memory that plans may use."""
    over_host_limit: tuple[Fitted, ...]
    """Plans that need more host memory than ``host_bytes``."""
    plan_seconds: float

    def __repr__(self) -> str:
        return f"Frontier({self.problem.graph.name!r}, {len(self.plans)} plans)"

    def best(self, budget_bytes: float) -> Fitted | None:
        """The fastest plan within a budget, of equals the smallest; None if no plan fits."""
        kept = (plans.best(budget_bytes) for plans in self.keeping)
        return _fastest([*self.plans, *(plan for plan in kept if plan is not None)], budget_bytes)

    def find(self, name: str) -> Fitted | None:
        """The plan with this name; None if there is none that fits the host memory."""
        return next((plan for plan in self.plans if plan.name == name), None)

    def best_of(self) -> list[Fitted]:
        """Plans that are the best for some budget, from the largest peak to the smallest.

        Of the families in ``keeping``, only plans that were simulated for every step are among
        them.
        """
        return _best_of(self.plans)[::-1]

    def enough_on_host(self, budget_bytes: float) -> int | None:
        """Host memory that a plan within the budget needs; None if no plan fits the budget at all.

        Only plans that exceed the limit of host memory are considered.
        """
        fits = (plan.host_bytes for plan in self.over_host_limit if plan.peak_bytes <= budget_bytes)
        return min(fits, default=None)

    @property
    def smallest(self) -> Fitted:
        """The plan with the lowest peak."""
        return min(self.plans, key=lambda plan: (plan.peak_bytes, plan.step_s))


def _fastest(plans: Iterable[Fitted], budget_bytes: float) -> Fitted | None:
    fits = [plan for plan in plans if plan.peak_bytes <= budget_bytes]
    return min(fits, key=lambda plan: plan.rank, default=None)


def find_frontier(
    problem: Problem,
    plan: Plan,
    *,
    host_bytes: float = float("inf"),
    num_levels: int | None = None,
    in_chunks: bool = True,
    replayed: Problem | None = None,
    async_update: bool = False,
) -> Frontier:
    """Find plans of a step on one device, from the fastest to the smallest.

    ``in_chunks`` is True if the loss may be computed in chunks. ``replayed`` is the problem with
    the times of ops in a CUDA graph, which apply to steps that can be captured.
    """
    started = time.perf_counter()
    num_ops, num_keeping = problem.graph.num_ops, NUM_KEEPING
    if num_levels is None:
        fewer = NUM_LEVELS * NUM_ALL_LEVELS_OPS // max(num_ops, 1)
        num_levels = min(NUM_LEVELS, max(FEWEST_LEVELS, fewer))
        if num_ops > NUM_FEW_LEVELS_OPS:
            num_levels, num_keeping = FEWEST_LEVELS // 2, NUM_KEEPING_OF_MANY
    maker = PlanMaker(
        problem, plan, host_bytes, in_chunks=in_chunks, replayed=replayed, async_update=async_update
    )
    found, keeping = _FoundPlans(maker.usual()), tuple(maker.keeping())
    for family in keeping:
        for step in range(1, num_keeping):
            # Without the ends: saving no block is full recompute, saving all is the plain step.
            found.add(family[step * (len(family) - 1) // num_keeping])
    _levels(found, maker, num_levels)
    finer = _finer(maker, found.least_bytes)
    _finer_levels(found, finer, 2 * maker.largest_bytes / SMALL_SLOTS, num_levels)
    _between(found, maker, finer[:1], num_levels // 4)
    for fitted in _best_of(found.plans.values()):
        # Variants need the costs of this maker's blocks, so plans with finer blocks are left out.
        for eased in maker.eased(fitted, found.seen) if fitted.uses is maker.uses else ():
            found.add(eased)
    plans = found.plans.values()
    return Frontier(
        problem=problem, plan=plan, uses=maker.uses, numbers=maker.numbers,
        plans=tuple(fitted for fitted in plans if fitted.host_bytes <= host_bytes),
        finer=tuple(each.numbers for each in finer), keeping=keeping, host_bytes=host_bytes,
        over_host_limit=tuple(fitted for fitted in plans if fitted.host_bytes > host_bytes),
        plan_seconds=time.perf_counter() - started,
    )  # fmt: skip


class _FoundPlans:
    """Plans by name, and the memory sections that need not be simulated again."""

    def __init__(self, usual: Iterable[Fitted]) -> None:
        self.plans = {fitted.name: fitted for fitted in usual}
        self.seen = {fitted.memory for fitted in self.plans.values()}
        self.most_bytes = self.plans[PLAIN].peak_bytes
        self.least_bytes = min(fitted.peak_bytes for fitted in self.plans.values())

    def best_s(self, budget_bytes: float) -> float:
        """Shortest step time within a budget; infinite if no plan fits."""
        best = _fastest(self.plans.values(), budget_bytes)
        return float("inf") if best is None else best.step_s

    def add(self, fitted: Fitted | None) -> None:
        """Add a plan unless it is None."""
        if fitted is not None:
            self.seen.add(fitted.memory)
            self.plans[fitted.name] = fitted


def _levels(found: _FoundPlans, maker: PlanMaker, num_levels: int) -> None:
    """Add plans of the linear program for budgets from the smallest peak to the plain step's."""
    budgets = np.geomspace(max(found.least_bytes, 1) * 0.9, found.most_bytes, num_levels)
    for number, budget in enumerate(budgets.tolist()):
        turn = TURNS[number % len(TURNS)]
        kept = Turn(ANYWHERE, turn.in_flight, NOT_OFFLOADED)
        turns = (turn, kept, turn._replace(is_hidden=True))
        _solve_turns(found, maker, f"level {number}", budget, turns)


def _solve_turns(
    found: _FoundPlans, maker: PlanMaker, name: str, budget_bytes: float, turns: Iterable[Turn],
    tail: float = LARGEST_TAIL,
) -> None:  # fmt: skip
    """Add the plan of the linear program for each turn.

    Turns with hidden copies are used only if the program predicts a shorter step than the best so
    far, because these predictions are often too optimistic.
    """
    for number, turn in enumerate(turns, 1):
        of_turn = f"{name}, {number}"
        below_s = found.best_s(budget_bytes) if turn.is_hidden else float("inf")
        found.add(maker.solved(of_turn, budget_bytes, found.seen, turn, tail, below_s))


def _finer_levels(
    found: _FoundPlans, finer: Sequence[PlanMaker], highest_bytes: float, num_levels: int
) -> None:
    """Add plans with smaller blocks for the budgets at which these can help."""
    highest = min(highest_bytes, float(found.most_bytes))
    for each in finer:
        lean = list(each.minimum_memory())
        for fitted in lean:
            found.add(fitted)
        smallest = float(max(min(fitted.peak_bytes for fitted in lean), 1))
        count = max(num_levels // 2 if each is finer[0] else num_levels // 8, 2)
        budgets = np.geomspace(smallest, max(highest, smallest), count)
        for number, budget in enumerate(budgets.tolist()):
            name, turn = f"level {number}{each.how}", BETWEEN[1 - number % 2]
            found.add(each.solved(name, budget, found.seen, turn))
        # The next maker has even smaller blocks: it covers the budgets too small for this one.
        highest = smallest


def _between(
    found: _FoundPlans, maker: PlanMaker, finer: Sequence[PlanMaker], num_rounds: int
) -> None:
    """Add plans for budgets between the best plans that are farthest apart."""
    tried: list[float] = []
    for number in range(num_rounds):
        gap = _steepest(found.plans.values(), tried)
        if gap is None:
            break
        tried.append(gap)
        turns = (*BETWEEN, BETWEEN[0]._replace(is_hidden=True))
        _solve_turns(found, maker, f"between {number}", gap, turns, SMALL_TAIL)
        for each in finer if gap < 2 * found.least_bytes else ():
            name = f"between {number}{each.how}"
            found.add(each.solved(name, gap, found.seen, BETWEEN[0], SMALL_TAIL))


def _finer(maker: PlanMaker, least_bytes: int) -> list[PlanMaker]:
    """Plan makers with smaller blocks.

    Empty if streamed parameters take a small part of the memory.

    The first cuts blocks into pieces that the link copies at its full rate, the second into as many
    pieces as possible.
    """
    # Two groups are on the device at once: one in use, one being fetched.
    if 2 * maker.largest_bytes < LARGE_SLOTS * least_bytes:
        return []
    most = maker.most_cuts
    well = min(most, max(FEWEST_GROUPS, maker.largest_bytes // GROUP_BYTES))
    return [maker.finer(count) for count in sorted({well, most}) if count > 1]


def _best_of(plans: Iterable[Fitted]) -> list[Fitted]:
    """Plans that are the best for some budget, from the smallest peak to the largest."""
    found: list[Fitted] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.rank)):
        if not found or plan.rank < found[-1].rank:
            found.append(plan)
    return found


def _steepest(plans: Iterable[Fitted], tried: Sequence[float]) -> float | None:
    """The budget between two neighbouring best plans at which a plan is most likely to help.

    It lies where fewer bytes cost the most time, or of equals the most moved bytes, and was not
    tried before. None if the peaks of all neighbouring plans differ by less than `NEAR` squared.
    """
    gaps = []
    for lean, fast in itertools.pairwise(_best_of(plans)):
        ratio = fast.peak_bytes / lean.peak_bytes
        # The geometric mean of both peaks, because sizes matter by ratio.
        middle = lean.peak_bytes * ratio**0.5
        is_new = all(not NEAR**-1 < middle / other < NEAR for other in tried)
        if ratio > NEAR**2 and is_new:
            gaps.append((lean.step_s - fast.step_s, lean.moved_bytes - fast.moved_bytes, middle))
    return max(gaps)[-1] if gaps else None


def minimum_memory_bytes(problem: Problem, plan: Plan, host_bytes: float = float("inf")) -> int:
    """The lowest peak of any known plan of this step, whatever its step time."""
    if np.isfinite(host_bytes):
        # The minimum-memory plan has everything on the host; where the host is limited, any other
        # plan may be the smallest.
        return find_frontier(problem, plan, host_bytes=host_bytes).smallest.peak_bytes
    maker = PlanMaker(problem, plan, float("inf"))
    least = min(fitted.peak_bytes for fitted in maker.minimum_memory())
    finer = (fitted for each in _finer(maker, least) for fitted in each.minimum_memory())
    return min([least, *(fitted.peak_bytes for fitted in finer)])
