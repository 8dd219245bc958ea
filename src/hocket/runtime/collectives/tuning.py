"""How many chunks a message is cut into: what the model says, then what is measured to be faster.

The first calls of a collective of one size try twice as many chunks, four times as many and so on
while that is faster, else half as many and so on (the search of Blink, MLSys 2020, from the model's
number instead of one chunk). The rank that comes last to a collective sees how long it takes, so
the shortest time of all ranks counts, of two calls; the first rank chooses and the others read its
choice at the store, so that all cut alike. Chunks change no bit: every byte is summed in the order
of its tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Hear = Callable[[str], str]
"""What is said under a key of the store, waited for."""
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
