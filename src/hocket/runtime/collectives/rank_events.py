"""Events that all ranks process in one order, announced at the store where they rendezvous.

A *call* is a liveness check that every live rank must answer, even while it computes. A *failure*
names the ranks that do not answer, or a broken link. Events are numbered, and `compare_set` of the
store accepts only the first event of a number, so all surviving ranks raise the same error.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch.distributed as dist

from hocket.base.errors import RunError

CALL_S = 2.5
"""Seconds without progress after which all ranks are called."""
ANSWER_S = 5.0
"""Seconds within which every rank must answer a call."""
HEARD_S = 3.0
"""Seconds that a rank waits for others to read a failure, because it may host the store."""


def explained(error: BaseException) -> BaseException:
    """Translate an error of the store into one that names the rank that hosts the store."""
    if not isinstance(error, dist.DistError):
        return error
    return RunError(
        "the store where ranks meet is gone: rank 0, which holds it unless the launcher does, has "
        "ended",
        hint=str(error).partition("\n")[0][:200],
    )


class RankEvents:
    """One rank's position in the order of events."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self.rank, self.num_ranks = store, rank, num_ranks
        self._num_seen = 0

    def follow(self) -> None:
        """Answer calls; raises `RunError` for a failure."""
        while self._store.check([f"event/{self._num_seen}"]):
            number, event = self._num_seen, self._store.get(f"event/{self._num_seen}").decode()
            self._num_seen += 1
            self._store.set(f"event/{number}/here/{self.rank}", "1")
            if event != "call":
                self._leave(number, event)

    def fail(self, why: str, silent: tuple[int, ...] = ()) -> None:
        """Announce a failure, unless there is an event that this rank has not processed."""
        self.follow()
        ranks = " ".join(map(str, silent))
        self._store.compare_set(f"event/{self._num_seen}", "", f"failed {ranks}: {why}")
        self.follow()

    def call(self, why: str) -> None:
        """Require every rank to show that it is alive; raises if some do not."""
        self.follow()
        number = self._num_seen
        # If two ranks announce at the same time, the store accepts the first one for all ranks.
        self._store.compare_set(f"event/{number}", "", "call")
        self.follow()
        until_s = time.monotonic() + ANSWER_S
        keys = [f"event/{number}/here/{rank}" for rank in range(self.num_ranks)]
        while not self._store.check(keys):
            # Another rank may call at the same time, and needs this rank's answer.
            self.follow()
            if time.monotonic() > until_s:
                silent = tuple(r for r, key in enumerate(keys) if not self._store.check([key]))
                self.fail(why, silent)
            time.sleep(0.05)

    def _leave(self, number: int, event: str) -> None:
        """Raise a failure, once the other ranks have seen it."""
        silent, _, why = event.removeprefix("failed ").partition(": ")
        others = [rank for rank in range(self.num_ranks) if str(rank) not in silent.split()]
        until_s = time.monotonic() + HEARD_S
        # This rank has answered, so the rank that hosts the store may have ended already.
        with contextlib.suppress(dist.DistError):
            keys = [f"event/{number}/here/{rank}" for rank in others]
            while not self._store.check(keys) and time.monotonic() < until_s:
                time.sleep(0.05)
        if not silent:
            raise RunError(why, hint="the network between these ranks may have failed")
        raise RunError(
            f"rank {', '.join(silent.split())} does not answer; {why}",
            hint="it was killed, stopped, or cannot reach the store; its own output says more",
        )
