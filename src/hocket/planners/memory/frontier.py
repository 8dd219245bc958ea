"""Plans for one step from its plain form down to the fewest bytes, each proven by the simulator.

The set of plans does not depend on the budget that is asked for: the plain step, full recompute,
offloading everything, the leanest plan there is, and what the linear program gives for budgets in
between. Each is rewritten into the graph and simulated. For a budget the fastest plan whose
simulated peak keeps it is taken; so a larger budget never makes a step longer, and no plan is
slower than full recompute or full offload where these fit. O(levels · (blocks³ + ops)).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_step
from hocket.planners.memory.linear import solve
from hocket.planners.memory.numbers import (
    HOST_UPDATE,
    RESIDENT,
    STREAMED,
    VISITING,
    BlockNumbers,
    measure,
)
from hocket.planners.memory.rounding import rounded
from hocket.planners.memory.update_order import BY_NEED, UpdateOrders, host_update_orders
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.blocks import StepBlocks
from hocket.simulate.rewriting.needs import Uses, find_uses
from hocket.simulate.rewriting.step import BudgetedStep, budgeted, moved_bytes
from hocket.simulate.timeline import Timeline

NUM_LEVELS = 32
"""Budgets that the linear program is solved for, by turns of `TURNS`."""
FEWEST_LEVELS = 12
NUM_ALL_LEVELS_OPS = 6000
"""Steps of more ops get fewer levels, because each is written down op by op."""
ON_DEVICE, ON_HOST, ANYWHERE = (
    (RESIDENT,), (RESIDENT, HOST_UPDATE, STREAMED), (RESIDENT, HOST_UPDATE, STREAMED, VISITING)
)  # fmt: skip
TURNS = (
    (ANYWHERE, 1.0), (ON_DEVICE, 0.0), (ANYWHERE, 0.0),
    (ON_HOST, 1.0), (ON_DEVICE, 1.0), (ON_HOST, 0.0),
)  # fmt: skip
"""Homes that parameters may have, and what part of the copies under way is to have room: how the
simulator will find them is not known before, so both ends are tried. Where not all parameters have
room on the device, any home takes its turn."""
BETWEEN = ((ANYWHERE, 1.0), (ANYWHERE, 0.0), (ON_DEVICE, 0.0))
"""The same where plans are sought between others."""
NEAR = 1.03
"""Budgets within this ratio of each other are not worth a plan each."""
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Into how many chunks the loss may be cut."""
LARGEST_TAIL, SMALL_TAIL = 0.25, 0.15
"""The loss is cut into chunks until the last block works in no more than this part of a budget; the
second where plans are sought between others."""
PREFETCH = 1
PLAIN, IN_BACKWARD = "plain", "update in backward"
FULL_RECOMPUTE, FULL_OFFLOAD = "full recompute", "offload everything"
OFFLOADED_ACTIVATIONS, RECOMPUTED_FROM_HOST = "offload activations", "recompute from the host"


@dataclass(frozen=True, eq=False, kw_only=True)
class Fitted:
    """A memory section and what the simulator says of it."""

    name: str
    memory: Memory | None
    """None for the plain step."""
    step: BudgetedStep
    timeline: Timeline
    blocks: StepBlocks
    plain_s: float
    """Time of the plain step."""
    plan_seconds: float

    @property
    def peak_bytes(self) -> int:
        """The most that any device holds."""
        return int(self.timeline.peak_bytes.max())

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross the way to the host in one step."""
        return 0 if self.memory is None else sum(moved_bytes(self.step.rewritten))

    @cached_property
    def update_orders(self) -> UpdateOrders | None:
        """What the order of updates on the host gains; None without any."""
        return host_update_orders(self.step, self.timeline, self.blocks)

    @cached_property
    def step_s(self) -> float:
        """Time of a step among many: updates on the host go on beside the next forward pass. They
        are not claimed to make a step shorter than the plain one, because who starts the device's
        work is the host, too."""
        orders = self.update_orders
        taken_s = self.timeline.makespan_s if orders is None else orders.step_s[BY_NEED.name]
        return max(min(taken_s, self.timeline.makespan_s), self.plain_s)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Of two plans that fit the lower one is better: faster, else moving and holding less."""
        return self.step_s, self.moved_bytes, self.peak_bytes


@dataclass(frozen=True, eq=False)
class Frontier:
    """Every plan of a step that was tried."""

    problem: Problem
    plan: Plan
    plans: tuple[Fitted, ...]
    uses: Uses
    numbers: BlockNumbers
    plan_seconds: float

    def best(self, budget_bytes: float) -> Fitted | None:
        """The fastest plan within a budget, the smallest of these; None where none keeps it."""
        fits = [plan for plan in self.plans if plan.peak_bytes <= budget_bytes]
        return min(fits, key=lambda plan: plan.rank, default=None)

    def find(self, name: str) -> Fitted | None:
        """The plan of a name; None where the host has no room for it."""
        return next((plan for plan in self.plans if plan.name == name), None)

    def best_of(self) -> list[Fitted]:
        """Plans that are the best for some budget, from the largest to the smallest."""
        return [plan for plan in sorted(self.plans, key=lambda plan: -plan.peak_bytes)
                if self.best(plan.peak_bytes) is plan]  # fmt: skip

    @property
    def smallest(self) -> Fitted:
        """The plan with the fewest bytes."""
        return min(self.plans, key=lambda plan: (plan.peak_bytes, plan.step_s))


def find_frontier(
    problem: Problem,
    plan: Plan,
    *,
    host_bytes: float = float("inf"),
    num_levels: int | None = None,
    in_chunks: bool = True,
) -> Frontier:
    """Plans of a step that is placed on one device, from the fastest to the leanest; ``in_chunks``
    says whether its loss can be made in chunks."""
    started = time.perf_counter()
    if num_levels is None:
        fewer = NUM_LEVELS * NUM_ALL_LEVELS_OPS // max(problem.graph.num_ops, 1)
        num_levels = min(NUM_LEVELS, max(FEWEST_LEVELS, fewer))
    maker = _Maker(problem, plan, host_bytes, CHUNKS if in_chunks else CHUNKS[:1])
    plans = {fitted.name: fitted for fitted in maker.usual()}
    most = plans[PLAIN].peak_bytes
    least = min(fitted.peak_bytes for fitted in plans.values())
    seen = {fitted.memory for fitted in plans.values()}
    tried: list[float] = []
    for number, budget in enumerate(np.geomspace(max(least, 1) * 0.9, most, num_levels)):
        fitted = maker.solved(f"level {number}", float(budget), seen, *TURNS[number % len(TURNS)])
        if fitted is not None:
            seen.add(fitted.memory)
            plans[fitted.name] = fitted
    for number in range(num_levels // 4):
        gap = _steepest(plans.values(), tried)
        if gap is None:
            break
        tried.append(gap)
        for part in (1.0, 0.0):
            name = f"between {number}, {part:g}"
            fitted = maker.solved(name, gap, seen, ANYWHERE, part, SMALL_TAIL)
            if fitted is not None:
                seen.add(fitted.memory)
                plans[fitted.name] = fitted
    kept = [fitted for fitted in plans.values() if maker.fits_host(fitted)]
    seconds = time.perf_counter() - started
    return Frontier(problem, plan, tuple(kept), maker.uses, maker.numbers, seconds)


def _steepest(plans: Iterable[Fitted], tried: Sequence[float]) -> float | None:
    """A budget between two neighbours of the best plans that was not tried yet, where fewer bytes
    cost the most time, else the most bytes to move; None where all are near each other."""
    found: list[Fitted] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.rank)):
        if not found or plan.rank < found[-1].rank:
            found.append(plan)
    gaps = []
    for lean, fast in itertools.pairwise(found):
        ratio = fast.peak_bytes / lean.peak_bytes
        middle = lean.peak_bytes * ratio**0.5
        is_new = all(not NEAR**-1 < middle / other < NEAR for other in tried)
        if ratio > NEAR**2 and is_new:
            gaps.append((lean.step_s - fast.step_s, lean.moved_bytes - fast.moved_bytes, middle))
    return max(gaps)[-1] if gaps else None


def leanest_bytes(problem: Problem, plan: Plan) -> int:
    """The fewest bytes that a plan of this step is known to need, without looking at its time."""
    maker = _Maker(problem, plan, float("inf"), CHUNKS)
    return min(fitted.peak_bytes for fitted in maker.leanest())


class _Maker:
    """Makes plans and has them simulated; what they share is found once."""

    def __init__(
        self, problem: Problem, plan: Plan, host_bytes: float, chunks: tuple[int, ...]
    ) -> None:
        self.problem, self.plan = problem, plan
        self.host_bytes, self.chunks = host_bytes, chunks
        self.uses: Uses = find_uses(problem.graph, cut_step(problem.graph))
        device = int(plan.device_of[0]) if plan.device_of is not None else 0
        self.numbers: BlockNumbers = measure(problem, self.uses, device)
        self.budgets = (0,) * problem.cluster.num_devices
        self.plain_s = 0.0

    def usual(self) -> Iterator[Fitted]:
        """What people do by hand, and the leanest plan."""
        timeline = simulate(self.problem, self.plan)
        nothing = self._all(loss_chunks=1)
        plain = budgeted(self.problem, self.plan, nothing, uses=self.uses)
        self.plain_s = timeline.makespan_s
        yield Fitted(
            name=PLAIN, memory=None, step=plain, timeline=timeline, blocks=self.uses.blocks,
            plain_s=self.plain_s, plan_seconds=0.0,
        )  # fmt: skip
        yield self._judged(IN_BACKWARD, nothing)
        yield self._judged(FULL_RECOMPUTE, self._all(1, activations="recomputed"))
        yield self._judged(OFFLOADED_ACTIVATIONS, self._all(1, activations="offloaded"))
        yield self._judged(RECOMPUTED_FROM_HOST, self._all(
            1, num_kept=2, activations="recomputed", checkpoint="offloaded"))  # fmt: skip
        yield self._judged(FULL_OFFLOAD, self._all(
            1, activations="offloaded", parameters="streamed", update="host"))  # fmt: skip
        yield from self.leanest()

    def leanest(self) -> Iterator[Fitted]:
        """Everything away that can be away."""
        for chunks in dict.fromkeys((1, self.chunks[-1])):
            yield self._judged(f"leanest, {chunks} chunks", self._all(
                chunks, activations="recomputed", checkpoint="offloaded", parameters="streamed",
                update="host"))  # fmt: skip

    def _all(self, loss_chunks: int, *, num_kept: int = 1, **policy: str) -> Memory:
        """One policy for every block, but for the last ones, whose activations are kept."""
        starts = self.uses.blocks.start.tolist()
        last = self.uses.blocks.num_blocks - num_kept
        homes = {k: v for k, v in policy.items() if k in ("parameters", "update")}
        blocks = tuple(
            MemoryBlock(
                name=name, start=starts[number], stop=starts[number + 1],
                # What the last block makes is needed at once.
                **(policy if number < last else homes),  # type: ignore[arg-type]
            )
            for number, name in enumerate(self.uses.blocks.names)
        )  # fmt: skip
        return Memory(
            budget_bytes=self.budgets, blocks=blocks, loss_chunks=loss_chunks, prefetch=PREFETCH
        )

    def _judged(self, name: str, memory: Memory) -> Fitted:
        started = time.perf_counter()
        step = budgeted(self.problem, self.plan, memory, uses=self.uses)
        timeline = simulate(step.problem, step.plan)
        return Fitted(
            name=name, memory=memory, step=step, timeline=timeline, blocks=self.uses.blocks,
            plain_s=self.plain_s, plan_seconds=time.perf_counter() - started,
        )  # fmt: skip

    def solved(
        self, name: str, budget_bytes: float, seen: set[Memory | None], homes: tuple[int, ...],
        in_flight: float, tail: float = LARGEST_TAIL,
    ) -> Fitted | None:  # fmt: skip
        """What the linear program gives for a budget, unless it was seen or nothing keeps it."""
        chunks = self._chunks(tail * budget_bytes)
        work, seconds = self._tail(chunks)
        for allowed in dict.fromkeys((homes, ANYWHERE)):
            shares = solve(
                self.numbers, budget_bytes, prefetch=PREFETCH, tail_work=work, tail_s=seconds,
                host_bytes=self.host_bytes, homes=allowed, in_flight=in_flight,
            )  # fmt: skip
            if shares is not None:
                break
        if shares is None:
            return None
        memory = rounded(
            shares, self.numbers, self.uses, budget_bytes=self.budgets, loss_chunks=chunks,
            prefetch=PREFETCH,
        )  # fmt: skip
        return None if memory in seen else self._judged(name, memory)

    def _chunks(self, tail_bytes: float) -> int:
        fits = (n for n in self.chunks if self._tail(n)[0] <= tail_bytes)
        return next(fits, self.chunks[-1])

    def _tail(self, chunks: int) -> tuple[float, float]:
        """Bytes and seconds of the last block in chunks."""
        numbers = self.numbers
        saved = numbers.tail_inner * (1 - 1 / chunks)
        op_s = numbers.tail_s
        if chunks > 1:
            op_s = np.where(op_s > 0, np.maximum(op_s / chunks, numbers.launch_s) * chunks, 0.0)
        return float((numbers.tail_held - saved).max(initial=0.0)), float(op_s.sum())

    def fits_host(self, fitted: Fitted) -> bool:
        """Whether what waits on the host has room there."""
        return host_bytes_of(fitted) <= self.host_bytes


def host_bytes_of(fitted: Fitted) -> int:
    """Bytes that a plan keeps on the host: offloaded activations, and what is at home there."""
    if fitted.memory is None:
        return 0
    before = fitted.step.rewritten
    graph = before.graph
    is_offload = np.array([name.endswith("@offload") for name in graph.op_names])
    return int(before.moved_bytes[is_offload].sum()) + fitted.step.at_home_bytes
