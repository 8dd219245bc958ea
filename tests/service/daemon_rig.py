"""A daemon without threads, whose time, executor and crashes belong to the test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from service.violations import violations

from hocket.fleet.rounds.state import Rules
from hocket.fleet.throughputs.table import Throughputs
from hocket.service.daemon import commands
from hocket.service.daemon.clock import Clock
from hocket.service.daemon.daemon import recovered
from hocket.service.daemon.decider import Command, Decider, Request
from hocket.service.daemon.reconciler import Reconciler
from hocket.service.daemon.service_state import ServiceState
from hocket.service.executors.executor import AttemptName, Executor
from hocket.service.records import CheckpointRecord, JobRecord, LeaseAnswer
from hocket.service.server_config import ServerConfig
from hocket.service.spec import JobSpec
from hocket.service.store import Store
from hocket.service.store.tables import Batch

DEVICE_TYPES = ("v100", "k80")
RULES = Rules(round_s=60.0, max_failures=3)


class CrashError(BaseException):
    """The process is killed here: no handler of the daemon sees it."""


class Time:
    """Hands of a clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """One life of a daemon; make another on the same folder for the next."""

    def __init__(
        self,
        folder: Path,
        executor: Executor,
        time: Time,
        *,
        rules: Rules = RULES,
        device_types: tuple[str, ...] = DEVICE_TYPES,
        on_commit: Callable[[str], None] | None = None,
        team_weights: dict[str, float] | None = None,
        config: ServerConfig | None = None,
        lives: list[Rig] | None = None,
        reference: Throughputs | None = None,
    ) -> None:
        self.time = time
        self.folder = folder
        self.executor = executor
        self.reference = reference
        self.is_dead = False
        self.lives = [] if lives is None else lives
        self.lives.append(self)
        self.store = Store.open(folder)
        self._on_commit = on_commit or (lambda moment: None)
        teams = {name: {"weight": weight} for name, weight in (team_weights or {}).items()}
        self.config = config or ServerConfig.model_validate({"teams": teams})
        service_state = recovered(self.store, rules, device_types, self.config, time.now_s)
        # The wall clock stands for the monotonic one as well: tests set it back to show that.
        clock = Clock(service_state.state.time_s, wall_s=time, monotonic_s=time)
        self.decider = Decider(service_state, self.store, clock)
        self._commit = self.store.commit
        self.store.commit = self._guarded  # type: ignore[method-assign]
        self.heard: dict[AttemptName, float] = {}
        self.reconciler = Reconciler(
            executor,
            folder,
            service_state=lambda: self.decider.service_state,
            report=self.post,
            now_s=clock.now_s,
            heard_s=lambda name: self.heard.get(name, 0.0),
        )

    def _guarded(self, batch: Batch) -> None:
        self._on_commit("before commit")
        self._commit(batch)
        self._on_commit("after commit")

    @property
    def service_state(self) -> ServiceState:
        return self.decider.service_state

    def die(self) -> None:
        """What the kernel does to a killed process: locks and files are let go."""
        if not self.is_dead:
            self.is_dead = True
            self.store.close()

    def again(self, **changes: Any) -> Rig:
        """The next life, on the same folder and executor."""
        self.die()
        return Rig(self.folder, self.executor, self.time, lives=self.lives, **changes)

    # ── what may be asked ──

    def post(self, command: Command) -> Future[Any]:
        request = Request(command)
        self.decider.decide([request])
        assert violations(self.service_state) == []
        return request.future

    def ask(self, command: Callable[..., Any], **values: Any) -> Any:
        return self.post(lambda transaction: command(transaction, **values)).result()

    def submit(self, key: str | None = None, owner: str = "", **spec: Any) -> int:
        given = {"name": key or "job", "command": ("python", "train.py"), "preemptible": True}
        values = {**given, **spec}
        number: int = self.ask(
            commands.submit,
            spec=JobSpec(**values),
            key=key,
            config=self.config,
            owner=owner,
            find_key=self.store.key,
            find_job=self.store.job,
            reference=self.reference,
        )
        return number

    def change(self, change: str, number: int, version: int | None = None) -> None:
        values = {"number": number, "version": version, "find_job": self.store.job}
        self.ask(commands.change_job, change=change, **values)

    def report(self, name: AttemptName, done_steps: float, **values: Any) -> LeaseAnswer:
        usual = {"token": self.token(name), "is_finished": False, "reference": self.reference}
        values = {**usual, **values}
        lease: LeaseAnswer = self.ask(commands.report, name=name, done_steps=done_steps, **values)
        return lease

    def checkpoint(
        self, name: AttemptName, step: float, token: str | None = None
    ) -> CheckpointRecord:
        counts: CheckpointRecord = self.ask(
            commands.commit_checkpoint,
            name=name,
            token=token or self.token(name),
            step=step,
            path=f"/checkpoints/{step}",
        )
        return counts

    def token(self, name: AttemptName) -> str:
        (record,) = [one for one in self.store.attempts(name.job) if one.attempt == name.attempt]
        return record.token

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.reconciler.look()

    def later(self, seconds: float) -> None:
        """Time passes; a round begins where one is due."""
        self.time.now_s += seconds
        self.ask(commands.tick)

    def job(self, number: int) -> JobRecord:
        record = self.service_state.jobs.get(number) or self.store.job(number)
        assert record is not None
        return record

    def status(self, number: int) -> str:
        return self.job(number).status
