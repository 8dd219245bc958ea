"""The front end: sends an input to all workers and combines their answers into one.

It waits for all living workers, so that the same input gets the same label and accuracy is that of
the report. It does not wait for dead workers. When the other workers suffice for an answer (with
one copy less per class), it waits for a late worker for at most `ServeOptions.patience_s`. Later
replies are dropped. Only one request is in progress at a time, because it occupies every worker.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import RunError
from hocket.base.units import format_seconds
from hocket.classes.artefact import Folder
from hocket.classes.combine import Combiner, probabilities
from hocket.classes.latency_forecast import places_on
from hocket.classes.serving.link import WorkerLink, WorkerSpec, recent_times
from hocket.classes.serving.metrics import Metrics, metrics_of
from hocket.classes.serving.wire import SLOTS, InputLayout, set_finished
from hocket.classes.table import PartTable

# Two threads of one physical core slow each other down by a third and more, so workers get separate
# physical cores while there are any. With few cores, the longest parts go to the least loaded
# cores. O(parts log cores).

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cores_for(part_s: Sequence[float], given: Sequence[int] | None) -> list[int | None]:
    """Core of each part, from the given cores or else those of this process."""
    count = len(part_s)
    cores = apart(os.sched_getaffinity(0)) if given is None else list(given)
    # The first core is left to the front end if there are enough cores.
    mine = cores[1:] if given is None and len(cores) > count else cores
    if not mine:
        return [None] * count
    return [mine[place] for place in places_on(part_s, len(mine))]


def siblings_of(core: int) -> tuple[int, ...]:
    """Hardware threads of a physical core; the given one alone if the system does not list them."""
    try:
        listed = Path(_SIBLINGS.format(core)).read_text()
        spans = [list(map(int, span.split("-"))) for span in listed.strip().split(",")]
    except (OSError, ValueError):
        return (core,)
    return tuple(each for span in spans for each in range(span[0], span[-1] + 1))


def apart(
    cores: Collection[int], siblings: Callable[[int], tuple[int, ...]] = siblings_of
) -> list[int]:
    """Order cores so that those of different physical cores come first."""

    def rank(core: int) -> tuple[int, int]:
        # First threads of all physical cores, then second ones.
        return sum(each < core and each in cores for each in siblings(core)), core

    return sorted(cores, key=rank)


_WATCH_S = 0.05
START_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of serving."""

    deadline_s: float = 1.0
    """Seconds after which an answer is made from the replies received so far."""
    cores: tuple[int, ...] | None = None
    """Cores that workers are pinned to; None for those of this process."""
    spin_s: float = 0.0
    """Seconds for which an idle worker polls, keeping its core busy, before it sleeps."""
    restarts: bool = True
    quorum: int | None = None
    """Answers per class to wait for; None for all copies."""
    patience_s: float = 0.05
    """Seconds to wait for a late worker when the others suffice to answer."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Combined answer of the parts to one input."""

    scores: FloatArray
    label: int
    missing: tuple[int, ...]
    """Classes for which no part has answered."""
    came: int
    """Number of parts that answered in time."""
    senseless: int
    """Number of parts whose scores were not finite and were ignored."""
    took_s: float

    @property
    def probabilities(self) -> FloatArray:
        """Probabilities of all classes."""
        return probabilities(self.scores)


@dataclass(frozen=True)
class WorkerReply:
    """Times of a worker's reply."""

    spent_ns: int
    """Time spent computing."""
    after_ns: int
    """Time from the request to the reply."""


def answer_from(
    combiner: Combiner, answers: Sequence[FloatArray | None], senseless: int, start_ns: int
) -> Answer:
    """Combine the replies of parts to a request that began at ``start_ns``."""
    scores = combiner.scores(answers)
    return Answer(
        scores,
        int(scores.argmax()) if np.isfinite(scores).any() else -1,
        tuple(np.flatnonzero(~np.isfinite(scores)).tolist()),
        sum(answer is not None for answer in answers),
        senseless,
        (time.perf_counter_ns() - start_ns) * 1e-9,
    )


def is_enough(
    table: PartTable, quorum: int, answers: Sequence[FloatArray | None], asked: Collection[int]
) -> bool:
    """True if every group has ``quorum`` answers, or all that ``asked`` parts can still send."""
    has, may = [0] * len(table.groups), [0] * len(table.groups)
    for index, groups in enumerate(table.held):
        came = answers[index] is not None
        for group in groups:
            has[group] += came
            may[group] += came or index in asked
    return all(have >= min(quorum, could) for have, could in zip(has, may, strict=True))


class FrontEnd:
    """Starts and queries the workers of all parts of a folder; use it in a ``with`` statement."""

    def __init__(self, folder: Folder, options: ServeOptions | None = None) -> None:
        self.options = options or ServeOptions()
        self._table = folder.table
        self._combiner = folder.table.combiner()
        self._layout = InputLayout(folder.table.input_shape, folder.table.input_dtype)
        self._quorum = self.options.quorum or folder.table.redundancy
        self._least = min(self._quorum, folder.table.quorum)
        # Anonymous memory: no file is left behind if this process is killed.
        self._descriptor = os.memfd_create("inputs")
        os.ftruncate(self._descriptor, self._layout.total_bytes)
        self._memory = mmap.mmap(self._descriptor, self._layout.total_bytes)
        self._slots = self._layout.slots(self._memory)
        self._number = 0
        self._counted_from = 1
        """First request whose late answers are counted; earlier requests are dry runs."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._events = select.epoll()
        self._times_ns = recent_times()
        part_s = [part.latency_s for part in folder.table.parts]
        cores = cores_for(part_s, self.options.cores)
        self._links = [
            WorkerLink(WorkerSpec(index, model, 1 + len(part.classes), self._layout,
                                  self._descriptor, core, self.options.spin_s), self._forget)
            for index, (model, part, core) in enumerate(
                zip(folder.models, folder.table.parts, cores, strict=True)
            )
        ]  # fmt: skip
        self._by_descriptor: dict[int, WorkerLink] = {}
        self._watcher: threading.Thread | None = None

    # ── life ──

    def __enter__(self) -> FrontEnd:
        try:
            for link in self._links:
                link.start()
                self._listen_to(link)
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="hocket-classes", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        with self._lock:
            for link in self._links:
                link.end()
            if not self._events.closed:
                self._events.close()
                os.close(self._descriptor)

    def _listen_to(self, link: WorkerLink) -> None:
        if link.channel is not None and link.channel.fileno() not in self._by_descriptor:
            self._by_descriptor[link.channel.fileno()] = link
            self._events.register(link.channel.fileno(), select.EPOLLIN)

    def _forget(self, descriptor: int) -> None:
        """Unregister a socket before it is closed.

        A forked process may keep the socket open, so that epoll would still report it.
        """
        if self._by_descriptor.pop(descriptor, None) is not None and not self._events.closed:
            self._events.unregister(descriptor)

    def _wait_until_ready(self) -> None:
        until_s = time.monotonic() + START_S
        while not all(link.is_alive for link in self._links):
            self._hear(0.1)
            for link in self._links:
                if link.channel is None:
                    raise RunError(
                        link.trouble or f"worker {link.spec.index} died while it was starting",
                        hint="make the folder again; the part may need more memory than there is",
                    )
            if time.monotonic() > until_s:
                raise RunError(f"workers were not ready after {format_seconds(START_S)}")

    def _watch(self) -> None:
        """Between requests: receive late replies, detect deaths, restart dead workers."""
        while not self._stop.wait(_WATCH_S):
            with self._lock:
                self._hear(0)
                dead = [link for link in self._links if link.channel is None]
            for link in dead if self.options.restarts else ():
                # Outside the lock, because ending and starting a process takes longer than an
                # answer.
                if link.start_again():
                    with self._lock:
                        self._listen_to(link)

    # ── answering ──

    def predict(self, inputs: np.ndarray[Any, Any], deadline_s: float | None = None) -> Answer:
        """Return the answer to one input; safe to call from any thread."""
        checked = self.checked(inputs)
        limit_s = self.options.deadline_s if deadline_s is None else deadline_s
        with self._lock:
            if self._stop.is_set():
                raise RunError("the front end is closed")
            return self._answer(checked, limit_s)

    def checked(self, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Convert an input to the form that parts need; raises `UsageError` if it is invalid."""
        return self._layout.checked(inputs)

    def dry_run(self, inputs: np.ndarray[Any, Any]) -> tuple[float, dict[int, WorkerReply]]:
        """Time of an answer and the replies it waited for; not counted in `metrics`."""
        checked = self.checked(inputs)
        with self._lock:
            start_ns, answers, replies = self._replies(checked, START_S, self._quorum)
            answer = answer_from(self._combiner, answers, 0, start_ns)
            self._counted_from = self._number + 1
        # A part may return non-finite scores for an artificial input.
        if answer.missing and not any(answers[index] is None for index in replies):
            raise RunError("a worker did not answer", hint="its part may need more memory")
        return answer.took_s, replies

    def _answer(self, inputs: np.ndarray[Any, Any], limit_s: float) -> Answer:
        start_ns, answers, replies = self._replies(inputs, limit_s, self._quorum)
        senseless = sum(answers[index] is None for index in replies)
        answer = answer_from(self._combiner, answers, senseless, start_ns)
        self._times_ns.append(round(answer.took_s * 1e9))
        for index, reply in replies.items():
            counts = self._links[index].counts
            counts.answered += 1
            counts.compute_ns.append(reply.spent_ns)
            counts.round_trip_ns.append(reply.after_ns)
        return answer

    def _replies(
        self, inputs: np.ndarray[Any, Any], limit_s: float, quorum: int
    ) -> tuple[int, list[FloatArray | None], dict[int, WorkerReply]]:
        """Send a request to all workers and collect replies until every group has enough.

        Returns the start time in nanoseconds, the outputs by part, and the times of the replies.
        """
        start_ns = time.perf_counter_ns()
        self._number += 1
        number, slot = self._number, self._number % SLOTS
        self._slots[slot][...] = inputs
        asked = {link.spec.index for link in self._links if link.send(number, slot)}
        answers: list[FloatArray | None] = [None] * len(self._links)
        replies: dict[int, WorkerReply] = {}
        until_ns, is_answerable = start_ns + int(limit_s * 1e9), False
        while not is_enough(self._table, quorum, answers, asked):
            if not is_answerable and is_enough(self._table, self._least, answers, asked):
                is_answerable = True
                # Counted from the moment when the others suffice, which is the time that a late
                # worker may cost.
                patient_ns = time.perf_counter_ns() + int(self.options.patience_s * 1e9)
                until_ns = min(until_ns, patient_ns)
            left_s = (until_ns - time.perf_counter_ns()) * 1e-9
            if left_s <= 0:
                break
            for link, (of, spent_ns, outputs) in self._hear(left_s):
                if of != number:
                    continue
                index = link.spec.index
                replies[index] = WorkerReply(spent_ns, time.perf_counter_ns() - start_ns)
                if np.isfinite(outputs).all():
                    answers[index] = outputs
            asked = {
                index
                for index in asked
                if self._links[index].is_alive and not (index in replies and answers[index] is None)
            }
        # Late workers skip the request instead of computing an answer that nobody reads.
        set_finished(self._memory, number)
        return start_ns, answers, replies

    def _hear(self, timeout_s: float) -> list[tuple[WorkerLink, tuple[int, int, FloatArray]]]:
        """Receive messages from all workers; record deaths and late answers."""
        found = []
        for descriptor, _ in self._events.poll(timeout_s):
            link = self._by_descriptor.get(descriptor)
            message = link.receive() if link is not None else None
            if link is None or message is None:
                continue
            if message[0] != self._number or not len(message[2]):
                link.counts.late += message[0] >= self._counted_from
            else:
                found.append((link, message))
        return found

    # ── what is known ──

    @property
    def table(self) -> PartTable:
        """Description of the parts that are served."""
        return self._table

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers, in the order of the parts; 0 for a dead one."""
        return [link.process.pid if link.process else 0 for link in self._links]

    @property
    def num_alive(self) -> int:
        """Number of workers that are alive."""
        return sum(link.is_alive for link in self._links)

    def metrics(self) -> Metrics:
        """Times of answers, and counts of late and dead workers so far."""
        return metrics_of(self._times_ns, [(link.is_alive, link.counts) for link in self._links])
