"""Specification of tables and of their layout over shards."""

from __future__ import annotations

import hashlib
import math
import numbers
from dataclasses import astuple, dataclass

from hocket.base.errors import UsageError, unknown_name
from hocket.tables.core.rule import ADD, REVISE, cell_width

MODES = ("ssp", "essp", "managed")
ORDERS = ("fifo", "random", "magnitude")
MAX_ROWS = 2**31 - 1
_CLIENT_ROW_BYTES = 23
"""Bytes in `core.shard.ShardState` per client and row."""
_PROTOCOL = 3
"""Version of the messages; a peer with another version is refused."""


@dataclass(frozen=True)
class TableSpec:
    """One table of ``num_rows`` rows of ``width`` 32-bit floats, initially zero.

    A worker at clock c reads all changes of clocks before c - ``staleness``, and all changes of its
    own process. ``math.inf`` is asynchronous. 0 is bulk synchronous: reads contain exactly the
    changes of earlier clocks, also for the worker's own changes. ``mode`` selects when rows and
    changes are sent:

    - ``ssp``: changes at each clock; rows when a worker requests them.
    - ``essp``: changes at each clock; a row that was read once is pushed at each advance of the
      clock.
    - ``managed``: rows and changes for which a clock waits go first, in both directions; a link
      with spare time also sends other changes early, in ``order``.
    """

    name: str
    num_rows: int
    width: int
    staleness: float = 1
    mode: str = "essp"
    order: str = "magnitude"
    is_adaptive: bool = False
    """True if changes are gradients, applied by adaptive revision (`hocket.tables.core.rule`)."""
    rate: float = 0.1
    """Step size of an adaptive table."""
    curvature: float = 1.0
    """Initial sum of squared gradients of every cell of an adaptive table."""

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        _check_kinds(self, where)
        if not 0 < self.num_rows <= MAX_ROWS or not 0 < self.width < 2**16:
            raise UsageError(
                f"a table of {self.num_rows} x {self.width} is not possible",
                hint=f"1 to {MAX_ROWS} rows of 1 to {2**16 - 1} numbers",
                where=where,
            )
        if math.isnan(self.staleness) or self.staleness < 0:
            raise UsageError(
                f"staleness {self.staleness!r} is not possible",
                hint="0 waits for everybody at each clock, math.inf for nobody",
                where=where,
            )
        if self.staleness != math.inf and self.staleness != int(self.staleness):
            raise UsageError(f"staleness {self.staleness!r} is no whole number", where=where)
        if not (0 < self.rate < math.inf and 0 < self.curvature < math.inf):
            raise UsageError(
                f"steps of rate {self.rate!r} and curvature {self.curvature!r} are not possible",
                hint="both are finite and above 0",
                where=where,
            )
        if self.mode not in MODES:
            raise unknown_name("mode", self.mode, MODES, where=where)
        if self.order not in ORDERS:
            raise unknown_name("order", self.order, ORDERS, where=where)
        if self.staleness == math.inf and self.mode == "ssp":
            raise UsageError(
                "an asynchronous table must push: a row in the cache would never be old",
                hint="use mode 'essp' or 'managed'",
                where=where,
            )

    @property
    def rule(self) -> int:
        """Number of the rule by which changes are applied to rows."""
        return REVISE if self.is_adaptive else ADD

    @property
    def pushes(self) -> bool:
        """True if shards push changed rows to clients that have read them before."""
        return self.mode != "ssp"

    @property
    def is_asynchronous(self) -> bool:
        """True if no worker waits for another."""
        return self.staleness == math.inf

    @property
    def is_synchronous(self) -> bool:
        """True if a step's changes become visible when all workers have ended the step."""
        return self.staleness == 0

    def need(self, clock: int) -> int:
        """Minimum clock of a row that a worker at ``clock`` may read."""
        return 0 if self.is_asynchronous else max(0, clock - int(self.staleness))


def _check_kinds(spec: TableSpec, where: str) -> None:
    for name, kind, what in (
        ("num_rows", numbers.Integral, "a whole number"),
        ("width", numbers.Integral, "a whole number"),
        ("staleness", numbers.Real, "a number"),
        ("rate", numbers.Real, "a number"),
        ("curvature", numbers.Real, "a number"),
    ):
        value = getattr(spec, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{name} is {what}, not {value!r}", where=where)


@dataclass(frozen=True)
class Layout:
    """The tables of a program, the shards that hold them and the clients that use them."""

    tables: tuple[TableSpec, ...]
    num_shards: int = 1
    num_clients: int = 1

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise UsageError(f"two tables have one name: {', '.join(sorted(names))}")
        if self.num_shards < 1 or self.num_clients < 1 or not names:
            raise UsageError("tables need at least one table, one shard and one client")

    @property
    def ticks_per_clock(self) -> int:
        """Number of protocol clocks per clock of a worker.

        There are two if a table is bulk-synchronous. At the first, all workers have ended their
        step, and only then do they send their changes; at the second, all changes have arrived.
        """
        return 2 if any(table.is_synchronous for table in self.tables) else 1

    @property
    def idle_s(self) -> float:
        """Maximum sleep of the thread in seconds; managed tables check the link more often."""
        return 0.005 if any(table.mode == "managed" for table in self.tables) else 0.05

    def digest(self, shard: int) -> int:
        """Number that identifies these tables and one of their shards."""
        # Numbers of different types that compare equal must give the same digest.
        tables = [
            [float(each) if isinstance(each, numbers.Real) else each for each in astuple(table)]
            for table in self.tables
        ]
        counts = int(self.num_shards), int(self.num_clients), int(shard)
        text = repr((_PROTOCOL, tables, counts))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def memory_bytes(self, shard: int) -> int:
        """Bytes of a shard: its rows, and the state of each row for each client."""
        return sum(
            self.rows_of(table, shard)
            * (4 * cell_width(table.rule, table.width) + 4 * table.width * table.is_adaptive
               + _CLIENT_ROW_BYTES * self.num_clients)
            for table in self.tables
        )  # fmt: skip

    def rows_of(self, table: TableSpec, shard: int) -> int:
        """Number of a table's rows on a shard; row r is row r // shards of shard r % shards."""
        return max(0, -(-(table.num_rows - shard) // self.num_shards))
