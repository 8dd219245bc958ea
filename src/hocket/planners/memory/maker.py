"""Make memory sections of one step, rewrite them into its graph, and simulate them.

Candidates are the sections that users would write by hand, the minimum-memory one, and those of the
linear program for a budget (`PlanMaker`). Fractions of the program are rounded to one policy per
block. The blocks of the step, the readers of each storage and the costs of the blocks are computed
once for all candidates. O(ops) per section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
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
from hocket.planners.memory.linear import (
    PREFETCH,
    Allowed,
    ProgramShares,
    Tail,
    Turn,
    allowing,
    solve,
)
from hocket.planners.memory.numbers import (
    ACTIVATION_POLICIES,
    FROM_HOST,
    HOST_UPDATE,
    KEPT,
    OFFLOADED,
    PARAMETER_POLICIES,
    RECOMPUTED,
    RESIDENT,
    STREAMED,
    STREAMED_STATE,
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

# From shares to a memory section: each block gets one policy for activations, one for parameters.
#
# Blocks are rounded in order, and the rounding error of a block is added to the next one (error
# diffusion), so that after any number of blocks each policy has about the bytes and seconds that
# the linear program assigned to it. Saved and offloaded activations need no rounding, because a
# block may offload a fraction of its bytes. The program is therefore solved once more for these
# fractions when all other policies are fixed: copies that it spread over blocks that are now
# recomputed would delay others. O(blocks).

SMALLEST_SHARE = 0.02
"""Smallest fraction of a block's activations that is worth offloading."""


class BlockChoices(NamedTuple):
    """Policy of activations and policy of parameters, per block."""

    activations: IntArray
    parameters: IntArray

    @property
    def allowed(self) -> Allowed:
        """Policies for a second solve: only the offloaded fraction of saving blocks is free."""
        activations = np.arange(len(ACTIVATION_POLICIES)) == self.activations[:, None]
        activations[self.activations == KEPT, OFFLOADED] = True
        return Allowed(activations, np.arange(len(PARAMETER_POLICIES)) == self.parameters[:, None])


def chosen(shares: ProgramShares, numbers: BlockNumbers) -> BlockChoices:
    """Round the fractions of the linear program to one policy per block."""
    activations = shares.activations.copy()
    activations[:, KEPT] += activations[:, OFFLOADED]
    activations[:, OFFLOADED] = 0.0
    parameters = _diffused(shares.parameters, numbers.on_device[:, RESIDENT], _late(numbers))
    return BlockChoices(_diffused(activations, numbers.stay[:, KEPT]), parameters)


def offloaded_share(shares: ProgramShares) -> FloatArray:
    """[block]: fraction of the activations that are not recomputed which is offloaded."""
    offloaded = shares.activations[:, OFFLOADED]
    there = shares.activations[:, KEPT] + offloaded
    return np.divide(offloaded, there, out=np.zeros_like(there), where=there > 0)


def _activations(policy: int, share: float) -> dict[str, Any]:
    if policy == RECOMPUTED:
        return {"activations": "recomputed"}
    if policy == FROM_HOST:
        return {"activations": "recomputed", "checkpoint": "offloaded"}
    if share >= SMALLEST_SHARE:
        return {"activations": "offloaded", "share": round(share, 4)}
    return {}


def _late(numbers: BlockNumbers) -> FloatArray:
    """Initial deficit of each parameter policy for the rounding.

    The next forward pass waits first for the first blocks' updates on the host, so the deficit
    shifts host updates to later blocks.
    """
    deficit = np.zeros(len(PARAMETER_POLICIES))
    typical = float(np.median(numbers.on_device[:, RESIDENT]))
    deficit[[HOST_UPDATE, STREAMED]] = -typical / 4
    deficit[[RESIDENT, STREAMED_STATE]] = typical / 4
    return deficit


def _diffused(
    shares: FloatArray, weight: FloatArray, deficit: FloatArray | None = None
) -> IntArray:
    """One choice per row such that running sums of the weighted choices follow those of the
    fractions.

    The rounding starts with ``deficit`` (error diffusion).
    """
    chosen = np.zeros(len(shares), dtype=np.int32)
    deficit = np.zeros(shares.shape[1]) if deficit is None else deficit.copy()
    for row, given in enumerate(shares):
        deficit += given * weight[row]
        # A policy without a fraction in this row is never chosen, whatever its deficit.
        allowed = np.where(given > 1e-9, deficit, -np.inf)
        # A block without bytes has no error to pass on: the largest fraction decides.
        chosen[row] = int(np.argmax(allowed)) if weight[row] else int(np.argmax(given))
        deficit[chosen[row]] -= weight[row]
    return chosen


# Host time to launch a step within a budget: no step is shorter.
#
# Recomputed ops are launched twice. Besides launching, the executor runs Python code for each
# recomputed tensor, each storage that is offloaded and fetched, and each host-resident parameter
# (`hocket.cost.host`). O(ops), numpy.


class LaunchTime:
    """Host time to launch steps of one problem on one of its devices."""

    def __init__(self, problem: Problem, uses: Uses, device: int) -> None:
        self._uses = uses
        kind = problem.cluster.devices[device].kind
        self._work = work_on(problem.graph, kind, problem.costs.settings)

    def seconds(self, memory: Memory, done: Rewritten) -> float:
        """Host time to launch a step that was rewritten for a memory section."""
        # Device types without measured launch times have no lower limit by the host.
        if not self._work.mean_host_s:
            return 0.0
        stream = done.graph.op_stream
        is_launched = (done.origin >= 0) & (stream != Stream.HOST)
        launched_s = float(self._work.host_s[done.origin[is_launched]].sum())
        uses, policies = self._uses, memory.blocks
        recomputed = sum(
            len(reads)
            for call, reads in zip(uses.module_calls.calls, uses.backward_reads, strict=True)
            if policies[call.block].activations == "recomputed"
        )
        moved = int(done.is_offload.sum())
        on_host = sum(
            len(update.roots)
            for update in uses.updates.values()
            if policies[update.block].is_on_host
        )
        others = CALLS_RECOMPUTED * recomputed + CALLS_MOVED * moved + CALLS_HOSTED * on_host
        return launched_s + self._work.mean_host_s * others


ON_DEVICE: tuple[int, ...] = (RESIDENT,)
ON_HOST: tuple[int, ...] = (RESIDENT, HOST_UPDATE, STREAMED)
ANYWHERE: tuple[int, ...] = (RESIDENT, HOST_UPDATE, STREAMED, STREAMED_STATE)
"""All parameter policies."""
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of chunks in which the loss may be computed."""
FEW_CHUNKS = 8
"""Largest number of chunks that costs no time; each adds to the last layer's weight gradient."""
LARGEST_TAIL, SMALL_TAIL = 0.25, 0.15
"""Largest fraction of a budget that the last block may work in; the loss is split into chunks until
it does. The second applies to budgets between those of other plans."""
PLAIN, IN_BACKWARD = "plain", "update in backward"
FULL_RECOMPUTE, FULL_OFFLOAD = "full recompute", "offload everything"
OFFLOADED_ACTIVATIONS, RECOMPUTED_FROM_HOST = "offload activations", "recompute from the host"


class PlanMaker:
    """Makes memory plans of one step and simulates them, with common data computed once."""

    def __init__(
        self, problem: Problem, plan: Plan, host_bytes: float, *, in_chunks: bool = True,
        replayed: Problem | None = None, blocks: StepBlocks | None = None,
        async_update: bool = False,
    ) -> None:  # fmt: skip
        """Prepare the data that all plans need.

        ``in_chunks`` is True if the loss may be computed in chunks. ``replayed`` is the problem
        with the times of ops in a CUDA graph, which apply to steps that can be captured. ``blocks``
        defaults to those of `cut_step`. ``async_update`` applies to all sections.
        """
        self.async_update = async_update
        self.problem, self.plan, self.replayed = problem, plan, replayed
        self.host_bytes, self.how = host_bytes, ""
        """Host memory that plans may use, and the suffix of the plans' names."""
        self.uses: Uses = find_uses(problem.graph, blocks or cut_step(problem.graph))
        self.in_chunks = in_chunks and has_large_logits(problem.graph, self.uses.blocks)
        self.chunks = CHUNKS if self.in_chunks else CHUNKS[:1]
        device = int(placement_of(plan)[0])
        self.numbers: BlockNumbers = measure(problem, self.uses, device)
        # A placeholder: `BudgetFit.plan` enters the budget of the chosen plan.
        self.budgets = (0,) * problem.cluster.num_devices
        self.plain_s = simulate(problem, plan).makespan_s
        self.launch_time = LaunchTime(problem, self.uses, device)

    # ── smaller blocks ───────────────────────────────────────────────────────────────────────

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest group of parameters that is fetched at once if all are streamed."""
        return int(self.numbers.fetched[:, STREAMED].max(initial=0.0))

    @cached_property
    def most_cuts(self) -> int:
        """Largest number of pieces into which the lists of modules in a block can cut it."""
        finest, start = self._cut(0), self.uses.blocks.start
        members = np.diff(np.searchsorted(finest.start, start))
        # Ops before and after the members of a list are blocks of their own, hence the 2.
        return max(int(members.max(initial=1)) - 2, 1)

    def finer(self, count: int) -> PlanMaker:
        """Return a maker whose largest block is cut by inner lists into about ``count`` pieces."""
        maker = PlanMaker(
            self.problem, self.plan, self.host_bytes, in_chunks=self.in_chunks,
            replayed=self.replayed, blocks=self._cut(self.largest_bytes / count),
            async_update=self.async_update,
        )  # fmt: skip
        maker.how = f" in {count} parts"
        return maker

    def _cut(self, most: float) -> StepBlocks:
        graph = self.problem.graph
        own = np.zeros(graph.num_tensors, dtype=np.int64)
        roots = [root for _, root in self.uses.parameter_reads]
        own[roots] = self.uses.copied_bytes[roots]
        return cut_finer(graph, self.uses.blocks, own, most)

    # ── plans ────────────────────────────────────────────────────────────────────────────────

    def usual(self) -> Iterator[Fitted]:
        """Plans that users would write by hand, and the minimum-memory plans."""
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
        yield from self.minimum_memory()

    def minimum_memory(self) -> Iterator[Fitted]:
        """Plans that move to the host or recompute as much as possible."""
        for chunks in dict.fromkeys((1, self.chunks[-1])):
            yield self._judged(f"minimum memory, {_in_chunks(chunks)}{self.how}", self._all(
                chunks, activations="recomputed", checkpoint="offloaded", parameters="streamed",
                update="host"))  # fmt: skip

    def keeping(self) -> list[KeepingPlans]:
        """Families of plans that move nothing, by three numbers of chunks of the loss."""
        counts = dict.fromkeys((1, self.chunks[len(self.chunks) // 2], self.chunks[-1]))
        return [KeepingPlans(self.numbers, partial(self._kept, count)) for count in counts]

    def _kept(self, loss_chunks: int, name: str, is_kept: BoolArray) -> Fitted:
        policies = [{"activations": "kept" if kept else "recomputed"} for kept in is_kept.tolist()]
        in_chunks = f", {_in_chunks(loss_chunks)}" if loss_chunks > 1 else ""
        return self._judged(name + in_chunks, self._memory(loss_chunks, policies))

    def _all(self, loss_chunks: int, *, num_kept: int = 1, **policy: str) -> Memory:
        """One policy for every block; the last ``num_kept`` blocks keep their activations."""
        parameters = {k: v for k, v in policy.items() if k in ("parameters", "update")}
        count = self.numbers.num_blocks
        # The backward pass of the last block follows at once: its activations are used immediately.
        policies = [policy if n < count - num_kept else parameters for n in range(count)]
        return self._memory(loss_chunks, policies)

    def _rounded(self, choice: BlockChoices, share: FloatArray, loss_chunks: int) -> Memory:
        """The section with these policies and with the offloaded fraction of each block."""
        policies = zip(choice.activations, choice.parameters, share, strict=True)
        return self._memory(loss_chunks, [
            {
                "parameters": "streamed" if place in (STREAMED, STREAMED_STATE) else "resident",
                "update": "device" if place in (RESIDENT, STREAMED_STATE) else "host",
                **_activations(int(activations), float(part)),
            }
            for activations, place, part in policies
        ])  # fmt: skip

    def _memory(self, loss_chunks: int, policies: Sequence[Mapping[str, Any]]) -> Memory:
        """The section with one set of policies per block."""
        cut = self.uses.blocks
        edges = zip(cut.names, pairwise(cut.start.tolist()), policies, strict=True)
        return Memory(
            budget_bytes=self.budgets, loss_chunks=loss_chunks, prefetch=PREFETCH,
            async_update=self.async_update,
            blocks=tuple(
                MemoryBlock(name=name, start=start, stop=stop, **policy)
                for name, (start, stop), policy in edges
            ),
        )  # fmt: skip

    def _problem_of(self, memory: Memory) -> Problem:
        """The problem with the op times that apply to a section: replayed if it can be captured."""
        if self.replayed is None or memory.replay_hindrance(self.problem.graph):
            return self.problem
        return self.replayed

    def _judged(self, name: str, memory: Memory) -> Fitted:
        problem = self._problem_of(memory)
        step = budgeted(problem, self.plan, memory, uses=self.uses)
        least_s = 0.0
        # A CUDA graph is launched once, so the host's launches do not limit a replayed step.
        if problem is self.problem:
            least_s = max(self.plain_s, self.launch_time.seconds(memory, step.rewritten))
        return Fitted(
            name=name, memory=memory, step=step, timeline=simulate(step.problem, step.plan),
            uses=self.uses, least_s=least_s,
        )  # fmt: skip

    def solved(
        self, name: str, budget_bytes: float, seen: set[Memory | None], turn: Turn,
        tail: float = LARGEST_TAIL, below_s: float = float("inf"),
    ) -> Fitted | None:  # fmt: skip
        """Plan of the linear program for a budget.

        None if it was ``seen``, if nothing fits the budget, or if its predicted step is not below
        ``below_s``. All parameter policies are allowed if those of the ``turn`` do not fit.
        """
        chunks = self._chunks(max(tail * budget_bytes, self.enough_bytes))

        def shares_of(allowed: Allowed) -> ProgramShares | None:
            return solve(
                self.numbers, budget_bytes, tail=self._tail(chunks), host_bytes=self.host_bytes,
                allowed=allowed, turn=turn, async_update=self.async_update,
            )  # fmt: skip

        count, shares = self.numbers.num_blocks, None
        # `shares or` skips the second run if the first has found a solution.
        for parameters in dict.fromkeys((turn.parameters, ANYWHERE)):
            shares = shares or shares_of(allowing(count, turn.activations, parameters))
        if shares is None or shares.step_s >= below_s:
            return None
        choice = chosen(shares, self.numbers)
        if (shares.activations[:, OFFLOADED] > 0).any():
            shares = shares_of(choice.allowed) or shares
        memory = self._rounded(choice, offloaded_share(shares), chunks)
        return None if memory in seen else self._judged(name, memory)

    def eased(self, fitted: Fitted, seen: set[Memory | None]) -> Iterator[Fitted]:
        """Variants of a plan without savings that it may not need.

        These are: inputs of recomputed blocks kept on the device, the loss in one piece, and the
        loss in fewer chunks.
        """
        if fitted.memory is None:
            return
        blocks, peak_bytes = fitted.memory.blocks, fitted.peak_bytes
        kept = tuple(replace(block, checkpoint="kept") for block in blocks)
        is_moved = [block.checkpoint == "offloaded" for block in blocks]
        inputs_bytes = float(self.numbers.moved[is_moved, FROM_HOST].sum())
        fewer = max(FEW_CHUNKS, 2 * self._chunks(self.enough_bytes))
        # The present name may end with its number of chunks, which the new name replaces.
        name = fitted.name.removesuffix(f", {_in_chunks(fitted.memory.loss_chunks)}")
        in_chunks = (
            (f"{name}, {_in_chunks(n)}", replace(fitted.memory, loss_chunks=n), self._tail(n)[0])
            for n in (1, fewer)
        )
        on_device = f"{fitted.name}, inputs kept", replace(fitted.memory, blocks=kept), inputs_bytes
        for called, memory, more_bytes in (on_device, *in_chunks):
            # A variant that needs far more memory belongs to another budget, where other plans win.
            is_eased = memory.loss_chunks <= fitted.memory.loss_chunks and memory not in seen
            if is_eased and more_bytes <= peak_bytes:
                yield self._judged(called, memory)

    @cached_property
    def enough_bytes(self) -> float:
        """Working memory of the last block that cannot be the peak: the most of other blocks."""
        return float(self.numbers.backward_work[:-1].max(initial=0.0))

    def _chunks(self, tail_bytes: float) -> int:
        fits = (n for n in self.chunks if self._tail(n).num_bytes <= tail_bytes)
        return next(fits, self.chunks[-1])

    def _tail(self, chunks: int) -> Tail:
        """Bytes and seconds of the last block if its loss is computed in ``chunks``."""
        numbers = self.numbers
        saved = numbers.tail_inner * (1 - 1 / chunks)
        op_s, recompute_s = numbers.tail_s, 0.0
        if chunks > 1:
            recompute_s = numbers.tail_recompute_s
            op_s = np.where(op_s > 0, np.maximum(op_s / chunks, numbers.launch_s) * chunks, 0.0)
        held = float((numbers.tail_held - saved).max(initial=0.0))
        return Tail(held, float(op_s.sum()) + recompute_s)


def _in_chunks(count: int) -> str:
    return f"{count} chunk{'s' if count > 1 else ''}"
