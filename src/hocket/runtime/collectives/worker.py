"""The thread of a rank that carries out collectives, one after the other, and mends their links.

When an event says so (`events`) all ranks close their connections, make new ones, measure the one
that is suspected (all, where that does not tell enough), plan anew and do again what was under way.

A collective may be done on some ranks and not on others when a link fails; never are two. Those
that have it keep the result until the next one begins and give it to those that lack it (of a
reduce-scatter they keep what they put in): nothing is lost and no sum is made in another order than
it would have been, except by the new trees from then on.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch.distributed as dist

from hocket.base.errors import RunError
from hocket.hardware.cluster import Cluster
from hocket.hardware.probed import after_failure, cluster_of
from hocket.plan.sections.communication import Collective
from hocket.runtime.collectives.carry import Carry, CarryState, Connections
from hocket.runtime.collectives.events import (
    ANSWER_S,
    CALL_S,
    Events,
    NeedsMendError,
    explained,
    mend,
)
from hocket.runtime.collectives.layout import layout_of
from hocket.runtime.collectives.plans import AgreedPlan, AgreedPlans
from hocket.runtime.collectives.probe import probe, probe_pair
from hocket.runtime.collectives.wires import AHEAD_S, close_all, connect_all, is_cut, reader_s

_SLICE_S = 0.1
_CUT_S = 0.5
"""So long must a connection be without an answer to count as cut."""
_FIRST_S = 60.0
"""Ranks that start late are waited for."""
_AGAIN_S = 0.4
"""All are there when links are made anew: who cannot be reached by then has no link."""
_JUDGE_S = 0.25
"""Time under load after which a link is judged."""
_TOO_SLOW = 0.45
_LATE = 2
"""Judgements in a row before a link counts as slow."""


@dataclass(eq=False)
class CollectiveJob:
    """A collective to be carried out."""

    collective: Collective
    root: int
    take: Callable[[], np.ndarray[Any, Any]]
    """A flat array of this rank's part, for us to change; called again where all is done again."""
    give: Callable[[np.ndarray[Any, Any]], None]
    fail: Callable[[BaseException], None]
    data: np.ndarray[Any, Any] = field(init=False)
    kept: np.ndarray[Any, Any] | None = None
    """What this rank put into a reduce-scatter."""

    def refreshed(self) -> np.ndarray[Any, Any]:
        """The input, as it was."""
        if self.collective != "reducescatter":
            return self.take()
        if self.kept is None:
            self.kept = self.take()
        return self.kept.copy()


class CollectiveWorker:
    """Carries out jobs in the order in which they are handed in."""

    def __init__(
        self, store: Any, rank: int, num_ranks: int, cluster: Callable[[], Cluster | None],
        patience_s: float = inf,
    ) -> None:  # fmt: skip
        """``cluster`` gives what is known of the links; where that is None they are measured.

        After ``patience_s`` in which nothing moves a collective fails, though all ranks live.
        """
        self._patience_s = patience_s
        self.rank, self.num_ranks, self._store = rank, num_ranks, store
        self._given = cluster
        self._jobs: queue.SimpleQueue[CollectiveJob | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._epoch, self._num_done = 0, 0
        self._events = Events(store, rank, num_ranks)
        self._sockets: list[Any] = []
        self._connections: Connections | None = None
        self._plans: AgreedPlans | None = None
        self._last: CollectiveJob | None = None
        self._slow = _SlowLinks()
        self._is_closing, self._is_busy = False, False
        self._thread = threading.Thread(target=self._run, name="hocket collectives", daemon=True)
        self._thread.start()
        # A thread inside the store's C++ does not survive the end of the interpreter.
        atexit.register(self.close)

    @property
    def cluster(self) -> Cluster | None:
        """The links that are planned for at present."""
        return self._plans.cluster if self._plans is not None else None

    @property
    def num_mended(self) -> int:
        """How often links were measured and plans made anew."""
        return self._epoch

    def put(self, job: CollectiveJob) -> None:
        """Hand in a job; every rank hands in the same ones in the same order."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is handed in, or give it up where others do not take part any more."""
        atexit.unregister(self.close)
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=ANSWER_S)
            self._is_closing = True
            self._thread.join(timeout=ANSWER_S)

    # ── the thread ──

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._do(job)
        except BaseException as error:
            self._error = explained(error)
        finally:
            # Others may still be reading what this rank has sent.
            close_all(self._sockets, at_once=self._is_busy)
        while self._error is not None and (left := self._jobs.get()) is not None:
            left.fail(self._error)

    def _next(self) -> CollectiveJob | None:
        """The next job; while there is none, events are looked after."""
        while True:
            try:
                return self._jobs.get(timeout=_SLICE_S * 2)
            except queue.Empty:
                if self._plans is None:
                    continue
                try:
                    self._events.follow()
                except NeedsMendError as reason:
                    made = self._mend(None, reason)
                    if made is not None:
                        self._hand_out(made)

    def _do(self, job: CollectiveJob) -> None:
        self._is_busy = True
        try:
            if self._plans is None:
                self._open(_FIRST_S)
            number = self._num_done
            while self._num_done == number:
                try:
                    self._carry(job, job.collective, job.root, number)
                    self._num_done += 1
                except NeedsMendError as reason:
                    self._mend(job, reason)
            self._hand_out(job)
            self._is_busy = False
        except BaseException as error:
            job.fail(explained(error))
            raise

    def _hand_out(self, job: CollectiveJob) -> None:
        self._last = job
        job.give(job.data)

    def _carry(self, job: CollectiveJob, collective: Collective, root: int, number: int) -> None:
        assert self._plans is not None
        assert self._connections is not None
        if collective == job.collective:
            job.data = job.refreshed()
        plan = self._plans.plan(collective, root, job.data.nbytes)
        layout = layout_of(
            plan.section, self.rank, job.data.size, job.data.itemsize, plan.rate_bps,
            plan.tuning.factor(self._events.hear),
        )  # fmt: skip
        carry = Carry(layout, self._connections, job.data, sequence=number)
        what = f"{collective} {number}"
        began_s = time.monotonic()
        moved, since_s, call_s = -1, began_s, CALL_S
        while (state := carry.go_on(_SLICE_S)) != CarryState.DONE:
            if state == CarryState.GARBLED:
                raise RunError(
                    f"rank {int(carry.who[0])} does something else than this rank, which is in "
                    f"{what} of {job.data.nbytes} bytes",
                    hint="all ranks must call the same collectives with tensors of the same size",
                )
            if state == CarryState.CLOSED:
                other = int(carry.who[0])
                why = f"rank {other} broke its connection off in {what}"
                self._events.announce(mend(why, (self.rank, other)))
            if self._is_closing:
                raise RunError(f"the group was closed in {what}")
            self._judge(plan)
            has_moved = carry.num_moved != moved
            self._follow(is_needed=not has_moved)
            if has_moved:
                moved, since_s, call_s = carry.num_moved, time.monotonic(), CALL_S
            elif (far := self._cut_off()) is not None:
                self._events.announce(mend(f"a link was cut in {what}", (self.rank, far)))
            elif time.monotonic() - since_s > self._patience_s:
                raise RunError(f"nothing has moved in {what} for {self._patience_s:.0f} s")
            elif time.monotonic() - since_s > call_s:
                self._events.call(what)
                call_s *= 2
        with contextlib.suppress(dist.DistError):
            plan.tuning.took((time.monotonic() - began_s) / max(job.data.nbytes, 1))
            self._judge(plan)

    def _follow(self, *, is_needed: bool) -> None:
        """Follow events; the rank that holds the store may be done, and leave, before this one."""
        try:
            self._events.follow()
        except dist.DistError:
            if is_needed:
                raise

    # ── links ──

    def _open(self, patience_s: float) -> None:
        """Measure the links where they are not known, plan for them, connect."""
        key = f"epoch/{self._epoch}"
        cluster = self._given() if self._epoch == 0 else None
        cut: list[int] = []
        if cluster is None:
            rates = probe(self._store, self.rank, self.num_ranks, key, patience_s=patience_s)
            cluster, cut = cluster_of(rates), rates.cut_from(self.rank)
        self._plans = AgreedPlans(self._store, self.rank, cluster, self.num_ranks, key)
        self._connect(cluster, f"{key}/wires", patience_s, without=cut)

    def _open_around(self, reason: NeedsMendError) -> bool:
        """Connect, look at the link that is suspected alone, plan; whether that told enough."""
        assert self._plans is not None
        if (pair := reason.suspect) is None:
            return False
        known, key = self._plans.cluster, f"epoch/{self._epoch}"
        self._connect(known, f"{key}/around", _AGAIN_S)
        missing = [n for n, each in enumerate(self._sockets) if each is None and n != self.rank]
        got_bps = 0.0
        if self.rank in pair and not set(missing).intersection(pair):
            end = pair.index(self.rank)
            got_bps = probe_pair(self._store, end, f"{key}/pair", patience_s=_AGAIN_S)
        self._store.set(f"{key}/links/{self.rank}", json.dumps([missing, got_bps]))
        told = [json.loads(text) for text in self._events.answers(f"{key}/links", str(reason))]
        cut = {(a, b) for a, (others, _) in enumerate(told) for b in others}
        between_bps = np.zeros((self.num_ranks, self.num_ranks))
        between_bps[pair], between_bps[pair[::-1]] = told[pair[1]][1], told[pair[0]][1]
        cluster = after_failure(known, cut, pair, between_bps)
        if cluster is None:
            self._disconnect()
            return False
        self._plans = AgreedPlans(self._store, self.rank, cluster, self.num_ranks, key)
        return True

    def _connect(
        self, cluster: Cluster, key: str, patience_s: float, without: Sequence[int] = ()
    ) -> None:
        self._sockets = connect_all(
            self._store, self.rank, self.num_ranks, key, patience_s=patience_s, without=without,
            ahead_bytes=AHEAD_S * max(link.bandwidth_bps for link in cluster.links),
        )  # fmt: skip
        descriptors = [-1 if each is None else each.fileno() for each in self._sockets]
        self._connections = Connections(descriptors)

    def _disconnect(self) -> None:
        close_all(self._sockets)
        if self._connections is not None:
            self._connections.close()
        self._sockets, self._connections = [], None

    def _mend(self, current: CollectiveJob | None, reason: NeedsMendError) -> CollectiveJob | None:
        """All ranks begin anew; those that have the collective under way give it to the others.

        The job that is done by that, where this rank lacked it.
        """
        while True:
            try:
                done = self._reopen(reason)
                if min(done) == max(done):
                    return None
                if self._num_done == max(done):
                    self._share(done)
                    return None
                current = current or self._jobs.get()
                if current is None:
                    raise RunError("the group was closed before a collective that others did")
                self._receive(done, current)
                return current
            except NeedsMendError as another:
                reason = another

    def _reopen(self, reason: NeedsMendError) -> list[int]:
        """New links and plans; how many collectives each rank has done."""
        self._disconnect()
        self._epoch += 1
        before = self._plans.cluster.content_hash if self._plans is not None else ""
        self._store.set(f"epoch/{self._epoch}/done/{self.rank}", str(self._num_done))
        key = f"epoch/{self._epoch}/done"
        done = [int(text) for text in self._events.answers(key, str(reason))]
        if not self._open_around(reason):
            self._open(_AGAIN_S)
        assert self._plans is not None
        self._slow.begin_anew(has_changed=self._plans.cluster.content_hash != before)
        return done

    def _share(self, done: list[int]) -> None:
        """Give what this rank has finished to those that lag."""
        job, number = self._last, self._num_done - 1
        assert job is not None, "it has finished one more than others"
        if job.collective == "reducescatter":
            result = job.data
            self._carry(job, job.collective, job.root, number)
            job.data = result
        else:
            self._carry(_Sharing(job), "broadcast", done.index(max(done)), number)

    def _receive(self, done: list[int], job: CollectiveJob) -> None:
        """Get what others have finished."""
        if job.collective == "reducescatter":
            self._carry(job, job.collective, job.root, self._num_done)
        else:
            job.data = job.refreshed()
            self._carry(_Sharing(job), "broadcast", done.index(max(done)), self._num_done)
        self._num_done += 1

    def _cut_off(self) -> int | None:
        """A rank to which nothing gets through any more."""
        for other, each in enumerate(self._sockets):
            if each is not None and is_cut(each.fileno(), _CUT_S):
                return other
        return None

    def _judge(self, plan: AgreedPlan) -> None:
        assert self._connections is not None
        if (other := self._slow.judge(self._connections, plan, self.rank)) is not None:
            why = "a link is much slower than the plan takes it to be"
            self._events.announce(mend(why, (self.rank, other)))


class _Sharing(CollectiveJob):
    """A job whose result is handed on as it is."""

    def __init__(self, job: CollectiveJob) -> None:
        super().__init__("broadcast", 0, lambda: job.data, job.give, job.fail)
        self.data = job.data


class _SlowLinks:
    """Judges links by what they let through while something waits to be sent."""

    def __init__(self) -> None:
        self._patience = 1
        self.begin_anew(has_changed=True)

    def begin_anew(self, *, has_changed: bool) -> None:
        """After links were measured; where they are as before, it was something else: be slower."""
        self._patience = 1 if has_changed else min(4 * self._patience, 10**6)
        self._late: dict[int, int] = {}
        self._seen: dict[int, tuple[float, int]] = {}

    def judge(self, connections: Connections, plan: AgreedPlan, rank: int) -> int | None:
        """The rank to which a link was much slower than the plan takes it to be, several times."""
        expected_bps = plan.expected_bps(rank)
        for peer, rate_bps in enumerate(expected_bps.tolist()):
            if rate_bps == 0 or connections.fd[peer] < 0:
                continue
            sent = int(connections.bytes_out[peer])
            # A reader that does not read closes its window; that is not the link's fault.
            busy_s = float(connections.busy_s[peer]) - reader_s(int(connections.fd[peer]))
            before_s, before = self._seen.setdefault(peer, (busy_s, sent))
            if busy_s - before_s < _JUDGE_S:
                continue
            is_late = sent - before < _TOO_SLOW * rate_bps * (busy_s - before_s)
            self._late[peer] = self._late.get(peer, 0) + 1 if is_late else 0
            self._seen[peer] = (busy_s, sent)
        latest = max(self._late, key=self._late.__getitem__, default=None)
        if latest is None or self._late[latest] < _LATE * self._patience:
            return None
        return latest
