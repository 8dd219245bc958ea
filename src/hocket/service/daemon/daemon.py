"""The service without its web server: state of a running fleet, and requests that read or change
it.

One thread decides: only it uses the store and replaces the state, which all threads may read. One
thread acts: only it talks to the executor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.errors import UsageError
from hocket.fleet.rounds.fairness import WEEK_S, week_start_s
from hocket.fleet.rounds.interference import with_more_types, without_pairs
from hocket.fleet.rounds.state import FleetState, Rules, is_usable, lay_out, new_state
from hocket.fleet.throughputs.table import Throughputs
from hocket.service.daemon import commands
from hocket.service.daemon.clock import Clock
from hocket.service.daemon.commands import Change, steps_per_s, with_config
from hocket.service.daemon.decider import Command, Decider
from hocket.service.daemon.dry_run import dry_run_day, dry_run_round
from hocket.service.daemon.estimates import allows_sharing
from hocket.service.daemon.log import Log
from hocket.service.daemon.loops import Loops
from hocket.service.daemon.reconciler import Reconciler
from hocket.service.daemon.service_state import ServiceState, holder_index
from hocket.service.errors import NotFoundError
from hocket.service.executors.executor import AttemptName, Executor
from hocket.service.metrics import FleetMetrics
from hocket.service.notifier import Notifier
from hocket.service.records import (
    CheckpointRecord,
    DeviceRecord,
    JobRecord,
    LeaseAnswer,
)
from hocket.service.server_config import ServerConfig
from hocket.service.spec import JobSpec
from hocket.service.store.store import Store
from hocket.service.usage import UsageRow, count_usage

# Recovery replays nothing. The stored state is adapted to the options of this start. Attempts that
# were open stay open; the first poll of the executor reports their outcome, as every later poll
# does.


def recovered(
    store: Store,
    rules: Rules,
    device_types: tuple[str, ...],
    config: ServerConfig,
    time_s: float,
) -> ServiceState:
    """The service state restored from the store.

    Raises `UsageError` if its jobs do not suit the policy, or if no device type is known.
    """
    loaded = store.load()
    if loaded.state is None and not device_types:
        raise UsageError("the engine has no devices", hint="name those to come with --device-types")
    if loaded.state is None:
        state = new_state(device_types, (), rules, time_s=time_s)
    else:
        state = _refitted(loaded.state, rules, device_types, loaded.jobs)
    state = with_config(state, config).but(is_dirty=True)
    if loaded.state is None or (loaded.state.rules, loaded.state.device_types) != (
        rules,
        state.device_types,
    ):
        dry_run_day(rules, state.device_types)
        dry_run_round(state)
    # Otherwise this policy has accepted these jobs before, so a restart need not wait for kernels:
    # the first decision loads them while the service already responds.
    waiting, held = holder_index(loaded.attempts)
    service_state = ServiceState(
        state=state,
        jobs=loaded.jobs,
        attempts=loaded.attempts,
        waiting=waiting,
        held=held,
        checkpoints=loaded.checkpoints,
        last_number=loaded.last_number,
        last_sequence=loaded.last_sequence,
    )
    return service_state


def _refitted(
    state: FleetState, rules: Rules, device_types: tuple[str, ...], jobs: Mapping[int, JobRecord]
) -> FleetState:
    """The stored state under new rules, with new device types added."""
    state = _with_sharing_as(state.but(rules=rules), jobs)
    new = tuple(
        device_type for device_type in device_types if device_type not in state.device_types
    )
    if not new:
        return state
    numbers = state.jobs.rows["number"].tolist()
    speeds = np.zeros((len(numbers), len(new)))
    for row, number in enumerate(numbers):
        if number in jobs:
            gang = int(state.jobs.rows["gang"][row])
            speeds[row] = steps_per_s(jobs[number].spec, new, gang)
    columns = {
        name: np.append(
            getattr(state.jobs, name),
            speeds if name.endswith("steps_per_s") else np.zeros(speeds.shape),
            axis=1,
        )
        for name in state.jobs._fields
        if name != "rows"
    }
    state = state.but(
        device_types=(*state.device_types, *new),
        price_per_hour=np.append(state.price_per_hour, np.ones(len(new))),
        jobs=state.jobs._replace(**columns),
        layout=lay_out(
            state.type_of_device, state.device_server, is_usable(state), state.num_types + len(new)
        ),
        warm=None,
    )
    return with_more_types(state, len(new))


def _with_sharing_as(state: FleetState, jobs: Mapping[int, JobRecord]) -> FleetState:
    """The state without pairs if its policy has none; raises `UsageError` if jobs share devices."""
    if state.pair_estimates is None or allows_sharing(state.rules):
        return state
    sharing = [number for number, job in jobs.items() if job.spec.space_sharing]
    if sharing:
        raise UsageError(
            f"job {sharing[0]} may share devices, and jobs run alone under {state.rules.policy}",
            hint="cancel such jobs under the policy that they came with",
        )
    return without_pairs(state)


class Daemon:
    """A running fleet. All methods may be called from any thread.

    Methods that change something return when the change is on disk, and raise `UnavailableError` if
    nothing was changed.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        rules: Rules,
        device_types: tuple[str, ...],
        *,
        poll_s: float = 0.2,
        config: ServerConfig | None = None,
        endpoint_url: str = "",
        clock: Clock | None = None,
        capacity: Mapping[str, int] | None = None,
        reference: Throughputs | None = None,
        shares_devices: bool = True,
    ) -> None:
        self.store = store
        """Committed rows, which any thread may read."""
        self.endpoint_url = endpoint_url
        """Address under which users and processes reach the service."""
        self.config = config or ServerConfig()
        """Limits of users and teams."""
        self._capacity = capacity
        """Number of devices of each type of a local fleet, whose devices are all there will be;
        None otherwise.
        """
        self._shares_devices = shares_devices
        """True if the engine runs two attempts on one device."""
        service_state = recovered(store, rules, device_types, self.config, time.time())
        self._reference = (
            None if reference is None else reference.on(service_state.state.device_types)
        )
        """Throughputs of other jobs, used for estimates."""
        self._clock = clock or Clock(service_state.state.time_s)
        self._began_s = self._clock.now_s()
        self._heard: dict[int, tuple[int, float]] = {}
        """Attempt of each job that reported last, with the time; for jobs with a limit on silence.
        """
        self._decider = Decider(service_state, store, self._clock)
        self._loops = Loops(self._decider, self._clock, poll_s)
        self.metrics = FleetMetrics(lambda: self._decider.service_state, self._clock.now_s)
        self._loops.observers.append(self.metrics.count)
        self._notifier: Notifier | None = None
        if self.config.notify.webhook or self.config.notify.command:
            self._notifier = Notifier(self.config.notify)
            self._loops.observers.append(self._notifier.observe)
        self._reconciler = Reconciler(
            executor,
            store.folder,
            service_state=lambda: self._decider.service_state,
            report=self._loops.report,
            now_s=self._clock.now_s,
            heard_s=self._heard_s,
            endpoint_url=endpoint_url,
            config=self.config,
        )

    def start(self) -> None:
        """Start both threads: one decides, one talks to the executor."""
        self._loops.start(self._reconciler)

    def close(self) -> None:
        """Stop both threads; jobs continue to run."""
        self._loops.close()
        if self._notifier is not None:
            self._notifier.close()

    @property
    def is_closing(self) -> bool:
        """True after shutdown was requested; no further events will come."""
        return self._loops.is_closing

    @property
    def is_running(self) -> bool:
        """True if commands are executed."""
        return self._loops.are_alive

    @property
    def is_local(self) -> bool:
        """True if all devices are on this machine."""
        return self._capacity is not None

    @property
    def trouble(self) -> str:
        """Error that prevents jobs from running now; empty if there is none."""
        trouble: str = self._loops.trouble or self._reconciler.trouble
        return trouble

    @property
    def folder(self) -> Path:
        """The state folder."""
        return self.store.folder

    @property
    def identity(self) -> str:
        """Unique identity of this fleet."""
        return self.store.identity

    # ── what changes something ──

    def submit(self, spec: JobSpec, key: str | None = None, owner: str = "") -> JobRecord:
        """Add a job; the same key and job again return the same record, so that a retry is safe.

        Raises `KeyReusedError` for a key that was used with another job.
        """
        if spec.space_sharing and not self._shares_devices:
            hint = "leave it out: only local devices and agents are shared"
            raise UsageError("jobs run alone on this engine", hint=hint, where="space_sharing")
        number = self._answer(
            partial(
                commands.submit,
                spec=spec,
                key=key,
                owner=owner,
                config=self.config,
                find_key=self.store.key,
                find_job=self.store.job,
                capacity=self._capacity,
                reference=self._reference,
            )
        )
        return self.job(number)

    def change(
        self,
        change: Change,
        number: int,
        expected_version: int | None = None,
        only_of: str | None = None,
    ) -> JobRecord:
        """Cancel, pause or resume a job.

        Raises `ConflictError` if the job has ended or has another version, and `ForbiddenError` if
        it is not a job of user ``only_of`` (None for admins).
        """
        self._answer(
            partial(
                commands.change_job,
                change=change,
                number=number,
                version=expected_version,
                find_job=self.store.job,
                only_of=only_of,
            )
        )
        return self.job(number)

    def drain(self, names: tuple[str, ...]) -> None:
        """Drain devices: they take no new jobs until they are reopened."""
        self._answer(partial(commands.drain, names=names))

    def reopen(self, names: tuple[str, ...]) -> None:
        """Let drained devices take jobs again."""
        self._answer(partial(commands.reopen, names=names))

    def report(
        self,
        name: AttemptName,
        token: str,
        done_steps: float,
        is_finished: bool = False,
        can_save: bool = False,
    ) -> LeaseAnswer:
        """Record progress of an attempt; raises `StaleAttemptError` unless it holds the job."""
        lease: LeaseAnswer = self._answer(
            partial(
                commands.report,
                name=name,
                token=token,
                done_steps=done_steps,
                is_finished=is_finished,
                can_save=can_save,
                reference=self._reference,
            )
        )
        self._hear(name)
        return lease

    def commit_checkpoint(
        self, name: AttemptName, token: str, step: float, path: str
    ) -> CheckpointRecord:
        """Record a checkpoint as the job's newest; raises `StaleAttemptError` like `report`."""
        checkpoint: CheckpointRecord = self._answer(
            partial(commands.commit_checkpoint, name=name, token=token, step=step, path=path)
        )
        self._hear(name)
        return checkpoint

    # ── what is so ──

    def now_s(self) -> float:
        """Current time of the service; changes of the system clock do not affect it."""
        return self._clock.now_s()

    @property
    def state(self) -> FleetState:
        """The last committed state; immutable, so callers may keep it."""
        return self._decider.service_state.state

    @property
    def service_state(self) -> ServiceState:
        """The last committed state with all jobs and attempts that have not ended."""
        return self._decider.service_state

    def job(self, number: int) -> JobRecord:
        """The record of a job; raises `NotFoundError` if there is none."""
        record = self.service_state.jobs.get(number) or self.store.job(number)
        if record is None:
            hint = "hocket fleet jobs --all lists them"
            raise NotFoundError(f"there is no job {number}", hint=hint)
        return record

    def usage(self, num_weeks: int) -> list[UsageRow]:
        """Device time by week, user, team and type, of the current week and earlier ones."""
        now_s = self.now_s()
        since_s = week_start_s(now_s) - (num_weeks - 1) * WEEK_S
        return count_usage(self.store.held_since(since_s), since_s, now_s)

    def last_event(self) -> int:
        """The number of the newest event."""
        return self.service_state.last_sequence

    def wait_for_events(self, after: int, timeout_s: float) -> int:
        """Wait for an event newer than ``after``; returns the number of the newest event."""
        self._loops.wait(lambda: self.last_event() > after, timeout_s)
        return self.last_event()

    def devices(self) -> list[DeviceRecord]:
        """All devices that are or were part of the fleet."""
        state = self.state
        servers = self._reconciler.servers
        return [
            DeviceRecord(
                name=name,
                device_type=state.device_types[int(state.type_of_device[at])],
                server=servers.get(name, ""),
                is_up=bool(state.is_up[at]),
                is_drained=name in state.drained,
                jobs=tuple(int(number) for number in state.holders[at] if number >= 0),
            )
            for at, name in enumerate(state.device_names)
        ]

    def log(self, number: int, attempt: int) -> Log:
        """The output of an attempt; raises `NotFoundError` if there is no such attempt."""
        if all(record.attempt != attempt for record in self.store.attempts(number)):
            raise NotFoundError(f"job {number} has no attempt {attempt}")
        return Log(self.store.folder, number, attempt)

    def _hear(self, name: AttemptName) -> None:
        job = self.service_state.jobs.get(name.job)
        if job is not None and job.spec.silence_s is not None:
            # Only the newest attempt of a job can report, so there is one entry per such job.
            self._heard[name.job] = (name.attempt, self._clock.now_s())

    def _heard_s(self, name: AttemptName) -> float:
        attempt, time_s = self._heard.get(name.job, (0, 0.0))
        return time_s if attempt == name.attempt else self._began_s

    def _answer(self, command: Command) -> Any:
        return self._loops.ask(command).result()
