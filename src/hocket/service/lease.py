"""Two lines that make a training loop part of a fleet.

    lease = hocket.lease(save=save)                      # save(step) -> path of a checkpoint
    for step in lease.steps(start, total): train(step)

Between two steps the loop notices that it has to end (SIGTERM, or an answer of the daemon); then it
saves, commits the checkpoint and leaves by SystemExit. A thread reports how far it is every few
seconds, as long as there is progress: a loop that is stuck falls silent. While the daemon is away
the training goes on, and reports and commits are tried again. Once another attempt has the job,
`StaleLeaseError` is raised and nothing counts. Outside a fleet the loop is a plain loop.

Light on purpose: it is imported by every training script.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from hocket.base.config import fleet_variables
from hocket.base.errors import RunError, UsageError
from hocket.service.lease_channel import AwayError, LeaseChannel, StaleLeaseError

__all__ = ["GO_ON", "LEAVE", "SAVE", "Lease", "StaleLeaseError", "lease"]

# A function that writes a checkpoint of a step and returns its path.
Save = Callable[[int], str | os.PathLike[str]]
# A function that gets the wish of this rank and returns the largest wish of all ranks.
Agree = Callable[[int], int]
_Handler = Callable[[int, FrameType | None], object] | int | None

GO_ON, SAVE, LEAVE = range(3)
"""Wish of a rank before a step; the largest over all ranks is executed."""

UNCOMMITTED = 75
"""Exit code if the last checkpoint could not be committed: a temporary failure in sysexits."""
# Retries while the daemon is away: the delay doubles from the first to the longest.
_FIRST_RETRY_S = 0.25
_LONGEST_RETRY_S = 10.0
# The last report, after the loop has ended: longest delay, number of tries, and total time.
_LAST_RETRY_S = 4.0
_LAST_TRIES = 10
_LAST_PATIENCE_S = 25.0
"""Time limit of the last report; each try takes seconds where the address does not respond."""


def lease(
    save: Save | None = None,
    *,
    save_every_s: float = 300.0,
    report_every_s: float = 5.0,
    agree: Agree | None = None,
) -> Lease:
    """The lease of the attempt that this process belongs to.

    ``save(step)`` writes a checkpoint of the first ``step`` steps, whole, and returns its path; it
    is called every ``save_every_s`` seconds, when the loop has to leave, and at its end.

    In a gang of processes rank 0 saves, reports and commits. Ranks that must leave at the same step
    give ``agree``, which is called before every step with `GO_ON`, `SAVE` or `LEAVE` and returns
    the largest that any rank said (one all-reduce); then all ranks call ``save``.
    """
    variables = fleet_variables()
    return Lease(
        LeaseChannel.from_variables(variables),
        save,
        checkpoint=variables.get("HOCKET_CHECKPOINT") or None,
        is_first_rank=variables.get("RANK", "0") == "0",
        save_every_s=save_every_s,
        report_every_s=report_every_s,
        agree=agree,
    )


class Lease:
    """The lease of an attempt: progress, checkpoints and the end of its loop; made by `lease`."""

    def __init__(
        self,
        channel: LeaseChannel | None,
        save: Save | None,
        *,
        checkpoint: str | None,
        is_first_rank: bool,
        save_every_s: float,
        report_every_s: float,
        agree: Agree | None,
    ) -> None:
        self.checkpoint = checkpoint
        """The last committed checkpoint, from which to resume; None at the first attempt."""
        self._channel = channel
        # Only the first rank saves, unless all ranks leave at the same step.
        self._save = save if is_first_rank or agree is not None else None
        self._speaks = is_first_rank
        self._save_every_s = save_every_s
        self._report_every_s = report_every_s
        self._agree = agree
        # Forked processes inherit the signal handler; they are recognised by another process id.
        self._owner = os.getpid()
        self._must_leave = False
        self._is_concluded = False
        self._refusal: RunError | None = None
        self._done_steps = 0
        self._saved_step = -1
        self._saved_s = time.monotonic()
        self._sending = threading.Lock()
        """Lock that serializes requests, so that none overtakes another."""
        self._is_over = threading.Event()
        self._uncommitted: tuple[int, str] | None = None
        self._handler_before: _Handler = None
        # True while SIGTERM is only recorded, that is, inside the loop.
        self._is_noticing = False

    def steps(self, start: int, total: int | None = None) -> Iterator[int]:
        """Yield the steps from ``start`` up to ``total`` (without end if None).

        The job is done after the last step: a training in several epochs has one such loop.
        """
        if self._is_concluded:
            raise UsageError(
                "the steps of this lease were all done before",
                hint="loop once over the steps of all epochs: the end of the loop ends the job",
            )
        counted = itertools.count(start) if total is None else iter(range(start, total))
        if self._channel is None:
            yield from counted
            self._is_concluded = True
            return
        self._done_steps = self._saved_step = start
        self._saved_s = time.monotonic()
        with self._noticing_signals(), self._reporting(self._channel):
            for step in counted:
                self._before(step)
                yield step
                self._done_steps = step + 1
            self._conclude(self._channel)

    def commit(self, step: int, path: str | os.PathLike[str]) -> bool:
        """Commit a checkpoint as the job's newest, from which the next attempt resumes.

        Returns True if it is committed, or there is no fleet. Returns False if the daemon is away:
        it is then committed later, unless a newer one is before. Raises `StaleLeaseError`.
        """
        if self._channel is None or not self._speaks:
            return True
        with self._sending:
            self._uncommitted = (step, os.path.abspath(path))
            return self._try_commit(self._channel)

    def _before(self, step: int) -> None:
        """Save or leave between two steps; does not return if the loop must end."""
        if self._refusal is not None:
            raise self._refusal
        wish = self._wish()
        if self._agree is not None:
            wish = self._agree(wish)
        if wish == GO_ON:
            return
        self._save_and_commit(step)
        if wish == LEAVE:
            self._leave()

    def _wish(self) -> int:
        if self._must_leave:
            return LEAVE
        is_due = time.monotonic() - self._saved_s >= self._save_every_s
        return SAVE if is_due and self._save is not None else GO_ON

    # A step that was saved already is not saved again, for example when the loop ends right after
    # it.
    def _save_and_commit(self, step: int) -> None:
        if self._save is None or step == self._saved_step:
            return
        path = self._save(step)
        self._saved_step = step
        self._saved_s = time.monotonic()
        self.commit(step, path)

    def _leave(self) -> NoReturn:
        assert self._channel is not None, "only a fleet asks to leave"
        sys.exit(0 if self._insist(self._channel, is_finished=False) else UNCOMMITTED)

    def _conclude(self, channel: LeaseChannel) -> None:
        """Save after the last step. A training that was asked to end exits with 0 like one
        that left, so it reports that it is finished; any other is judged by its exit code."""
        self._is_concluded = True
        self._save_and_commit(self._done_steps)
        self._insist(channel, is_finished=self._must_leave)

    def _insist(self, channel: LeaseChannel, *, is_finished: bool) -> bool:
        """Retry for about half a minute: after its grace the attempt is killed anyway."""
        if not self._speaks:
            return True
        self._is_over.set()
        patient_until_s = time.monotonic() + _LAST_PATIENCE_S
        for attempt in range(_LAST_TRIES):
            with contextlib.suppress(AwayError), self._sending:
                self._send(channel, is_finished=is_finished)
                return True
            if time.monotonic() > patient_until_s:
                break
            time.sleep(min(_FIRST_RETRY_S * 2**attempt, _LAST_RETRY_S))
        return False

    # ── talking to the daemon ──

    @contextlib.contextmanager
    def _reporting(self, channel: LeaseChannel) -> Iterator[None]:
        """Run a thread that sends reports while the context is open."""
        is_over = self._is_over = threading.Event()
        if self._speaks:
            threading.Thread(
                target=self._report, args=(channel, is_over), name="hocket-lease", daemon=True
            ).start()
        try:
            yield
        finally:
            is_over.set()

    def _report(self, channel: LeaseChannel, is_over: threading.Event) -> None:
        reported, retry_s = -1, _FIRST_RETRY_S
        while not is_over.is_set():
            done_steps = self._done_steps
            try:
                if done_steps != reported or self._uncommitted is not None:
                    with self._sending:
                        # Whoever waited here may find that the last word was spoken meanwhile.
                        if not is_over.is_set():
                            self._send(channel, is_finished=False)
                reported, retry_s, delay_s = done_steps, _FIRST_RETRY_S, self._report_every_s
            except AwayError:
                delay_s, retry_s = retry_s, min(2.0 * retry_s, _LONGEST_RETRY_S)
            except RunError as error:
                self._refusal = error
                return
            is_over.wait(delay_s)

    def _send(self, channel: LeaseChannel, *, is_finished: bool) -> None:
        """Commit what is not yet committed, then report; raises `AwayError`."""
        if not self._try_commit(channel):
            raise AwayError("the checkpoint is not committed")
        can_save = self._save is not None
        answer = channel.report(self._done_steps, is_finished=is_finished, can_save=can_save)
        if answer.get("may_run") is False:
            self._must_leave = True

    def _try_commit(self, channel: LeaseChannel) -> bool:
        if self._uncommitted is None:
            return True
        try:
            channel.commit(*self._uncommitted)
        except AwayError:
            return False
        except RunError as error:
            self._refusal = error
            raise
        self._uncommitted = None
        return True

    # ── signals ──

    @contextlib.contextmanager
    def _noticing_signals(self) -> Iterator[None]:
        """Record SIGTERM while the context is open; outside of it there is nothing to save."""
        if threading.current_thread() is not threading.main_thread():
            # Signals reach the main thread only; elsewhere the answers of the daemon must do.
            yield
            return
        self._handler_before = signal.signal(signal.SIGTERM, self._on_signal)
        self._is_noticing = True
        try:
            yield
        finally:
            self._is_noticing = False
            # A loop that was left early may be collected in another thread, which cannot do this.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._first_handler)

    @property
    def _first_handler(self) -> _Handler:
        # None stands for a handler that was not set from Python, and cannot be set again.
        return self._handler_before or signal.SIG_DFL

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_forked = os.getpid() != self._owner
        if is_forked or not self._is_noticing:
            # A process that was forked to load data, or a loop that is over: nobody would end it
            # if it only took note.
            signal.signal(number, signal.SIG_DFL if is_forked else self._first_handler)
            os.kill(os.getpid(), number)
            return
        self._must_leave = True
        if callable(self._handler_before):
            self._handler_before(number, frame)
