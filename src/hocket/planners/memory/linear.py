"""The linear program over the blocks of a step: what to keep, move and make again.

Each block takes shares of the ways of its activations and of the homes of its parameters. Times are
variables too: the ends of passes and of copies in each direction, each no earlier than what it
waits for, so that transfers hide behind compute exactly as far as they can; updates on the host
have until the next forward pass needs them. For every pass there is a row that says what the device
holds then; the step's end is made small (joint offload, recompute and streaming as in OFFMATE,
2024, and POET, 2022, with overlap). Sparse, about 25 blocks columns, HiGHS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.planners.memory.numbers import HOMES, RESIDENT, VISITING, WAYS, BlockNumbers

_TINY = 1e-9
"""Seconds that a moved byte costs at least in the objective, so that nothing moves for nothing."""
_UNEVEN = 1e-4
"""Of the step's compute, what it costs at least that all of one block's state visits and none of
its neighbour's: of plans as good as each other, those are meant in which they take turns."""


class Turn(NamedTuple):
    """What the program may do."""

    homes: tuple[int, ...]
    """That parameters may have."""
    in_flight: float
    """The part of what is copied for neighbouring passes that a pass is to have room for: all of it
    where copies come early or late, nothing where each byte comes when another leaves."""
    ways: tuple[int, ...] = tuple(range(len(WAYS)))
    """That activations may take."""


@dataclass(frozen=True, eq=False)
class ProgramShares:
    """What the program chose."""

    ways: FloatArray
    """[block, way], each row adds up to 1."""
    homes: FloatArray
    """[block, home], each row adds up to 1."""
    step_s: float
    """What they would make of the step, if blocks could be shared out."""


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


def solve(
    numbers: BlockNumbers,
    budget_bytes: float,
    *,
    prefetch: int,
    tail_work: float,
    tail_s: float,
    host_bytes: float,
    turn: Turn,
) -> ProgramShares | None:
    """The best shares within a budget; None where no shares keep it.

    ``tail_work`` and ``tail_s`` are bytes and seconds of both passes of the last block, which is
    kept whole: they depend on the chunks of the loss. Room for state that comes to the device is
    kept where the ``turn`` lets it come.
    """
    program = _Program(numbers, prefetch)
    program.add_passes(tail_s)
    program.add_turns()
    room = budget_bytes - numbers.base_bytes - numbers.berths_bytes * (VISITING in turn.homes)
    program.add_memory(room, tail_work, host_bytes, turn.in_flight)
    return program.solved(turn)


class _Program:
    """Columns: shares, then times. Rows are collected as ``sum of coefficients <= limit``."""

    def __init__(self, numbers: BlockNumbers, prefetch: int) -> None:
        self.numbers, self.ahead = numbers, prefetch
        count = numbers.num_blocks
        self.count = count
        self._columns = 0
        self.way = self._new((count, len(WAYS)))
        self.home = self._new((count, len(HOMES)))
        names = ("forward", "backward", "out", "parameters", "fetch", "gradients")
        self.end = {name: self._new((count,)) for name in names}
        self.uneven = self._new((count,))
        self.step = int(self._new((1,))[0])
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[float] = []

    def _new(self, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        columns = np.arange(self._columns, self._columns + size).reshape(shape)
        self._columns += size
        return columns

    def _row(self, terms: list[tuple[int, float]], limit: float) -> None:
        """Add the row ``sum of terms <= limit``."""
        row = len(self._limits)
        self._entries += [(row, int(column), float(value)) for column, value in terms if value]
        self._limits.append(limit)

    def _after(self, later: int, earlier: int | None, takes: list[tuple[int, float]],
               fixed_s: float = 0.0) -> None:  # fmt: skip
        """A time is no earlier than another and what it takes from there."""
        terms = [(later, -1.0), *takes]
        if earlier is not None:
            terms.append((earlier, 1.0))
        self._row(terms, -fixed_s)

    def _share(self, table: FloatArray, columns: np.ndarray, block: int,
               scale: float = 1.0) -> list[tuple[int, float]]:  # fmt: skip
        """What a block takes of a table of ways or homes, by its shares."""
        return [
            (int(c), float(v) * scale) for c, v in zip(columns[block], table[block], strict=True)
        ]

    # ── times ────────────────────────────────────────────────────────────────────────────────────

    def add_passes(self, tail_s: float) -> None:
        """Forward and backward passes, copies and updates, each after what it waits for."""
        self._add_forward()
        last = self.count - 1
        end, numbers = self.end, self.numbers
        for block in range(last, -1, -1):
            own_s = tail_s if block == last else float(numbers.backward_s[block])
            takes = self._share(numbers.again_s, self.way, block)
            takes += self._share(numbers.update_s, self.home, block)
            before = end["backward"][block + 1] if block < last else end["forward"][last]
            self._after(end["backward"][block], before, takes, own_s)
            self._after(end["backward"][block], end["fetch"][block], takes, own_s)
            self._add_fetch(block)
            self._add_update(block)
        for name in ("backward", "fetch"):
            self._after(self.step, end[name][0], [])
        self._add_deadlines()

    def _add_forward(self) -> None:
        end, numbers, link = self.end, self.numbers, self.numbers.link
        for block in range(self.count):
            # Of the last block, seconds of both passes are counted in the backward pass.
            own_s = float(numbers.forward_s[block]) if block < self.count - 1 else 0.0
            fetch = self._share(numbers.brought, self.home, block, 1 / link.in_bps)
            moved = self._share(numbers.moved, self.way, block, 1 / link.out_bps)
            previous, held_back = block - 1, block - 1 - self.ahead
            self._after(end["forward"][block], end["parameters"][block], [], own_s)
            self._after(end["out"][block], end["forward"][block], moved)
            if previous >= 0:
                self._after(end["forward"][block], end["forward"][previous], [], own_s)
                self._after(end["parameters"][block], end["parameters"][previous], fetch)
                self._after(end["out"][block], end["out"][previous], moved)
            else:
                self._after(end["parameters"][block], None, fetch)
            if held_back >= 0:
                self._after(end["forward"][block], end["out"][held_back], [], own_s)
                self._after(end["parameters"][block], end["forward"][held_back], fetch)

    def _add_fetch(self, block: int) -> None:
        """What comes back for a backward pass, after what came before it and not too early."""
        numbers, end, last = self.numbers, self.end, self.count - 1
        rate = 1 / numbers.link.in_bps
        takes = self._share(numbers.moved, self.way, block, rate)
        takes += self._share(numbers.fetched, self.home, block, rate)
        # State comes beside the backward pass of its block, and is waited for after the next one.
        late = block + 1 + self.ahead
        if late <= last:
            takes += self._share(numbers.visiting, self.home, late, rate)
        if block == last:
            self._after(end["fetch"][block], end["parameters"][last], takes)
        else:
            self._after(end["fetch"][block], end["fetch"][block + 1], takes)
        self._after(end["fetch"][block], end["out"][block], takes)
        trigger = block + 1 + self.ahead
        told = end["backward"][trigger] if trigger <= last else end["forward"][max(block, 0)]
        self._after(end["fetch"][block], told, takes)

    def _add_update(self, block: int) -> None:
        numbers, end, last = self.numbers, self.end, self.count - 1
        out = self._share(numbers.gradients, self.home, block, 1 / numbers.link.out_bps)
        before = end["gradients"][block + 1] if block < last else end["out"][last]
        self._after(end["gradients"][block], before, out)
        self._after(end["gradients"][block], end["backward"][block], out)
        rate = 1 / numbers.link.in_bps
        # Behind all that is fetched for passes come those of the first blocks. Pieces go while
        # others come: when all have come, the last one is left.
        behind = [term for each in range(block, min(self.ahead, last) + 1)
                  for term in self._share(numbers.visiting, self.home, each, rate)]  # fmt: skip
        behind += self._share(numbers.last_piece, self.home, block, 1 / numbers.link.out_bps)
        self._after(end["gradients"][block], end["fetch"][max(0, block - 1 - self.ahead)], behind)
        held_back = block - 1 - self.ahead
        if held_back >= 0:
            own_s = float(numbers.backward_s[held_back])
            takes = self._share(numbers.again_s, self.way, held_back)
            self._after(end["backward"][held_back], end["gradients"][block], takes, own_s)

    def _add_deadlines(self) -> None:
        """Updates on the host go on beside the next forward pass, those of the first blocks first:
        what is left of a block and of those before it, when its gradients have come, is done when
        the next forward pass comes to it."""
        numbers, end = self.numbers, self.end
        traffic_s = numbers.host_traffic / numbers.host_update_bps
        left: list[tuple[int, float]] = []
        later_s = 0.0
        for block in range(self.count):
            left += self._share(traffic_s, self.home, block)
            back = self._share(numbers.brought, self.home, block, 1 / numbers.link.in_bps)
            self._after(self.step, end["gradients"][block], [*left, *back], -later_s)
            later_s += float(numbers.forward_s[block])
        self._after(self.step, None, left)

    def add_turns(self) -> None:
        """How much more of a block's state visits than of an equal neighbour's."""
        whole = self.numbers.home[:, RESIDENT]
        for block in np.flatnonzero(whole[1:] == whole[:-1]).tolist():
            here, next_one = self.home[block : block + 2, VISITING].tolist()
            for more, less in ((here, next_one), (next_one, here)):
                self._row([(more, 1.0), (less, -1.0), (int(self.uneven[block]), -1.0)], 0.0)

    # ── bytes ────────────────────────────────────────────────────────────────────────────────────

    def add_memory(
        self, room: float, tail_work: float, host_bytes: float, in_flight: float
    ) -> None:
        """One row per pass, and one for the host; sizes in units that keep HiGHS exact."""
        numbers, unit = self.numbers, max(room, 1.0)
        at_home = [
            term
            for block in range(self.count)
            for term in self._share(numbers.home, self.home, block, 1 / unit)
        ]
        left: list[tuple[int, float]] = []
        for block in range(self.count):
            is_last = block == self.count - 1
            forward = tail_work if is_last else float(numbers.forward_work[block])
            backward = tail_work if is_last else float(numbers.backward_work[block])
            coming = self._window(numbers.room, self.home, block, block + self.ahead, unit)
            leaving = self._window(numbers.moved, self.way, block - 1 - self.ahead, block - 1, unit)
            copied = [(column, value * in_flight) for column, value in (*coming, *leaving)]
            self._row([*at_home, *left, *copied], (room - forward) / unit)
            early = self._window(numbers.moved, self.way, block - self.ahead, block - 1, unit)
            early += self._window(numbers.room, self.home, block - self.ahead, block, unit)
            early += self._window(
                numbers.leaving, self.home, block + 1, block + 1 + self.ahead, unit
            )
            copied = [(column, value * in_flight) for column, value in early]
            self._row([*at_home, *left, *copied], (room - backward) / unit)
            left += self._share(numbers.stay, self.way, block, 1 / unit)
        self._add_host(host_bytes)

    def _add_host(self, host_bytes: float) -> None:
        if not np.isfinite(host_bytes):
            return
        numbers = self.numbers
        resident = numbers.home[:, :1]
        terms = [
            term
            for block in range(self.count)
            for term in (
                *self._share(numbers.moved, self.way, block),
                *self._share(resident - numbers.home, self.home, block),
            )
        ]
        unit = max(host_bytes, 1.0)
        self._row([(column, value / unit) for column, value in terms], host_bytes / unit)

    def _window(
        self, table: FloatArray, columns: np.ndarray, first: int, last: int, unit: float
    ) -> list[tuple[int, float]]:
        blocks = range(max(first, 0), min(last, self.count - 1) + 1)
        return [term for block in blocks for term in self._share(table, columns, block, 1 / unit)]

    # ── solving ──────────────────────────────────────────────────────────────────────────────────

    def solved(self, turn: Turn) -> ProgramShares | None:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        numbers, count = self.numbers, self.count
        rows, places, values = zip(*self._entries, strict=True)
        shape = (len(self._limits), self._columns)
        upper = coo_array((values, (rows, places)), shape).tocsr()
        both = [*self.way, *self.home]
        equal_rows = np.repeat(np.arange(2 * count), [len(group) for group in both])
        equal_columns = np.concatenate(both)
        equal = coo_array(
            (np.ones(len(equal_columns)), (equal_rows, equal_columns)), (2 * count, self._columns)
        ).tocsr()
        cost = np.zeros(self._columns)
        cost[self.step] = 1.0
        total = max(float(numbers.stay.sum()) + float(numbers.home.sum()), 1.0)
        compute_s = float(numbers.forward_s.sum() + numbers.backward_s.sum())
        cost[self.uneven] = _UNEVEN * compute_s
        scale = _TINY * compute_s / total
        cost[self.way] += numbers.moved * scale
        cost[self.home] += (numbers.fetched + numbers.visiting + numbers.gradients) * scale
        bounds = np.zeros((self._columns, 2))
        bounds[:, 1] = np.inf
        # The last block is kept: what it makes is needed at once.
        bounds[self.way[-1, 1:], 1] = 0.0
        for columns, allowed in ((self.way, turn.ways), (self.home, turn.homes)):
            for choice in set(range(columns.shape[1])).difference(allowed):
                bounds[columns[:, choice], 1] = 0.0
        found = linprog(
            cost, A_ub=upper, b_ub=np.array(self._limits), A_eq=equal, b_eq=np.ones(2 * count),
            bounds=bounds, method="highs",
        )  # fmt: skip
        if found.x is None or found.status != 0:
            return None
        shares = np.clip(found.x, 0.0, None)
        return ProgramShares(shares[self.way], shares[self.home], float(found.x[self.step]))
