"""What all ranks follow in one order: events at the store where they meet.

A *call* is answered by every rank that lives, also by one that computes; after a *mend* all begin
anew with their links. A rank that does not answer a call is announced as *lost*, so that every
surviving rank reports the same one.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch.distributed as dist

from hocket.base.errors import RunError

CALL_S = 2.5
"""After so long without progress all are called."""
ANSWER_S = 5.0
HEARD_S = 3.0
"""How long the rank that announces a loss waits for the others: it may hold the store."""
_POLL_S = 0.001


class NeedsMendError(Exception):
    """An event says that all begin anew; the text says why."""

    def __init__(self, why: str, suspect: tuple[int, int] | None = None) -> None:
        super().__init__(why)
        self.suspect = suspect
        """The ranks whose link it is about; None: any."""


def mend(why: str, suspect: tuple[int, int]) -> str:
    """The event that a link between two ranks fails."""
    return f"mend {min(suspect)} {max(suspect)}: {why}"


def _needed(what: str) -> NeedsMendError:
    head, _, why = what.partition(": ")
    ranks = [int(word) for word in head.split()[1:]]
    return NeedsMendError(why, (ranks[0], ranks[1]) if len(ranks) == 2 else None)


def explained(error: BaseException) -> BaseException:
    """An error as people can use it: those of the store say nothing of who holds it."""
    if not isinstance(error, dist.DistError):
        return error
    return RunError(
        "the store where ranks meet is gone: rank 0, which holds it unless the launcher does, has "
        "ended",
        hint=str(error).partition("\n")[0][:200],
    )


class Events:
    """One rank's place in the order of events."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self.rank, self.num_ranks = store, rank, num_ranks
        self._num_seen = 0

    def announce(self, what: str) -> None:
        """Add ``call`` or a `mend`, unless an event is there that we have not followed."""
        self.follow()
        # Of two ranks that announce at once the first wins, for all.
        self._store.compare_set(f"event/{self._num_seen}", "", what)
        self.follow()

    def follow(self) -> None:
        """Answer calls; raises `NeedsMendError` for a mend and `RunError` for a lost rank."""
        while self._store.check([f"event/{self._num_seen}"]):
            number, what = self._num_seen, self._store.get(f"event/{self._num_seen}")
            self._num_seen += 1
            if what.startswith(b"mend"):
                raise _needed(what.decode())
            self._store.set(f"event/{number}/here/{self.rank}", "1")
            if what.startswith(b"lost"):
                self._leave(number, what.decode())

    def _leave(self, number: int, what: str) -> None:
        """Raise for lost ranks, after the others have heard of them."""
        lost, _, why = what.removeprefix("lost ").partition(": ")
        others = {rank for rank in range(self.num_ranks) if str(rank) not in lost.split(", ")}
        until_s = time.monotonic() + HEARD_S
        keys = [f"event/{number}/here/{rank}" for rank in sorted(others)]
        # The holder of the store may have left by now, since this rank has already answered.
        with contextlib.suppress(dist.DistError):
            while not self._store.check(keys) and time.monotonic() < until_s:
                time.sleep(0.05)
        raise RunError(
            f"rank {lost} does not answer; {why}",
            hint="it was killed, stopped, or cannot reach the store; its own output says more",
        )

    def call(self, what: str) -> None:
        """Ask all to show that they live."""
        number = self._num_seen
        self.announce("call")
        self.answers(f"event/{number}/here", f"nothing moves in {what}")

    def hear(self, key: str) -> str:
        """What some rank says under a key of the store; while it does not, all are called."""
        since_s, call_s = time.monotonic(), CALL_S
        while not self._store.check([key]):
            self.follow()
            if time.monotonic() - since_s > call_s:
                self.call(f"the wait for {key}")
                call_s *= 2
            time.sleep(_POLL_S)
        return str(self._store.get(key).decode())

    def answers(self, key: str, why: str) -> list[bytes]:
        """What every rank has to say; raises for those that say nothing."""
        until_s = time.monotonic() + ANSWER_S
        keys = [f"{key}/{rank}" for rank in range(self.num_ranks)]
        while not self._store.check(keys):
            if time.monotonic() > until_s:
                silent = [str(r) for r, each in enumerate(keys) if not self._store.check([each])]
                # Another rank may have announced something first: it is followed before.
                while True:
                    self.announce(f"lost {', '.join(silent)}: {why}")
            time.sleep(0.05)
        return [self._store.get(each) for each in keys]
