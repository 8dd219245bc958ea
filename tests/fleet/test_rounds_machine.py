"""Anything may happen to a fleet in any order: what must hold afterwards all the same."""

from __future__ import annotations

import numpy as np
from fleet.watch import Watch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hocket.fleet.rounds import (
    Actions,
    AddDevices,
    Cancel,
    Event,
    Fail,
    Finish,
    FleetDevice,
    FleetState,
    Job,
    Lose,
    PairTable,
    Pause,
    Progress,
    RemoveDevices,
    Resume,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import ENDED, PAUSED, RUNNING

from .stored_states import pack, unpack

DEVICE_TYPES = ("fast", "slow")
DEVICES = tuple(
    FleetDevice(
        name=f"{device_type}{index}",
        device_type=device_type,
        server=f"{device_type}-server{index // 2}",
    )
    for device_type in DEVICE_TYPES
    for index in range(3)
)
SPEEDS = ((2.0, 1.0), (3.0, 1.0), (1.0, 1.0), (4.0, 0.0))
BESIDE = np.array(
    [[[1.4 + a * b / 2, 0.7] if a != b else [0, 0] for b in range(3)] for a in range(3)]
)


class Fleet:
    """Steps a state, and carries out its actions as an executor would."""

    def __init__(self, rules: Rules, shares: bool) -> None:
        table = PairTable(steps_per_s=BESIDE) if shares else None
        self.state = new_state(DEVICE_TYPES, DEVICES, rules, pair_table=table)
        self.on_device: dict[str, set[int]] = {device.name: set() for device in DEVICES}
        self.attempt: dict[int, int] = {}
        self.alive: set[int] = set()
        self.watch = Watch()

    def happen(self, event: Event) -> Actions:
        before = pack(self.state)
        after, actions = step(self.state, event)
        assert pack(self.state) == before, "the old state was changed"
        again, _ = step(unpack(before), event)
        assert pack(again) == pack(after), "a reloaded state acts differently"
        self._carry_out(actions)
        self.state = after
        self.watch(after, event, actions)
        return actions

    def _carry_out(self, actions: Actions) -> None:
        for stop in actions.stops:
            assert self.attempt[stop.number] == stop.attempt
            for numbers in self.on_device.values():
                numbers.discard(stop.number)
        for start in actions.starts:
            assert start.attempt == self.attempt.get(start.number, 0) + 1, "attempts must count"
            self.attempt[start.number] = start.attempt
            for device in start.devices:
                self.on_device[device].add(start.number)


def check(fleet: Fleet, state: FleetState) -> None:
    """State and executor agree, nobody runs where it cannot, and everybody knows why it waits."""
    rows = state.jobs.rows
    held = {name: {n for n in pair if n >= 0} for name, pair in _holders(state)}
    assert held == fleet.on_device, "state and executor disagree"
    for row in rows[rows["phase"] == RUNNING]:
        assert row["rate"] > 0.0, "a job holds devices on which it cannot run"
    live = {int(number) for number in rows["number"][rows["phase"] != ENDED]}
    assert live == fleet.alive == state.names.keys() - set(rows["number"][rows["phase"] == ENDED])
    for number in live:
        assert reason(state, number)


def _holders(state: FleetState) -> list[tuple[str, list[int]]]:
    return list(zip(state.device_names, state.holders.tolist(), strict=True))


class Machine(RuleBasedStateMachine):
    @initialize(
        mechanism=st.sampled_from(["improved", "gavel", "sharing", "sharing"]),
        policy=st.sampled_from(["las", "fifo", "las-agnostic", "max-throughput"]),
    )
    def begin(self, mechanism: str, policy: str) -> None:
        shares = mechanism == "sharing"
        rules = Rules(
            policy=policy,
            mechanism="improved" if shares else mechanism,
            max_failures=2,
        )
        self.fleet = Fleet(rules, shares)
        self.next_number = 0

    def now(self, later_s: float = 10.0) -> float:
        return self.fleet.state.time_s + later_s

    def pick(self, data: st.DataObject) -> int | None:
        alive = sorted(self.fleet.alive)
        return data.draw(st.sampled_from(alive)) if alive else None

    @rule(
        device_type=st.integers(0, 3),
        gang=st.sampled_from([1, 1, 1, 2, 3]),
        steps=st.floats(100, 1e5),
        preemptible=st.sampled_from([True, True, False, None]),
    )
    def submit(self, device_type: int, gang: int, steps: float, preemptible: bool | None) -> None:
        job = Job(
            number=self.next_number,
            name=f"job{self.next_number}",
            steps_per_s=SPEEDS[device_type],
            total_steps=steps,
            gang=gang,
            profile=device_type if device_type < 3 and gang == 1 else -1,
            spread_steps_per_s=(0.5, 0.0) if device_type == 1 else None,
            preemptible=preemptible,
        )
        self.next_number += 1
        self.fleet.alive.add(job.number)
        self.fleet.happen(Submit(time_s=self.now(), jobs=(job,)))

    @rule(data=st.data(), how=st.sampled_from([Finish, Cancel]))
    def end(self, data: st.DataObject, how: type[Finish] | type[Cancel]) -> None:
        number = self.pick(data)
        if number is not None:
            self.fleet.alive.discard(number)
            self.fleet.happen(how(time_s=self.now(), numbers=(number,)))

    @rule(data=st.data(), how=st.sampled_from([Pause, Resume]))
    def pause(self, data: st.DataObject, how: type[Pause] | type[Resume]) -> None:
        number = self.pick(data)
        if number is not None:
            self.fleet.happen(how(time_s=self.now(), numbers=(number,)))
            row = self.fleet.state.jobs.rows[self.fleet.state.row_of(number)]
            assert (row["phase"] == PAUSED) == (how is Pause)

    @rule(data=st.data(), age=st.integers(0, 3))
    def fail(self, data: st.DataObject, age: int) -> None:
        number = self.pick(data)
        if number is None:
            return
        attempt = self.fleet.attempt.get(number, 0) - age
        event = Fail(time_s=self.now(), number=number, attempt=attempt)
        actions = self.fleet.happen(event)
        if any(stop.reason == "given up" for stop in actions.stops):
            self.fleet.alive.discard(number)

    @rule(data=st.data(), steps=st.floats(0, 1e5), age=st.integers(0, 3), saves=st.booleans())
    def progress(self, data: st.DataObject, steps: float, age: int, saves: bool) -> None:
        number = self.pick(data)
        if number is None:
            return
        attempt = self.fleet.attempt.get(number, 0) - age
        saved = steps / 2.0 if saves else None
        self.fleet.happen(
            Progress(
                time_s=self.now(),
                number=number,
                attempt=attempt,
                done_steps=steps,
                saved_steps=saved,
            )
        )

    @rule(data=st.data(), saved=st.floats(0, 1e4))
    def lose_work(self, data: st.DataObject, saved: float) -> None:
        number = self.pick(data)
        if number is not None:
            self.fleet.happen(Lose(time_s=self.now(), number=number, saved_steps=saved))
            row = self.fleet.state.jobs.rows[self.fleet.state.row_of(number)]
            assert 0.0 <= row["saved_steps"] <= row["done_steps"]

    @rule(device=st.sampled_from(DEVICES))
    def lose(self, device: FleetDevice) -> None:
        self.fleet.happen(RemoveDevices(time_s=self.now(), names=(device.name,)))

    @rule(device=st.sampled_from(DEVICES))
    def repair(self, device: FleetDevice) -> None:
        self.fleet.happen(AddDevices(time_s=self.now(), devices=(device,)))

    @rule()
    def crash(self) -> None:
        self.fleet.state = unpack(pack(self.fleet.state))

    @rule(rounds=st.integers(1, 3))
    def tick(self, rounds: int) -> None:
        for _ in range(rounds):
            self.fleet.happen(Tick(time_s=self.now(360.0)))

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "fleet"):
            check(self.fleet, self.fleet.state)


Machine.TestCase.settings = settings(
    derandomize=True, deadline=None, max_examples=40, stateful_step_count=20
)
TestMachine = Machine.TestCase
