"""Plans that all ranks follow: the first rank makes each, the others read it from the store.

Planning is pure, but a plan that every rank makes for itself would be as many chances to disagree
(another version of a solver is enough) and as much work as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.base.errors import RunError
from hocket.base.jsonfile import dump_json, parse_json
from hocket.hardware.cluster import Cluster
from hocket.plan.problem import Problem
from hocket.plan.sections.communication import Collective, Communication
from hocket.planners.communication.collective import plan_collective

# How many chunks a message is cut into: what the model says, then what is measured to be faster.
#
# The first calls of a collective of one size try twice as many chunks, four times as many and so on
# while that is faster, else half as many and so on (the search of Blink, MLSys 2020, from the
# model's number instead of one chunk). The rank that comes last to a collective sees how long it
# takes, so the shortest time of all ranks counts, of two calls; the first rank chooses and the
# others read its choice at the store, so that all cut alike. Chunks change no bit: every byte is
# summed in the order of its tree.

Hear = Callable[[str], str]
"""Waits for a key of the store and returns its text."""
_TRIES = 2
_GAIN = 0.03
"""That a choice must bring."""
_LEAST, _MOST = 0.125, 8.0
_SMALLEST_BYTES = 1 << 17
"""Messages of less are a few chunks in any case."""


class ChunkTuning:
    """The factor on the model's number of chunks for one plan; all ranks call alike."""

    def __init__(self, store: Any, rank: int, num_ranks: int, key: str, num_bytes: int) -> None:
        self._store, self._rank, self._num_ranks, self._key = store, rank, num_ranks, key
        self.is_settled = num_bytes < _SMALLEST_BYTES
        self._factor, self._best, self._step = 1.0, 1.0, 2.0
        self._best_s: float | None = None
        self._times_s: list[float] = []
        self._num_choices = 0

    def took(self, spent_s: float) -> None:
        """A collective with the present factor has taken so long per byte on this rank."""
        if not self.is_settled:
            self._times_s.append(spent_s)
            if len(self._times_s) == _TRIES:
                self._store.set(self._place(f"took/{self._rank}"), str(min(self._times_s)))

    def factor(self, hear: Hear) -> float:
        """The factor of the next collective, which all ranks agree on."""
        if len(self._times_s) < _TRIES:
            return self._factor
        if self._rank == 0:
            ranks = range(self._num_ranks)
            self._choose(min(float(hear(self._place(f"took/{rank}"))) for rank in ranks))
            self._store.set(self._place("next"), f"{self._factor} {int(self.is_settled)}")
        else:
            factor, is_settled = hear(self._place("next")).split()
            self._factor, self.is_settled = float(factor), is_settled == "1"
        self._times_s, self._num_choices = [], self._num_choices + 1
        return self._factor

    def _place(self, what: str) -> str:
        return f"{self._key}/chunks/{self._num_choices}/{what}"

    def _choose(self, spent_s: float) -> None:
        """Go on while it is faster; turn back once at the model's own number; keep the best."""
        if self._best_s is None or spent_s < (1 - _GAIN) * self._best_s:
            self._best_s, self._best = spent_s, self._factor
        elif self._best == 1.0 and self._step > 1.0:
            self._step = 0.5
        else:
            self._factor, self.is_settled = self._best, True
            return
        self._factor = self._best * self._step
        if not _LEAST <= self._factor <= _MOST:
            self._factor, self.is_settled = self._best, True


def _described(what: str) -> str:
    collective, root, size = what.split()
    of_root = f" from rank {root}" if collective == "broadcast" else ""
    return f"{collective}{of_root} of less than {1 << int(size)} bytes"


class AgreedPlan:
    """A collective's trees, and the rate that they promise."""

    def __init__(self, section: Communication, cluster: Cluster, tuning: ChunkTuning) -> None:
        self.section, self.tuning = section, tuning
        self.rate_bps = float(section.rate_bps(cluster))


class AgreedPlans:
    """Plans by collective, root and size (to a power of two) on one cluster."""

    def __init__(self, store: Any, rank: int, cluster: Cluster, num_ranks: int, key: str) -> None:
        self.cluster = cluster
        self._store, self._rank, self._key = store, rank, f"{key}/plan"
        self._ranks = cluster.device_names[:num_ranks]
        self._known: dict[tuple[str, int, int], AgreedPlan] = {}

    def plan(self, collective: Collective, root: int, num_bytes: int) -> AgreedPlan:
        """The plan for a message; all ranks ask for the same ones in the same order."""
        size = max(num_bytes, 1).bit_length()
        place = (collective, root, size)
        if place not in self._known:
            self._known[place] = self._agree(collective, root, size)
        return self._known[place]

    def _agree(self, collective: Collective, root: int, size: int) -> AgreedPlan:
        key, what = f"{self._key}/{len(self._known)}", f"{collective} {root} {size}"
        if self._rank == 0:
            found = plan_collective(
                self.cluster, collective, self._ranks, root=self._ranks[root],
                size_bytes=3 << size >> 2,
            )  # fmt: skip
            self._store.set(f"{key}/for", what)
            self._store.set(key, dump_json(found.chosen.section.to_data()))
        data = parse_json(bytes(self._store.get(key)), "plan")
        if (other := self._store.get(f"{key}/for").decode()) != what:
            raise RunError(
                f"rank 0 is in {_described(other)}, this rank in {_described(what)}",
                hint="all ranks must call the same collectives with tensors of the same size",
            )
        problem = Problem(work=None, cluster=self.cluster)
        tuning = ChunkTuning(self._store, self._rank, len(self._ranks), key, 1 << size)
        return AgreedPlan(Communication.from_data(data, problem), self.cluster, tuning)
