"""Waiting for what other processes do, as long as it takes on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 200.0


def wait_until(look: Callable[[], Any], what: str = "it happened") -> Any:
    """The first true answer."""
    until_s = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < until_s, f"waited in vain until {what}"
        time.sleep(0.01)
    return found
