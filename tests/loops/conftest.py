"""The loops of these tests are small: they are run in parallel even where one core is faster."""

from __future__ import annotations

import pytest

from hocket.loops import decide


@pytest.fixture(autouse=True)
def _always_parallel(monkeypatch):
    monkeypatch.setattr(decide, "LEAST_SPEED_UP", 0.0)
