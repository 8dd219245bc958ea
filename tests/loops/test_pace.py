"""Loops that are entered often and short: found again quickly, left to Python if it is faster."""

from __future__ import annotations

import numpy as np
import pytest

import hocket
from hocket.loops import decide, decision_cache, runner


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self):
        self.now = 0.0
        self.compiled_s, self.plain_s = 0.0, 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(runner, "time", found)
    monkeypatch.setattr(decide, "LEAST_SPEED_UP", 1.0)
    monkeypatch.setattr(decision_cache, "SHORT_S", 40e-6)
    take = runner.SiteRunner._of_serial
    end = runner.SiteRunner.end_plain

    def of_serial(self, *arguments):
        found.now += found.compiled_s
        return take(self, *arguments)

    def end_plain(self):
        found.now += found.plain_s
        return end(self)

    monkeypatch.setattr(runner.SiteRunner, "_of_serial", of_serial)
    monkeypatch.setattr(runner.SiteRunner, "end_plain", end_plain)
    return found


def total(a, n):
    s = 0.0
    for i in range(n):
        s = s * 0.5 + a[i]
        if s > 100.0:
            return -s
    return s


def entered_often(a, n):
    k, s = 0, [0.0]
    while k < n:
        s.append(0.0)
        for i in range(k, k + 3):
            a[i] = a[i] + s[0]
        k += 1
    return len(s)


@pytest.mark.parametrize("large", [1.0, 500.0])
def test_the_faster_of_both_is_taken(clock, large):
    a = np.full(8, large)
    for plain_s, execution in ((1e-6, "python"), (1e-3, "serial")):
        decorated = hocket.parallel_for(total)
        clock.compiled_s, clock.plain_s = 1e-5, plain_s
        found = {decorated(a, 8) for _ in range(200)}
        assert found == {total(a, 8)}
        assert decorated.decisions()[0].execution == execution
    assert ("plain Python takes" in str(decorated.explain())) == (execution == "python")


def test_more_work_is_looked_at_anew(clock):
    clock.compiled_s, clock.plain_s = 1e-5, 1e-6
    decorated = hocket.parallel_for(total)
    for _ in range(50):
        decorated(np.ones(8), 8)
    assert decorated.decisions()[0].execution == "python"
    decorated(np.ones(4096), 4096)
    assert decorated.decisions()[0].execution == "serial"


def test_long_compiled_calls_are_never_tried_in_python(clock):
    clock.compiled_s, clock.plain_s = 1e-3, 0.0
    decorated = hocket.parallel_for(total)
    for _ in range(20):
        decorated(np.ones(8), 8)
    assert decorated.decisions()[0].execution == "serial"


def test_loops_that_cannot_be_compiled_are_seldom_asked_for(monkeypatch):
    asked = []
    decorated = hocket.parallel_for(entered_often)
    run = runner.SiteRunner.run
    monkeypatch.setattr(runner.SiteRunner, "run", lambda self, v: asked.append(1) or run(self, v))
    a = np.zeros(400)
    assert decorated(a, 320) == entered_often(a.copy(), 320)
    assert len(asked) < 40


def test_sizes_that_change_at_every_call_do_not_analyse_every_time(monkeypatch):
    decided = []
    decide_loop = decide.LoopDecider.decide
    monkeypatch.setattr(
        decide.LoopDecider, "decide", lambda self, *a: decided.append(1) or decide_loop(self, *a)
    )
    decorated = hocket.parallel_for(total)
    a = np.ones(400)
    for n in range(200, 300):
        assert decorated(a, n) == total(a, n)
    assert len(decided) < 10
