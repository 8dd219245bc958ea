"""Memory sections of one step: made, carried into its graph, and judged by the simulator.

The sections that people would write by hand, the leanest one there is, and what the linear program
gives for a budget. What all of them share is found once: the cut of the step into blocks, who reads
what, and the numbers of the blocks. O(ops) per section.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_finer, cut_step
from hocket.planners.memory.linear import Turn, solve
from hocket.planners.memory.numbers import (
    HOST_UPDATE,
    RESIDENT,
    STREAMED,
    VISITING,
    BlockNumbers,
    measure,
)
from hocket.planners.memory.rounding import rounded
from hocket.planners.memory.update_order import UpdateOrders, host_update_orders
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.blocks import StepBlocks
from hocket.simulate.rewriting.chunks import has_large_logits
from hocket.simulate.rewriting.following import has_updates_at_home, period_s
from hocket.simulate.rewriting.needs import Uses, find_uses
from hocket.simulate.rewriting.step import BudgetedStep, budgeted, moved_bytes
from hocket.simulate.timeline import Timeline

ON_DEVICE: tuple[int, ...] = (RESIDENT,)
ON_HOST: tuple[int, ...] = (RESIDENT, HOST_UPDATE, STREAMED)
ANYWHERE: tuple[int, ...] = (RESIDENT, HOST_UPDATE, STREAMED, VISITING)
"""Homes that parameters may have."""
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Into how many chunks the loss may be cut."""
FEW_CHUNKS = 8
"""So many take no longer than fewer: each adds to the gradient of the last layer's weights."""
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
    uses: Uses
    plain_s: float
    """Time of the plain step."""
    plan_seconds: float

    @property
    def blocks(self) -> StepBlocks:
        """The cut of the step."""
        return self.uses.blocks

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
        return host_update_orders(self.step, self.uses)

    @cached_property
    def step_s(self) -> float:
        """Time of a step among many: what is at home on the host is updated beside the next forward
        pass. That is not claimed to make a step shorter than the plain one, because who starts the
        device's work is the host, too."""
        taken_s = self.timeline.makespan_s
        if self.memory is not None and has_updates_at_home(self.step.rewritten.graph):
            taken_s = period_s(self.step, self.uses)
        return max(taken_s, self.plain_s)

    @property
    def rank(self) -> tuple[float, int, int]:
        """Of two plans that fit the lower one is better: faster, else moving and holding less."""
        return self.step_s, self.moved_bytes, self.peak_bytes


class PlanMaker:
    """Makes plans and has them simulated; what they share is found once."""

    def __init__(
        self, problem: Problem, plan: Plan, host_bytes: float, *, in_chunks: bool = True,
        blocks: StepBlocks | None = None, expert_groups: int = 1,
    ) -> None:  # fmt: skip
        """``in_chunks`` says whether the loss may be made in chunks, where it can; ``blocks`` are
        the usual ones unless others are given; ``expert_groups`` is in how many groups batched
        experts are streamed."""
        self.problem, self.plan = problem, plan
        self.host_bytes, self.expert_groups = host_bytes, expert_groups
        self.uses: Uses = find_uses(problem.graph, blocks or cut_step(problem.graph))
        self.in_chunks = in_chunks and has_large_logits(problem.graph, self.uses.blocks)
        self.chunks = CHUNKS if self.in_chunks else CHUNKS[:1]
        device = int(plan.device_of[0]) if plan.device_of is not None else 0
        self.numbers: BlockNumbers = measure(
            problem, self.uses, device, expert_groups=expert_groups
        )
        self.budgets = (0,) * problem.cluster.num_devices
        self.plain_s = 0.0
        self.how = f" in {expert_groups} groups" if expert_groups > 1 else ""
        """What the names of its plans end in."""

    # ── in groups ────────────────────────────────────────────────────────────────────────────

    @cached_property
    def largest_bytes(self) -> int:
        """Of parameters that come together where all are streamed."""
        return int(self.numbers.room[:, STREAMED].max(initial=0.0))

    @cached_property
    def most_groups(self) -> int:
        """Into how many groups the experts of a block can be divided at most."""
        finest, start = self._cut(0), self.uses.blocks.start
        members = np.diff(np.searchsorted(finest.start, start))
        counts = (each.count for each in self.uses.experts.values())
        # What comes before and after the members of a list is blocks of its own.
        return max(int(members.max(initial=1)) - 2, *counts, 1)

    def in_groups(self, count: int) -> PlanMaker:
        """The same of blocks that are cut by the lists of modules inside them, and with batched
        experts, in about so many groups where the largest block is concerned."""
        made = PlanMaker(
            self.problem, self.plan, self.host_bytes, in_chunks=self.in_chunks,
            blocks=self._cut(self.largest_bytes / count), expert_groups=count,
        )  # fmt: skip
        made.plain_s = self.plain_s
        return made

    def _cut(self, most: float) -> StepBlocks:
        graph = self.problem.graph
        own = np.zeros(graph.num_tensors, dtype=np.int64)
        roots = [root for _, root in self.uses.parameter_reads]
        own[roots] = self.uses.copied_bytes[roots]
        return cut_finer(graph, self.uses.blocks, own, most)

    # ── plans ────────────────────────────────────────────────────────────────────────────────

    def usual(self) -> Iterator[Fitted]:
        """What people do by hand, and the leanest plan."""
        timeline = simulate(self.problem, self.plan)
        nothing = self._all(loss_chunks=1)
        plain = budgeted(self.problem, self.plan, nothing, uses=self.uses)
        self.plain_s = timeline.makespan_s
        yield Fitted(
            name=PLAIN, memory=None, step=plain, timeline=timeline, uses=self.uses,
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
            yield self._judged(f"leanest, {chunks} chunks{self.how}", self._all(
                chunks, activations="recomputed", checkpoint="offloaded", parameters="streamed",
                update="host"))  # fmt: skip

    def _all(self, loss_chunks: int, *, num_kept: int = 1, **policy: str) -> Memory:
        """One policy for every block, but for the last ones, whose activations are kept."""
        starts = self.uses.blocks.start.tolist()
        last = self.uses.blocks.num_blocks - num_kept
        homes = {k: v for k, v in policy.items() if k in ("parameters", "update")}
        is_away = homes == {"parameters": "streamed", "update": "host"}
        of_experts = {each.block for each in self.uses.experts.values()} if is_away else ()
        blocks = tuple(
            MemoryBlock(
                name=name, start=starts[number], stop=starts[number + 1],
                expert_groups=self.expert_groups if number in of_experts else 1,
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
            name=name, memory=memory, step=step, timeline=timeline, uses=self.uses,
            plain_s=self.plain_s, plan_seconds=time.perf_counter() - started,
        )  # fmt: skip

    def solved(
        self, name: str, budget_bytes: float, seen: set[Memory | None], turn: Turn,
        tail: float = LARGEST_TAIL,
    ) -> Fitted | None:  # fmt: skip
        """What the linear program gives for a budget, unless it was seen or nothing keeps it; any
        home is allowed where those of the turn do not do."""
        chunks = self._chunks(tail * budget_bytes)
        work, seconds = self._tail(chunks)
        # State of experts in groups does not come to the device.
        is_grouped = self.expert_groups > 1 and bool(self.uses.experts)
        anywhere = ON_HOST if is_grouped else ANYWHERE
        for homes in dict.fromkeys((tuple(h for h in turn.homes if h in anywhere), anywhere)):
            shares = solve(
                self.numbers, budget_bytes, prefetch=PREFETCH, tail_work=work, tail_s=seconds,
                host_bytes=self.host_bytes, turn=turn._replace(homes=homes),
            )  # fmt: skip
            if shares is not None:
                break
        if shares is None:
            return None
        memory = rounded(
            shares, self.numbers, self.uses, budget_bytes=self.budgets, loss_chunks=chunks,
            prefetch=PREFETCH, expert_groups=self.expert_groups,
        )  # fmt: skip
        return None if memory in seen else self._judged(name, memory)

    def in_fewer_chunks(self, fitted: Fitted) -> Fitted | None:
        """The same with the loss in fewer chunks, such that the last block works in about half of
        the bytes that others do; None where it has few."""
        enough = float(self.numbers.backward_work[:-1].max(initial=0.0))
        count = max(FEW_CHUNKS, 2 * self._chunks(enough))
        if fitted.memory is None or fitted.memory.loss_chunks <= count:
            return None
        memory = replace(fitted.memory, loss_chunks=count)
        return self._judged(f"{fitted.name}, {count} chunks", memory)

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
        return _host_bytes(fitted) <= self.host_bytes


def _host_bytes(fitted: Fitted) -> int:
    """Bytes that a plan keeps on the host: offloaded activations, and what is at home there."""
    if fitted.memory is None:
        return 0
    before = fitted.step.rewritten
    graph = before.graph
    is_offload = np.array([name.endswith("@offload") for name in graph.op_names])
    return int(before.moved_bytes[is_offload].sum()) + fitted.step.at_home_bytes
