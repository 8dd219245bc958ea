"""Linear program over the blocks of a step: which activations and parameters to save or move.

Its variables are, per block, fractions of the policies for activations and for parameters, and
times: the ends of passes and of copies in each direction, none earlier than what it waits
for, so transfers overlap with compute exactly as far as possible. Updates on the host end with the
step, or, if they are asynchronous, when the next forward pass needs them. One constraint per pass
limits the bytes on the device. The end of the step is minimized (joint offload, recompute and
streaming as in OFFMATE, 2024, and POET, 2022, with overlap). Sparse, about 20 columns per block,
solved by HiGHS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.planners.memory.numbers import (
    ACTIVATION_POLICIES,
    OFFLOADED,
    PARAMETER_POLICIES,
    RESIDENT,
    STREAMED_STATE,
    BlockNumbers,
)

Term = tuple[LongArray, FloatArray]
"""Indices of columns, and their coefficients."""
ALL = slice(None)
PREFETCH = 1
"""Number of blocks for which parameters and activations are fetched ahead."""
MANY_BLOCKS = 100
"""Number of blocks from which interior points are faster than the simplex method."""
_TINY = 1e-9
"""Cost in seconds per moved byte in the objective, so that nothing moves without a benefit."""
_UNEVEN = 1e-4
"""Penalty, as a fraction of the step's compute, for swapping in all state of one block and none of
its neighbour's. It breaks ties in favour of plans that spread swapped state evenly over the
blocks."""


class Tail(NamedTuple):
    """Both passes of the last block, whose activations are always kept.

    They depend on the number of chunks in which the loss is computed.
    """

    num_bytes: float
    """Working memory."""
    seconds: float


class Turn(NamedTuple):
    """Policies and assumptions of one run of the linear program."""

    parameters: tuple[int, ...]
    """Allowed policies of parameters."""
    in_flight: float
    """Fraction of the copies for neighbouring passes that counts in the memory of a pass: 1 if
    copies arrive early or leave late, 0 if each byte arrives exactly when another leaves."""
    activations: tuple[int, ...] = tuple(range(len(ACTIVATION_POLICIES)))
    """Allowed policies of activations."""
    is_hidden: bool = False
    """True if copies also overlap with the passes of their own block: each tensor leaves when it is
    made and arrives when it is read. This holds for blocks with many tensors of one size."""


@dataclass(frozen=True, eq=False)
class Allowed:
    """Policies that each block may choose among."""

    activations: BoolArray
    """[block, policy]: True if allowed."""
    parameters: BoolArray
    """[block, policy]: True if allowed."""


def allowing(num_blocks: int, activations: Sequence[int], parameters: Sequence[int]) -> Allowed:
    """Allow the same policies for all blocks."""
    each = (
        np.isin(np.arange(len(all_)), some)
        for all_, some in ((ACTIVATION_POLICIES, activations), (PARAMETER_POLICIES, parameters))
    )
    return Allowed(*(np.tile(row, (num_blocks, 1)) for row in each))


@dataclass(frozen=True, eq=False)
class ProgramShares:
    """Fractions of the policies that the linear program chose for each block."""

    activations: FloatArray
    """[block, policy]: fractions; each row adds up to 1."""
    parameters: FloatArray
    """[block, policy]: fractions; each row adds up to 1."""
    step_s: float
    """Step time if blocks could be split by these fractions."""


def solve(
    numbers: BlockNumbers,
    budget_bytes: float,
    *,
    tail: Tail,
    host_bytes: float,
    allowed: Allowed,
    turn: Turn,
    async_update: bool = False,
) -> ProgramShares | None:
    """Return the best fractions within a budget; None if nothing fits.

    Staging buffers for optimizer state are counted if ``allowed`` contains swapping it in, even if
    ``turn`` does not.
    """
    program = _Program(numbers, is_hidden=turn.is_hidden, async_update=async_update)
    program.add_passes(tail.seconds)
    program.add_turns()
    swaps_state = bool(allowed.parameters[:, STREAMED_STATE].any())
    available = budget_bytes - numbers.base_bytes - numbers.staging_buffers_bytes * swaps_state
    program.add_memory(available, tail.num_bytes, host_bytes, turn.in_flight)
    return program.solved(allowed)


class _Program:
    """The linear program under construction; its columns are fractions, then times and sums.

    Rows ``sum of coefficients <= limit`` are added for several blocks at a time.
    """

    def __init__(self, numbers: BlockNumbers, *, is_hidden: bool, async_update: bool) -> None:
        self.numbers, self.ahead, self.is_hidden = numbers, PREFETCH, is_hidden
        self.async_update = async_update
        self.offloaded_s = numbers.moved[:, OFFLOADED] / numbers.link.in_bps
        """[block]: seconds to fetch back all activations that the block can offload."""
        count = numbers.num_blocks
        self.count = count
        self._columns = 0
        self.activations = self._new((count, len(ACTIVATION_POLICIES)))
        self.parameters = self._new((count, len(PARAMETER_POLICIES)))
        names = ("forward", "backward", "out", "parameters", "fetch", "gradients")
        self.end = {name: self._new((count,)) for name in names}
        self.left, self.host_busy = self._new((count,)), self._new((count,))
        """[block]: bytes saved by the blocks before it, and seconds of host updates up to it."""
        self.uneven = self._new((count,))
        self.resident, self.step = self._new((2,))
        self._rows: list[LongArray] = []
        self._entry_columns: list[LongArray] = []
        self._values: list[FloatArray] = []
        self._limits: list[FloatArray] = []
        self._num_rows = 0

    def _new(self, shape: tuple[int, ...]) -> LongArray:
        size = int(np.prod(shape))
        columns = np.arange(self._columns, self._columns + size).reshape(shape)
        self._columns += size
        return columns

    def _add(self, limits: FloatArray, *terms: Term) -> None:
        """Add rows ``sum of terms <= limit``; the first axis of each term is the row."""
        if not len(limits):
            return
        rows = self._num_rows + np.arange(len(limits))
        self._num_rows += len(limits)
        self._limits.append(limits)
        for columns, values in terms:
            wide = columns.reshape(len(limits), -1)
            self._rows.append(np.repeat(rows, wide.shape[1]))
            self._entry_columns.append(wide.ravel())
            self._values.append(np.broadcast_to(values, columns.shape).ravel())

    def _after(
        self,
        later: LongArray,
        earlier: LongArray | None,
        *takes: Term,
        fixed_s: FloatArray | None = None,
    ) -> None:
        """Add rows: ``later`` times are no earlier than ``earlier`` ones plus ``takes``."""
        terms = [(later, np.array(-1.0)), *takes]
        if earlier is not None:
            terms.append((earlier, np.array(1.0)))
        self._add(np.zeros(len(later)) if fixed_s is None else -fixed_s, *terms)

    def _activation_term(self, table: FloatArray, blocks: slice, scale: float = 1.0) -> Term:
        """Cost of blocks by a table [block, activation policy], weighted by fractions."""
        return self.activations[blocks], table[blocks] * scale

    def _parameter_term(self, table: FloatArray, blocks: slice, scale: float = 1.0) -> Term:
        """Cost of blocks by a table [block, parameter policy], weighted by the chosen fractions."""
        return self.parameters[blocks], table[blocks] * scale

    # ── times ────────────────────────────────────────────────────────────────────────────────────

    def add_passes(self, tail_s: float) -> None:
        """Add rows that order forward and backward passes, copies and updates."""
        end, numbers, ahead = self.end, self.numbers, self.ahead
        # The last block's pass depends on how its loss is split, so the caller passes its seconds.
        backward_s = np.append(numbers.backward_s[:-1], tail_s)
        self._add_forward()
        takes = (
            self._activation_term(numbers.recompute_s, ALL),
            self._parameter_term(numbers.update_s, ALL),
        )
        before = np.append(end["backward"][1:], end["forward"][-1])
        self._after(end["backward"], before, *takes, fixed_s=backward_s)
        # Offloaded tensors arrive in the order in which they are read, after all other fetches. The
        # pass begins with the first of them and does not end before the last has arrived.
        every = np.arange(self.count)
        for seconds in (self.offloaded_s, backward_s):
            self._after(end["backward"], end["fetch"], *takes, self._meanwhile(seconds, every),
                        fixed_s=backward_s)  # fmt: skip
        self._add_fetch()
        self._add_update()
        if ahead + 1 < self.count:
            early = slice(0, -1 - ahead)
            self._after(
                end["backward"][early], end["gradients"][1 + ahead :],
                self._activation_term(numbers.recompute_s, early),
                fixed_s=numbers.backward_s[early],
            )  # fmt: skip
        for name in ("backward", "fetch"):
            self._after(np.array([self.step]), end[name][:1])
        self._add_deadlines()

    def _meanwhile(self, seconds: FloatArray, blocks: LongArray) -> Term:
        """Seconds that a pass saves because offloaded bytes arrive while they are read."""
        return self.activations[blocks, OFFLOADED], -seconds[blocks] * self.is_hidden

    def _add_forward(self) -> None:
        end, numbers, link, ahead = self.end, self.numbers, self.numbers.link, self.ahead
        # Both passes of the last block are counted in its backward pass.
        own_s = np.append(numbers.forward_s[:-1], 0.0)
        forward, parameters, out = end["forward"], end["parameters"], end["out"]
        fetch = self._parameter_term(numbers.brought, ALL, 1 / link.in_bps)
        moved = self._activation_term(numbers.moved, ALL, 1 / link.out_bps)
        self._after(forward, parameters, fixed_s=own_s)
        # Offloaded tensors leave after the pass, or as they are made: then the copy starts with the
        # pass at the earliest, and ends after the pass.
        self._after(out, forward)
        self._after(out, forward, moved, fixed_s=-own_s * self.is_hidden)
        self._after(parameters, None, fetch)
        later, before = slice(1, None), slice(0, -1)
        self._after(forward[later], forward[before], fixed_s=own_s[later])
        self._after(parameters[later], parameters[before],
                    self._parameter_term(numbers.brought, later, 1 / link.in_bps))  # fmt: skip
        self._after(
            out[later], out[before], self._activation_term(numbers.moved, later, 1 / link.out_bps)
        )
        if ahead + 1 < self.count:
            blocks, others = slice(1 + ahead, None), slice(0, -1 - ahead)
            fetch = self._parameter_term(numbers.brought, blocks, 1 / link.in_bps)
            self._after(forward[blocks], out[others], fixed_s=own_s[blocks])
            self._after(parameters[blocks], forward[others], fetch)

    def _add_fetch(self) -> None:
        """Add rows for fetches of a backward pass: after earlier fetches, and not too far ahead."""
        numbers, end, late = self.numbers, self.end, 1 + self.ahead
        rate, fetch = 1 / numbers.link.in_bps, end["fetch"]
        takes = [
            self._activation_term(numbers.moved, ALL, rate),
            self._parameter_term(numbers.fetched, ALL, rate),
        ]
        # Optimizer state is fetched during the backward pass of a block for the update after the
        # next block's pass.
        state = np.zeros_like(numbers.swapped_in)
        columns = self.parameters.copy()
        state[:-late], columns[:-late] = numbers.swapped_in[late:] * rate, self.parameters[late:]
        takes.append((columns, state))
        self._after(fetch, np.append(fetch[1:], end["parameters"][-1]), *takes)
        self._after(fetch, end["out"], *takes)
        trigger = end["forward"].copy()
        trigger[:-late] = end["backward"][late:]
        self._after(fetch, trigger, *takes)

    def _add_update(self) -> None:
        numbers, end, ahead = self.numbers, self.end, self.ahead
        in_s, out_s, gradients = 1 / numbers.link.in_bps, 1 / numbers.link.out_bps, end["gradients"]
        out = self._parameter_term(numbers.gradients, ALL, out_s)
        self._after(gradients, np.append(gradients[1:], end["out"][-1]), out)
        self._after(gradients, end["backward"], out)
        # State of the first blocks is fetched after everything that the passes need. Chunks are
        # written back while others arrive, so when all have arrived only the last remains.
        first = slice(0, min(ahead + 1, self.count))
        is_behind = np.arange(self.count)[:, None] <= np.arange(self.count)[first]
        columns = np.broadcast_to(
            self.parameters[first], (self.count, *self.parameters[first].shape)
        )
        state = is_behind[:, :, None] * numbers.swapped_in[first] * in_s
        turn = np.maximum(np.arange(self.count) - 1 - ahead, 0)
        last_piece = self._parameter_term(numbers.last_piece, ALL, out_s)
        self._after(gradients, end["fetch"][turn], (columns, state), last_piece,
                    self._meanwhile(self.offloaded_s, turn))  # fmt: skip

    def _add_deadlines(self) -> None:
        """Add deadlines of updates on the host.

        When the gradients of a block have arrived, its updates and those of all blocks before it
        are still to be done. They end with the step or, if asynchronous, before the next forward
        pass reaches their block.
        """
        numbers, one = self.numbers, np.array(1.0)
        traffic = self._parameter_term(numbers.host_traffic, ALL, 1 / numbers.host_update_bps)
        self._add(np.zeros(self.count), traffic, (self.host_busy, -one))
        self._add(np.zeros(self.count - 1), (self.host_busy[:-1], one),
                  (traffic[0][1:], traffic[1][1:]), (self.host_busy[1:], -one))  # fmt: skip
        step = np.full(self.count, self.step)
        if not self.async_update:
            self._after(step, self.end["gradients"], (self.host_busy, one))
            return
        back = self._parameter_term(numbers.brought, ALL, 1 / numbers.link.in_bps)
        later_s = np.cumsum(numbers.forward_s) - numbers.forward_s
        self._after(step, self.end["gradients"], (self.host_busy, one), back, fixed_s=-later_s)
        self._after(step[:1], self.host_busy[-1:])

    def add_turns(self) -> None:
        """Add rows for the difference in swapped-in state between equal neighbouring blocks."""
        whole, one = self.numbers.on_device[:, RESIDENT], np.array(1.0)
        blocks = np.flatnonzero(whole[1:] == whole[:-1])
        pair = self.parameters[blocks, STREAMED_STATE], self.parameters[blocks + 1, STREAMED_STATE]
        for more, less in (pair, pair[::-1]):
            self._add(np.zeros(len(blocks)), (more, one), (less, -one),
                      (self.uneven[blocks], -one))  # fmt: skip

    # ── bytes ────────────────────────────────────────────────────────────────────────────────────

    def add_memory(
        self, available: float, tail_work: float, host_bytes: float, in_flight: float
    ) -> None:
        """Add two memory rows per block and one for the host.

        Sizes are in units that keep HiGHS exact. Saved bytes are summed in columns of their own, so
        that rows need not list all blocks before them.
        """
        numbers, unit, ahead = self.numbers, max(available, 1.0), self.ahead
        one = np.array(1.0)
        self._add(np.zeros(1), (self.parameters[None], numbers.on_device[None] / unit),
                  (np.array([self.resident]), -one))  # fmt: skip
        self._add(np.zeros(self.count - 1), (self.left[:-1], one), (self.left[1:], -one),
                  self._activation_term(numbers.stay, slice(0, -1), 1 / unit))  # fmt: skip
        # Resident parameters, and what earlier blocks saved, are there during every pass.
        there = ((np.full(self.count, self.resident), one), (self.left, one))
        scale = in_flight / unit
        forward = (available - np.append(numbers.forward_work[:-1], tail_work)) / unit
        backward = (available - np.append(numbers.backward_work[:-1], tail_work)) / unit
        self._add(
            forward, *there,
            *self._window(numbers.fetched, self.parameters, 0, ahead, scale),
            *self._window(numbers.moved, self.activations, -1 - ahead, -1, scale),
        )  # fmt: skip
        self._add(
            backward, *there,
            *self._window(numbers.moved, self.activations, -ahead, -1, scale),
            *self._window(numbers.fetched, self.parameters, -ahead, 0, scale),
            *self._window(numbers.leaving, self.parameters, 1, 1 + ahead, scale),
        )  # fmt: skip
        if np.isfinite(host_bytes):
            unit = max(host_bytes, 1.0)
            away = (numbers.on_device[:, :1] - numbers.on_device) / unit
            self._add(np.full(1, host_bytes / unit),
                      (self.activations[None], numbers.moved[None] / unit),
                      (self.parameters[None], away[None]))  # fmt: skip

    def _window(
        self, table: FloatArray, columns: LongArray, first: int, last: int, scale: float
    ) -> Iterator[Term]:
        """Terms of a table for the neighbours ``first`` to ``last`` blocks after each block."""
        for distance in range(first, last + 1):
            of = np.arange(self.count) + distance
            is_there = (of >= 0) & (of < self.count)
            of = np.clip(of, 0, self.count - 1)
            yield columns[of], table[of] * (scale * is_there)[:, None]

    # ── solving ──────────────────────────────────────────────────────────────────────────────────

    def solved(self, allowed: Allowed) -> ProgramShares | None:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        numbers, count = self.numbers, self.count
        values = np.concatenate(self._values)
        # Explicit zeros would only enlarge the solver's matrix.
        is_entry = values != 0
        places = (np.concatenate(self._rows)[is_entry],
                  np.concatenate(self._entry_columns)[is_entry])  # fmt: skip
        upper = coo_array((values[is_entry], places), (self._num_rows, self._columns)).tocsr()
        both = [*self.activations, *self.parameters]
        equal_rows = np.repeat(np.arange(2 * count), [len(group) for group in both])
        equal_columns = np.concatenate(both)
        equal = coo_array(
            (np.ones(len(equal_columns)), (equal_rows, equal_columns)), (2 * count, self._columns)
        ).tocsr()
        cost = np.zeros(self._columns)
        cost[self.step] = 1.0
        total = max(float(numbers.stay.sum()) + float(numbers.on_device.sum()), 1.0)
        compute_s = float(numbers.forward_s.sum() + numbers.backward_s.sum())
        cost[self.uneven] = _UNEVEN * compute_s
        scale = _TINY * compute_s / total
        cost[self.activations] += numbers.moved * scale
        cost[self.parameters] += (numbers.fetched + numbers.swapped_in + numbers.gradients) * scale
        bounds = np.zeros((self._columns, 2))
        bounds[:, 1] = np.inf
        # The last block saves its activations: its backward pass follows at once.
        bounds[self.activations[-1, 1:], 1] = 0.0
        bounds[self.activations[~allowed.activations], 1] = 0.0
        bounds[self.parameters[~allowed.parameters], 1] = 0.0
        found = linprog(
            cost, A_ub=upper, b_ub=np.concatenate(self._limits), A_eq=equal,
            b_eq=np.ones(2 * count), bounds=bounds,
            method="highs-ipm" if count > MANY_BLOCKS else "highs",
        )  # fmt: skip
        if found.x is None or found.status != 0:
            return None
        # Interior points may end slightly below zero.
        shares = np.clip(found.x, 0.0, None)
        return ProgramShares(
            shares[self.activations], shares[self.parameters], float(found.x[self.step])
        )
