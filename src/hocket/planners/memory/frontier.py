"""Plans for one step from its plain form down to the fewest bytes, each proven by the simulator.

The set of plans does not depend on the requested budget: the plain step, full recompute, offloading
everything, the minimum-memory plan, and what the linear program gives for budgets in between; and
for every number of blocks the plan that keeps so many and recomputes the others, simulated when a
budget needs it. Each is rewritten into the graph and simulated. For a budget the fastest plan whose
simulated peak fits is taken; so a larger budget never makes a step longer, and no plan is slower
than full recompute or full offload where these fit.
O(levels · (blocks³ + ops)).
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
"""Budgets that the linear program is solved for, by turns of `TURNS`."""
FEWEST_LEVELS = 12
NUM_ALL_LEVELS_OPS = 6000
"""Steps of more ops get fewer levels, because each is written down op by op."""
NUM_FEW_LEVELS_OPS, NUM_KEEPING_OF_MANY = 40_000, 4
"""Steps of more ops get half as many levels still, and fewer plans that keep a number of blocks are
looked at: of a thousand layers each takes seconds."""
NOT_OFFLOADED = (KEPT, RECOMPUTED, FROM_HOST)
"""Without offloading what is saved: copies do not always hide as well as the program has them do,
and where the link is busy a plan without them may be faster."""
TURNS = (
    Turn(ANYWHERE, 1.0), Turn(ON_DEVICE, 0.0), Turn(ANYWHERE, 0.0),
    Turn(ON_HOST, 1.0), Turn(ON_DEVICE, 1.0), Turn(ON_HOST, 0.0),
)  # fmt: skip
"""The overlap of copies is not known before the simulation, so both extremes are tried. Where not
all parameters fit on the device, policies that stream them take their turn."""
BETWEEN = (Turn(ANYWHERE, 1.0), Turn(ANYWHERE, 0.0, NOT_OFFLOADED))
"""Turns for budgets between those of other plans."""
NEAR = 1.03
"""Budgets within this ratio of each other are not worth a plan each."""
LARGE_SLOTS = 0.25
"""Where streamed parameters take more than this part of the peak of the minimum-memory plan, blocks
are cut by the lists inside them, and batched experts are streamed in groups."""
SMALL_SLOTS = 0.1
"""Where they take less than this part of a budget, smaller blocks gain nothing."""
FEWEST_GROUPS = 4
GROUP_BYTES = 2**27
"""Parameters of a group: copies of this size reach the full rate of the link, and more groups take
longer to plan."""
NUM_KEEPING = 8
"""Number of plans of `KeepingPlans`, about, that are simulated for every step."""


@dataclass(frozen=True, eq=False, repr=False)
class Frontier:
    """Every plan of a step that was tried."""

    problem: Problem
    plan: Plan
    plans: tuple[Fitted, ...]
    uses: Uses
    numbers: BlockNumbers
    finer: tuple[BlockNumbers, ...]
    """Costs of the step with smaller blocks, or with experts in groups, where that was tried."""
    keeping: tuple[KeepingPlans, ...]
    """Plans that move nothing."""
    host_bytes: float
    """Host memory that plans may use."""
    over_host_limit: tuple[Fitted, ...]
    """Plans that need more host memory than that."""
    plan_seconds: float

    def __repr__(self) -> str:
        return f"Frontier({self.problem.graph.name!r}, {len(self.plans)} plans)"

    def best(self, budget_bytes: float) -> Fitted | None:
        """The fastest plan within a budget, the smallest of these; None where none keeps it."""
        kept = (plans.best(budget_bytes) for plans in self.keeping)
        return _fastest([*self.plans, *(plan for plan in kept if plan is not None)], budget_bytes)

    def find(self, name: str) -> Fitted | None:
        """The plan with this name; None where it does not fit on the host."""
        return next((plan for plan in self.plans if plan.name == name), None)

    def best_of(self) -> list[Fitted]:
        """Plans that are the best for some budget, from the largest to the smallest; of those that
        keep so many blocks a few."""
        return _best_of(self.plans)[::-1]

    def enough_on_host(self, budget_bytes: float) -> int | None:
        """Host memory that a plan within a budget would need, if the host's limit is why none was
        found; None where no plan keeps the budget with any host memory."""
        fits = (plan.host_bytes for plan in self.over_host_limit if plan.peak_bytes <= budget_bytes)
        return min(fits, default=None)

    @property
    def smallest(self) -> Fitted:
        """The plan with the fewest bytes."""
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
    """Plans of a step that is placed on one device, from the fastest to the smallest.

    ``in_chunks`` is True if its loss may be computed in chunks, where it can. ``replayed`` is the
    problem with the times of ops in a CUDA graph, where steps that move nothing are one.
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
            found.add(family[step * (len(family) - 1) // num_keeping])
    _levels(found, maker, num_levels)
    finer = _in_groups(maker, found.least_bytes)
    _finer_levels(found, finer, 2 * maker.largest_bytes / SMALL_SLOTS, num_levels)
    _between(found, maker, finer[:1], num_levels // 4)
    for fitted in _best_of(found.plans.values()):
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
    """Plans by their names; a section that was seen is not simulated again."""

    def __init__(self, usual: Iterable[Fitted]) -> None:
        self.plans = {fitted.name: fitted for fitted in usual}
        self.seen = {fitted.memory for fitted in self.plans.values()}
        self.most_bytes = self.plans[PLAIN].peak_bytes
        self.least_bytes = min(fitted.peak_bytes for fitted in self.plans.values())

    def best_s(self, budget_bytes: float) -> float:
        """The shortest step within a budget."""
        best = _fastest(self.plans.values(), budget_bytes)
        return float("inf") if best is None else best.step_s

    def add(self, fitted: Fitted | None) -> None:
        """Keep a plan, where one was found."""
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
    """Add the plans of the linear program for each turn; with hidden copies only where these are
    predicted to beat the others, because such predictions are often too low."""
    for number, turn in enumerate(turns, 1):
        of_turn = f"{name}, {number}"
        below_s = found.best_s(budget_bytes) if turn.is_hidden else float("inf")
        found.add(maker.solved(of_turn, budget_bytes, found.seen, turn, tail, below_s))


def _finer_levels(
    found: _FoundPlans, finer: Sequence[PlanMaker], highest_bytes: float, num_levels: int
) -> None:
    """Add plans with smaller blocks, for budgets that can gain from these."""
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
        # What is smaller still is for budgets that these do not keep.
        highest = smallest


def _between(
    found: _FoundPlans, maker: PlanMaker, finer: Sequence[PlanMaker], num_rounds: int
) -> None:
    """More budgets where the best plans so far are the farthest from each other."""
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


def _in_groups(maker: PlanMaker, least_bytes: int) -> list[PlanMaker]:
    """Makers of plans with smaller blocks and experts in groups: in pieces that the link copies
    well, then in as many as there are; none where streamed parameters are not what is large."""
    if 2 * maker.largest_bytes < LARGE_SLOTS * least_bytes:
        return []
    most = maker.most_groups
    well = min(most, max(FEWEST_GROUPS, maker.largest_bytes // GROUP_BYTES))
    return [maker.in_groups(count) for count in sorted({well, most}) if count > 1]


def _best_of(plans: Iterable[Fitted]) -> list[Fitted]:
    """Plans that are the best for some budget, from the smallest to the largest."""
    found: list[Fitted] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.rank)):
        if not found or plan.rank < found[-1].rank:
            found.append(plan)
    return found


def _steepest(plans: Iterable[Fitted], tried: Sequence[float]) -> float | None:
    """A budget between two neighbours of the best plans that was not tried yet, where fewer bytes
    cost the most time, else the most bytes to move; None where all are near each other."""
    gaps = []
    for lean, fast in itertools.pairwise(_best_of(plans)):
        ratio = fast.peak_bytes / lean.peak_bytes
        middle = lean.peak_bytes * ratio**0.5
        is_new = all(not NEAR**-1 < middle / other < NEAR for other in tried)
        if ratio > NEAR**2 and is_new:
            gaps.append((lean.step_s - fast.step_s, lean.moved_bytes - fast.moved_bytes, middle))
    return max(gaps)[-1] if gaps else None


def minimum_memory_bytes(problem: Problem, plan: Plan, host_bytes: float = float("inf")) -> int:
    """The fewest bytes that a plan of this step is known to need, without looking at its time."""
    if np.isfinite(host_bytes):
        # The minimum-memory plan has everything on the host; where the host is limited, any other
        # plan may be the smallest.
        return find_frontier(problem, plan, host_bytes=host_bytes).smallest.peak_bytes
    maker = PlanMaker(problem, plan, float("inf"))
    least = min(fitted.peak_bytes for fitted in maker.minimum_memory())
    finer = (fitted for each in _in_groups(maker, least) for fitted in each.minimum_memory())
    return min([least, *(fitted.peak_bytes for fitted in finer)])
