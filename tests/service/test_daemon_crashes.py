"""A daemon that is killed at every moment of a story, and one to which anything happens."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from service.daemon_rig import CrashError, Rig, Time
from service.fake_executor import FakeExecutor, fleet_devices

from hocket.base.errors import UsageError
from hocket.service.errors import StaleAttemptError, UnavailableError
from hocket.service.executors.executor import Assignment, AttemptName, Poll
from hocket.service.records import ENDED


class Failpoints:
    """Counts the moments at which a daemon may die, and kills it at one of them."""

    def __init__(self, fatal: int) -> None:
        self.left = fatal
        self.where = ""
        self.seen: list[tuple[int, str]] = []
        """Which act of the story and moment, in order."""
        self.act = 0

    def __call__(self, moment: str) -> None:
        self.seen.append((self.act, moment))
        self.left -= 1
        if self.left == 0:
            self.where = moment
            raise CrashError(moment)


CHANGES = ("after start", "after stop", "after kill", "after forget")
"""Moments before which something became different that outlives the daemon."""


def distinct(seen: list[tuple[int, str]]) -> dict[int, set[str]]:
    """Moments to die at, counted from 1, and what else each stands for: of those of one act between
    which nothing changed that outlives the daemon, the first is as good as any."""
    groups: dict[int, set[str]] = {}
    last_act = -1
    for at, (act, moment) in enumerate(seen, 1):
        if act != last_act or moment in CHANGES or moment == "after commit":
            first, last_act = at, act
        groups.setdefault(first, set()).add(moment)
    return groups


class FragileExecutor:
    """Dies before or after each call of the daemon; what it did stays done."""

    def __init__(self, inner: FakeExecutor, point: Callable[[str], None]) -> None:
        self.inner = inner
        self.point = point

    def _call(self, name: str, *values: Any) -> Any:
        self.point(f"before {name}")
        answer = getattr(self.inner, name)(*values)
        self.point(f"after {name}")
        return answer

    def start(self, assignment: Assignment) -> None:
        self._call("start", assignment)

    def stop(self, name: AttemptName, grace_s: float) -> None:
        self._call("stop", name, grace_s)

    def kill(self, name: AttemptName) -> None:
        self._call("kill", name)

    def poll(self) -> Poll:
        answer: Poll = self._call("poll")
        return answer

    def forget(self, name: AttemptName) -> None:
        self._call("forget", name)

    def close(self) -> None:
        pass


def _exit(rig: Rig, number: int, exit_code: int) -> None:
    inner = rig.executor.inner  # type: ignore[attr-defined]
    for name in inner.running():
        if name.job == number:
            inner.exit(name, exit_code)


def _checkpoint(rig: Rig, number: int) -> None:
    for record in rig.service_state.attempts.get(number, ()):
        if record.started_s is not None:
            rig.checkpoint(AttemptName(number, record.attempt), 5.0)


STORY: tuple[Callable[[Rig], object], ...] = (
    lambda rig: rig.look(),
    lambda rig: rig.submit("a"),
    lambda rig: rig.submit("b", gang=2),
    lambda rig: rig.look(2),
    lambda rig: _checkpoint(rig, 1),
    lambda rig: rig.submit("c"),
    lambda rig: rig.later(61.0),
    lambda rig: rig.look(3),
    lambda rig: rig.change("pause", 1),
    lambda rig: rig.look(2),
    lambda rig: rig.change("resume", 1),
    lambda rig: _exit(rig, 3, 1),
    lambda rig: rig.look(2),
    lambda rig: rig.change("cancel", 3),
    lambda rig: rig.later(61.0),
    lambda rig: rig.look(3),
    lambda rig: _exit(rig, 1, 0),
    lambda rig: rig.look(3),
    lambda rig: _exit(rig, 2, 0),
    lambda rig: rig.look(2),
    lambda rig: _exit(rig, 2, 0),
    lambda rig: rig.look(3),
)


def run_story(folder: Path, fatal: int) -> tuple[Rig, FakeExecutor, Failpoints]:
    """The story with a crash at one moment; what was asked then is asked again by the caller."""
    points, inner = Failpoints(fatal), FakeExecutor(fleet_devices(v100=2))
    rig = Rig(folder, FragileExecutor(inner, points), Time(), on_commit=points)
    for number, act in enumerate(STORY):
        points.act = number
        try:
            act(rig)
        except CrashError:
            rig = rig.again(on_commit=points)
            rig.look(2)
            act(rig)
        except (UsageError, StaleAttemptError):
            assert points.left <= 0, "nothing is refused without a crash"
    return rig, inner, points


def quick_folder() -> Path:
    """In memory where there is such a thing: a killed process loses nothing that it wrote."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))


def test_a_daemon_killed_at_any_moment_of_a_story_loses_nothing():
    top = quick_folder()
    rig, _, points = run_story(top / "untouched", 0)
    rig.die()
    deaths = distinct(points.seen)
    assert len(points.seen) > 60
    # The last one, after the end of the story, kills nobody.
    for fatal in (*deaths, len(points.seen) + 1):
        folder = top / str(fatal)
        rig, inner, points = run_story(folder, fatal)
        assert [rig.job(number).spec.name for number in (1, 2, 3)] == ["a", "b", "c"]
        assert rig.service_state.last_number == 3, "asking again made no second job"
        assert rig.status(1) == "succeeded", points.where
        assert rig.status(2) == "succeeded", points.where
        assert rig.status(3) == "cancelled", points.where
        assert rig.service_state.attempts == {}
        assert inner.running() == []
        starts = [name for what, name in inner.history if what == "start"]
        assert len(starts) == len(set(starts)), "an attempt ran twice"
        rig.die()
        shutil.rmtree(folder)
        assert (points.left > 0) == (fatal > len(points.seen))
    shutil.rmtree(top)
    assert {
        "before commit", "after commit",
        "before start", "after start", "before stop", "after stop",
    } <= set().union(*deaths.values())  # fmt: skip


class AnythingHappens(RuleBasedStateMachine):
    """Whatever comes: no device twice (the executor sees to that), no job lost, none undecided."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = quick_folder()
        self.devices = fleet_devices(v100=2, k80=2)
        self.executor = FakeExecutor(self.devices)
        self.rig = Rig(self.folder, self.executor, Time(), on_commit=self.committing)
        self.rig.look()
        self.keys: dict[str, int] = {}
        self.is_full = False

    def committing(self, moment: str) -> None:
        if self.is_full and moment == "before commit":
            raise UnavailableError("the disk is full")

    def attempt(self, data: st.DataObject) -> AttemptName | None:
        running = self.executor.running()
        return data.draw(st.sampled_from(running)) if running else None

    def number(self, data: st.DataObject) -> int:
        return data.draw(st.integers(1, max(len(self.keys), 1)))

    def ask(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(UsageError, UnavailableError):
            act()

    @rule(
        gang=st.sampled_from([1, 1, 2, 3]),
        grace_s=st.sampled_from([0.0, 30.0]),
        shares=st.booleans(),
    )
    def submit(self, gang: int, grace_s: float, shares: bool) -> None:
        key = f"key {len(self.keys)}"
        spec = {"gang": gang, "grace_s": grace_s, "silence_s": 500.0, "space_sharing": shares}
        if self.is_full:
            with pytest.raises(UnavailableError):
                self.rig.submit(key, **spec)
            return
        self.keys[key] = self.rig.submit(key, **spec)

    @rule(data=st.data(), how=st.sampled_from(["cancel", "pause", "resume"]))
    def change(self, data: st.DataObject, how: str) -> None:
        number = self.number(data)
        self.ask(lambda: self.rig.change(how, number))

    @rule(data=st.data(), exit_code=st.sampled_from([0, 0, 1, -9]))
    def exit(self, data: st.DataObject, exit_code: int) -> None:
        if (name := self.attempt(data)) is not None:
            self.executor.exit(name, exit_code)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if (name := self.attempt(data)) is not None:
            self.executor.lose(name)

    @rule(data=st.data())
    def lose_device(self, data: st.DataObject) -> None:
        self.executor.lose_devices(data.draw(st.sampled_from(self.devices)).name)

    @rule()
    def repair_devices(self) -> None:
        self.executor.devices = self.devices

    @rule(data=st.data(), is_finished=st.booleans())
    def report(self, data: st.DataObject, is_finished: bool) -> None:
        if (name := self.attempt(data)) is not None:
            self.ask(lambda: self.rig.report(name, 5.0, is_finished=is_finished))

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        if (name := self.attempt(data)) is not None:
            self.ask(lambda: self.rig.checkpoint(name, 7.0))

    @rule(are_stubborn=st.booleans())
    def let_new_ones_be(self, are_stubborn: bool) -> None:
        self.executor.are_stubborn = are_stubborn

    @rule(seconds=st.sampled_from([1.0, 20.0, 61.0, 600.0]))
    def later(self, seconds: float) -> None:
        self.ask(lambda: self.rig.later(seconds))

    @rule(is_full=st.booleans())
    def fill_disk(self, is_full: bool) -> None:
        self.is_full = is_full

    @rule(times=st.integers(1, 3))
    def look(self, times: int) -> None:
        self.rig.look(times)

    @rule()
    def restart(self) -> None:
        self.rig = self.rig.again(on_commit=self.committing)
        if not self.is_full:
            for key, number in self.keys.items():
                assert self.rig.job(number).spec.name == key

    @invariant()
    def what_is_stored_is_what_is_known(self) -> None:
        rig = self.rig
        assert rig.service_state.last_number == len(self.keys)
        for number in self.keys.values():
            stored = rig.store.job(number)
            assert stored is not None
            assert stored == rig.service_state.jobs.get(number, stored)
            assert (stored.status in ENDED) == (number not in rig.service_state.jobs)

    def teardown(self) -> None:
        """In the end all jobs end: devices are back, the disk has room, what runs exits."""
        self.is_full, self.executor.are_stubborn = False, False
        self.executor.devices = self.devices
        for _ in range(40):
            for number in self.keys.values():
                self.ask(lambda number=number: self.rig.change("resume", number))
                if self.rig.job(number).spec.gang > 2:
                    self.ask(lambda number=number: self.rig.change("cancel", number))
            self.rig.look(3)
            for name in self.executor.running():
                self.executor.exit(name, 0)
            self.rig.later(61.0)
            if not self.rig.service_state.jobs:
                break
        assert not self.rig.service_state.jobs, "every job ends"
        self.rig.die()
        shutil.rmtree(self.folder)


TestAnythingHappens = AnythingHappens.TestCase
TestAnythingHappens.settings = settings(
    derandomize=True, deadline=None, max_examples=20, stateful_step_count=40
)
