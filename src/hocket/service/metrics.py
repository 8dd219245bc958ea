"""Numbers of the service for Prometheus: waits, ends, preemptions, device time by type and user.

What the state says now is read when somebody asks. What happens is counted as it is committed, from
the start of this process on; Prometheus knows how to go on after a restart.
"""

from __future__ import annotations

import math
import threading
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hocket.fleet.rounds.state import PHASES, FleetState
from hocket.service.daemon.observations import PREEMPTED_OUTCOMES
from hocket.service.daemon.service_state import ServiceState
from hocket.service.records import ENDED, AttemptRecord, JobRecord
from hocket.service.store.tables import Batch

# Upper bounds of the histogram buckets for waiting times and for run times.
_WAITS_S = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 3 * 24 * 3600, math.inf)
_RUNS_S = (10, 60, 600, 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600, math.inf)


class FleetMetrics(Collector):
    """Counts commits (`count`, called by one thread) and writes everything out (`text`)."""

    def __init__(
        self, service_state: Callable[[], ServiceState], now_s: Callable[[], float]
    ) -> None:
        self._service_state, self._now_s = service_state, now_s
        self._began_s = now_s()
        self._counting = threading.Lock()
        self._device_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._registry = CollectorRegistry()
        self._waits = Histogram(
            "hocket_job_wait_seconds", "Time from submission to the first start.", ["user"],
            buckets=_WAITS_S, registry=self._registry,
        )  # fmt: skip
        self._runs = Histogram(
            "hocket_attempt_run_seconds", "Time from start to end of attempts.", ["device_type"],
            buckets=_RUNS_S, registry=self._registry,
        )  # fmt: skip
        self._ended = Counter(
            "hocket_jobs_ended", "Jobs that have ended, by status and user.", ["status", "user"],
            registry=self._registry,
        )  # fmt: skip
        self._failures = Counter(
            "hocket_attempt_failures", "Attempts that failed or were lost, by user.",
            ["outcome", "user"], registry=self._registry,
        )  # fmt: skip
        self._preemptions = Counter(
            "hocket_preemptions", "Attempts that were stopped for others.", ["reason", "user"],
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(self)

    def text(self) -> bytes:
        """All numbers in the text form of Prometheus."""
        return generate_latest(self._registry)

    # ── what happens ──

    def count(self, service_state: ServiceState, batch: Batch) -> None:
        """Count the events of a commit."""
        changed = {record.number: record for record in batch.jobs}
        for job in batch.jobs:
            if job.status in ENDED:
                self._ended.labels(job.status, _shown(job.owner)).inc()
        for attempt in batch.attempts:
            found = changed.get(attempt.job) or service_state.jobs.get(attempt.job)
            if found is not None and attempt.started_s is not None:
                self._count_attempt(attempt, found)

    def _count_attempt(self, attempt: AttemptRecord, job: JobRecord) -> None:
        assert attempt.started_s is not None
        user = _shown(job.owner)
        if attempt.ended_s is None:
            # Only the commit that starts it counts; later ones set the reason of its end.
            if job.started_s == attempt.started_s and not attempt.outcome:
                self._waits.labels(user).observe(attempt.started_s - job.submitted_s)
            return
        duration_s = attempt.ended_s - attempt.started_s
        self._runs.labels(attempt.device_type).observe(duration_s)
        with self._counting:
            self._device_s[attempt.device_type, user] += self._held_s(attempt, attempt.ended_s)
        if attempt.outcome in ("failed", "lost"):
            self._failures.labels(attempt.outcome, user).inc()
        if attempt.outcome in PREEMPTED_OUTCOMES:
            self._preemptions.labels(attempt.outcome, user).inc()

    def _held_s(self, attempt: AttemptRecord, until_s: float) -> float:
        """Device time of an attempt since this process began."""
        assert attempt.started_s is not None
        since_s = max(attempt.started_s, self._began_s)
        return max(until_s - since_s, 0.0) * len(attempt.devices)

    # ── what is so ──

    def describe(self) -> Iterable[Metric]:
        """No metrics: which ones exist depends on the state."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Metrics of the present state, and device time up to now."""
        service_state = self._service_state()
        state = service_state.state
        yield _family(
            "jobs", "Jobs that have not ended, by phase.", ("phase",),
            [((name,), int((state.jobs.rows["phase"] == at).sum()))
             for at, name in enumerate(PHASES) if name != "ended"],
        )  # fmt: skip
        yield _family(
            "devices", "Devices by type and use.", ("device_type", "use"), _devices(state)
        )
        yield _family(
            "user_devices", "Devices that a user holds, by type.", ("user", "device_type"),
            _user_devices(service_state),
        )  # fmt: skip
        yield self._device_seconds(service_state)

    def _device_seconds(self, service_state: ServiceState) -> Metric:
        with self._counting:
            total = defaultdict(float, self._device_s)
        now_s = self._now_s()
        for attempt in service_state.open_attempts():
            if attempt.started_s is not None and attempt.job in service_state.jobs:
                user = _shown(service_state.jobs[attempt.job].owner)
                total[attempt.device_type, user] += self._held_s(attempt, now_s)
        family = CounterMetricFamily(
            "hocket_device_seconds", "Time that devices were held.", labels=("device_type", "user")
        )
        for (device_type, user), seconds in total.items():
            family.add_metric([_shown(device_type), user], seconds)
        return family


Samples = Iterable[tuple[tuple[str, ...], float]]


def _family(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"hocket_{name}", text, labels=labels)
    for values, number in samples:
        family.add_metric([_shown(value) for value in values], number)
    return family


def _shown(text: str) -> str:
    """A label value without characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _devices(state: FleetState) -> Samples:
    is_held = state.holders[:, 0] >= 0
    for index, device_type in enumerate(state.device_types):
        mine = state.type_of_device == index
        yield (device_type, "busy"), int((mine & state.is_up & is_held).sum())
        yield (device_type, "free"), int((mine & state.is_up & ~is_held).sum())
        yield (device_type, "lost"), int((mine & ~state.is_up).sum())


def _user_devices(service_state: ServiceState) -> Samples:
    held: Tally[tuple[str, str]] = Tally()
    for attempt in service_state.open_attempts():
        if attempt.started_s is not None and attempt.job in service_state.jobs:
            held[service_state.jobs[attempt.job].owner, attempt.device_type] += len(attempt.devices)
    return list(held.items())
