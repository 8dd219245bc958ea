"""Memory sections of one step: made, carried into its graph, and judged by the simulator.

The sections that people would write by hand, the leanest one there is, and what the linear program
gives for a budget. What all of them share is found once: the cut of the step into blocks, who reads
what, and the numbers of the blocks. O(ops) per section.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.cost.host import CALLS_HOSTED, CALLS_MOVED, CALLS_RECOMPUTED
from hocket.cost.roofline import work_on
from hocket.graph.graph import Stream
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_finer, cut_step
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.keeping import KeepingPlans
from hocket.planners.memory.linear import Allowed, ProgramShares, Turn, allowing, solve
from hocket.planners.memory.numbers import (
    FROM_HOST,
    HOMES,
    HOST_UPDATE,
    KEPT,
    OFFLOADED,
    RECOMPUTED,
    RESIDENT,
    STREAMED,
    VISITING,
    WAYS,
    BlockNumbers,
    measure,
)
from hocket.planners.order.levels import placement_of
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.blocks import StepBlocks
from hocket.simulate.rewriting.chunks import has_large_logits
from hocket.simulate.rewriting.rewrite import Rewritten
from hocket.simulate.rewriting.step import budgeted
from hocket.simulate.rewriting.uses import Uses, find_uses

# From shares to a memory section: each block gets one way and one home.
#
# Blocks are gone through in order and what a block was given too much or too little of is carried
# to the next one (error diffusion), so that after any number of blocks each way has about the bytes
# and seconds that the linear program gave it. Kept and offloaded need no rounding: a block offloads
# a share of its bytes. How much each block offloads is therefore asked of the program once more
# when all else is chosen: what was spread over blocks that are made again now would hold others up.
# O(blocks).

SMALLEST_SHARE = 0.02
"""Less than this part of a block is not worth offloading."""


class BlockChoices(NamedTuple):
    """One way and one home per block; what is kept may be offloaded in part."""

    way: IntArray
    home: IntArray

    @property
    def allowed(self) -> Allowed:
        """What is left to choose: how much of what is there is offloaded."""
        ways = np.arange(len(WAYS)) == self.way[:, None]
        ways[self.way == KEPT, OFFLOADED] = True
        return Allowed(ways, np.arange(len(HOMES)) == self.home[:, None])


def chosen(shares: ProgramShares, numbers: BlockNumbers) -> BlockChoices:
    """The choice nearest to the shares."""
    ways = shares.ways.copy()
    ways[:, KEPT] += ways[:, OFFLOADED]
    ways[:, OFFLOADED] = 0.0
    home = _diffused(shares.homes, numbers.home[:, RESIDENT], _late(numbers))
    return BlockChoices(_diffused(ways, numbers.stay[:, KEPT]), home)


def offloaded_share(shares: ProgramShares) -> FloatArray:
    """Per block: the part of what is there that is offloaded."""
    offloaded = shares.ways[:, OFFLOADED]
    there = shares.ways[:, KEPT] + offloaded
    return np.divide(offloaded, there, out=np.zeros_like(there), where=there > 0)


def section_of(
    choice: BlockChoices,
    share: FloatArray,
    uses: Uses,
    *,
    budget_bytes: tuple[int, ...],
    loss_chunks: int,
    prefetch: int,
    expert_groups: int = 1,
) -> Memory:
    """The section of a choice, with the offloaded share of each block."""
    of_experts = {each.block for each in uses.experts.values()}
    home = choice.home
    blocks = tuple(
        MemoryBlock(
            name=name,
            start=int(uses.blocks.start[number]),
            stop=int(uses.blocks.start[number + 1]),
            parameters="streamed" if home[number] in (STREAMED, VISITING) else "resident",
            update="device" if home[number] in (RESIDENT, VISITING) else "host",
            expert_groups=expert_groups if home[number] == STREAMED and number in of_experts else 1,
            **_activations(int(choice.way[number]), float(share[number])),
        )
        for number, name in enumerate(uses.blocks.names)
    )
    return Memory(
        budget_bytes=budget_bytes, blocks=blocks, loss_chunks=loss_chunks, prefetch=prefetch
    )


def _activations(way: int, share: float) -> dict[str, Any]:
    if way == RECOMPUTED:
        return {"activations": "recomputed"}
    if way == FROM_HOST:
        return {"activations": "recomputed", "checkpoint": "offloaded"}
    if share >= SMALLEST_SHARE:
        return {"activations": "offloaded", "share": round(share, 4)}
    return {}


def _late(numbers: BlockNumbers) -> FloatArray:
    """What is owed of each home to begin with: the host's updates of the first blocks are waited
    for first of all, so that rather fewer of them are given to it, and rather more later on."""
    owed = np.zeros(len(HOMES))
    typical = float(np.median(numbers.home[:, RESIDENT]))
    owed[[HOST_UPDATE, STREAMED]], owed[[RESIDENT, VISITING]] = -typical / 4, typical / 4
    return owed


def _diffused(shares: FloatArray, weight: FloatArray, owed: FloatArray | None = None) -> IntArray:
    """One choice per row such that running sums of weighted choices follow those of the shares,
    beginning with what is ``owed``."""
    chosen = np.zeros(len(shares), dtype=np.int32)
    owed = np.zeros(shares.shape[1]) if owed is None else owed.copy()
    for row, given in enumerate(shares):
        owed += given * weight[row]
        # A choice that was not given to any row of this kind is never taken.
        allowed = np.where(given > 1e-9, owed, -np.inf)
        chosen[row] = int(np.argmax(allowed)) if weight[row] else int(np.argmax(given))
        owed[chosen[row]] -= weight[row]
    return chosen


# What the host takes to ask for a step within a budget: no step is shorter.
#
# Ops that run again are asked for again. Beside ops there is what the executor does in Python for
# each tensor that is computed again, each storage that goes and comes, and each parameter that is
# at home on the host (`hocket.cost.host`). O(ops), numpy.


class Asking:
    """The host's time for steps of one problem on one of its devices."""

    def __init__(self, problem: Problem, uses: Uses, device: int) -> None:
        self._uses = uses
        kind = problem.cluster.devices[device].kind
        self._work = work_on(problem.graph, kind, problem.costs.settings)

    def seconds(self, memory: Memory, done: Rewritten) -> float:
        """Of a section that was carried into the graph."""
        if not self._work.mean_host_s:
            return 0.0
        stream = done.graph.op_stream
        is_asked = (done.origin >= 0) & (stream != Stream.HOST)
        asked_s = float(self._work.host_s[done.origin[is_asked]].sum())
        uses, policies = self._uses, memory.blocks
        again = sum(
            len(reads)
            for visit, reads in zip(uses.module_calls.calls, uses.backward_reads, strict=True)
            if policies[visit.block].activations == "recomputed"
        )
        moved = int(done.is_offload.sum())
        at_home = sum(
            len(update.roots)
            for update in uses.updates.values()
            if policies[update.block].is_on_host
        )
        others = CALLS_RECOMPUTED * again + CALLS_MOVED * moved + CALLS_HOSTED * at_home
        return asked_s + self._work.mean_host_s * others


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


class PlanMaker:
    """Makes plans and has them simulated; what they share is found once."""

    def __init__(
        self, problem: Problem, plan: Plan, host_bytes: float, *, in_chunks: bool = True,
        replayed: Problem | None = None, blocks: StepBlocks | None = None, expert_groups: int = 1,
        async_update: bool = False,
    ) -> None:  # fmt: skip
        """``in_chunks`` says whether the loss may be made in chunks, where it can; ``replayed`` is
        the problem with the times of ops in a CUDA graph, where steps that can be one are;
        ``blocks`` are the usual ones unless others are given; ``expert_groups`` is in how many
        groups batched experts are streamed; ``async_update`` is that of all its sections."""
        self.async_update = async_update
        self.problem, self.plan, self.replayed = problem, plan, replayed
        self.host_bytes, self.expert_groups = host_bytes, expert_groups
        self.uses: Uses = find_uses(problem.graph, blocks or cut_step(problem.graph))
        self.in_chunks = in_chunks and has_large_logits(problem.graph, self.uses.blocks)
        self.chunks = CHUNKS if self.in_chunks else CHUNKS[:1]
        device = int(placement_of(plan)[0])
        self.numbers: BlockNumbers = measure(
            problem, self.uses, device, expert_groups=expert_groups
        )
        self.budgets = (0,) * problem.cluster.num_devices
        self.plain_s = simulate(problem, plan).makespan_s
        self.asking = Asking(problem, self.uses, device)
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
        return PlanMaker(
            self.problem, self.plan, self.host_bytes, in_chunks=self.in_chunks,
            replayed=self.replayed, blocks=self._cut(self.largest_bytes / count),
            expert_groups=count, async_update=self.async_update,
        )  # fmt: skip

    def _cut(self, most: float) -> StepBlocks:
        graph = self.problem.graph
        own = np.zeros(graph.num_tensors, dtype=np.int64)
        roots = [root for _, root in self.uses.parameter_reads]
        own[roots] = self.uses.copied_bytes[roots]
        return cut_finer(graph, self.uses.blocks, own, most)

    # ── plans ────────────────────────────────────────────────────────────────────────────────

    def usual(self) -> Iterator[Fitted]:
        """What people do by hand, and the leanest plan."""
        nothing = self._all(loss_chunks=1)
        in_backward = self._judged(IN_BACKWARD, nothing)
        problem = self._problem_of(nothing)
        trained = replace(problem, work=self.uses.graph, op_costs=problem.costs)
        timeline = simulate(trained, self.plan)
        yield replace(in_backward, name=PLAIN, memory=None, timeline=timeline)
        yield in_backward
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
            yield self._judged(f"leanest, {_in_chunks(chunks)}{self.how}", self._all(
                chunks, activations="recomputed", checkpoint="offloaded", parameters="streamed",
                update="host"))  # fmt: skip

    def keeping(self) -> list[KeepingPlans]:
        """Plans that move nothing, with few and with many chunks of the loss."""
        counts = dict.fromkeys((1, self.chunks[len(self.chunks) // 2], self.chunks[-1]))
        return [KeepingPlans(self.numbers, partial(self._kept, count)) for count in counts]

    def _kept(self, loss_chunks: int, name: str, is_kept: BoolArray) -> Fitted:
        recomputed = self._all(loss_chunks, activations="recomputed")
        blocks = tuple(
            replace(block, activations="kept") if kept else block
            for block, kept in zip(recomputed.blocks, is_kept.tolist(), strict=True)
        )
        in_chunks = f", {_in_chunks(loss_chunks)}" if loss_chunks > 1 else ""
        return self._judged(name + in_chunks, replace(recomputed, blocks=blocks))

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
            budget_bytes=self.budgets, blocks=blocks, loss_chunks=loss_chunks, prefetch=PREFETCH,
            async_update=self.async_update,
        )  # fmt: skip

    def _problem_of(self, memory: Memory) -> Problem:
        """The problem with the times that ops have under a section."""
        if self.replayed is None or memory.replay_hindrance(self.problem.graph):
            return self.problem
        return self.replayed

    def _judged(self, name: str, memory: Memory) -> Fitted:
        problem = self._problem_of(memory)
        step = budgeted(problem, self.plan, memory, uses=self.uses)
        least_s = 0.0
        if problem is self.problem:
            least_s = max(self.plain_s, self.asking.seconds(memory, step.rewritten))
        return Fitted(
            name=name, memory=memory, step=step, timeline=simulate(step.problem, step.plan),
            uses=self.uses, least_s=least_s,
        )  # fmt: skip

    def solved(
        self, name: str, budget_bytes: float, seen: set[Memory | None], turn: Turn,
        tail: float = LARGEST_TAIL, below_s: float = float("inf"),
    ) -> Fitted | None:  # fmt: skip
        """What the linear program gives for a budget, unless it was seen, nothing keeps it or its
        step is not promised to be below so many seconds; any home is allowed where those of the
        turn do not do."""
        chunks = self._chunks(max(tail * budget_bytes, self.enough_bytes))
        work, seconds = self._tail(chunks)

        def shares_of(allowed: Allowed) -> ProgramShares | None:
            return solve(
                self.numbers, budget_bytes, prefetch=PREFETCH, tail_work=work, tail_s=seconds,
                host_bytes=self.host_bytes, allowed=allowed, turn=turn,
                async_update=self.async_update,
            )  # fmt: skip

        # State of experts in groups does not come to the device.
        is_grouped = self.expert_groups > 1 and bool(self.uses.experts)
        anywhere = ON_HOST if is_grouped else ANYWHERE
        count, shares = self.numbers.num_blocks, None
        for homes in dict.fromkeys((tuple(h for h in turn.homes if h in anywhere), anywhere)):
            shares = shares or shares_of(allowing(count, turn.ways, homes))
        if shares is None or shares.step_s >= below_s:
            return None
        choice = chosen(shares, self.numbers)
        if (shares.ways[:, OFFLOADED] > 0).any():
            shares = shares_of(choice.allowed) or shares
        memory = section_of(
            choice, offloaded_share(shares), self.uses, budget_bytes=self.budgets,
            loss_chunks=chunks, prefetch=PREFETCH, expert_groups=self.expert_groups,
        )  # fmt: skip
        memory = replace(memory, async_update=self.async_update)
        return None if memory in seen else self._judged(name, memory)

    def eased(self, fitted: Fitted, seen: set[Memory | None]) -> Iterator[Fitted]:
        """The same plan without what the program may have wanted without need: with inputs of
        recomputed blocks kept, with the loss in one piece, and with it in fewer chunks."""
        if fitted.memory is None:
            return
        blocks, peak_bytes = fitted.memory.blocks, fitted.peak_bytes
        kept = tuple(replace(block, checkpoint="kept") for block in blocks)
        is_moved = [block.checkpoint == "offloaded" for block in blocks]
        inputs_bytes = float(self.numbers.moved[is_moved, FROM_HOST].sum())
        fewer = max(FEW_CHUNKS, 2 * self._chunks(self.enough_bytes))
        # A name that tells chunks already tells those that there are now.
        name = fitted.name.removesuffix(f", {_in_chunks(fitted.memory.loss_chunks)}")
        for called, memory, more_bytes in (
            (f"{fitted.name}, inputs kept", replace(fitted.memory, blocks=kept), inputs_bytes),
            *((f"{name}, {_in_chunks(n)}", replace(fitted.memory, loss_chunks=n), self._tail(n)[0])
              for n in (1, fewer)),
        ):  # fmt: skip
            # What would take far more than the plan does is another plan's business.
            is_eased = memory.loss_chunks <= fitted.memory.loss_chunks and memory not in seen
            if is_eased and more_bytes <= peak_bytes:
                yield self._judged(called, memory)

    @cached_property
    def enough_bytes(self) -> float:
        """What the last block may work in without being what a peak is due to: what others do."""
        return float(self.numbers.backward_work[:-1].max(initial=0.0))

    def _chunks(self, tail_bytes: float) -> int:
        fits = (n for n in self.chunks if self._tail(n)[0] <= tail_bytes)
        return next(fits, self.chunks[-1])

    def _tail(self, chunks: int) -> tuple[float, float]:
        """Bytes and seconds of the last block in chunks."""
        numbers = self.numbers
        saved = numbers.tail_inner * (1 - 1 / chunks)
        op_s, again_s = numbers.tail_s, 0.0
        if chunks > 1:
            again_s = numbers.tail_again_s
            op_s = np.where(op_s > 0, np.maximum(op_s / chunks, numbers.launch_s) * chunks, 0.0)
        held = float((numbers.tail_held - saved).max(initial=0.0))
        return held, float(op_s.sum()) + again_s


def _in_chunks(count: int) -> str:
    return f"{count} chunk{'s' if count > 1 else ''}"
