"""Loops of these tests are small: they run in parallel or compiled even where that is slower."""

from __future__ import annotations

import pytest

from hocket.loops import decide, decision_cache


@pytest.fixture(autouse=True)
def _always_parallel(monkeypatch):
    monkeypatch.setattr(decide, "LEAST_SPEED_UP", 0.0)
    monkeypatch.setattr(decision_cache, "SHORT_S", 0.0)
