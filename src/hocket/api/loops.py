"""Serial loops: what may run in parallel, and why not."""

from __future__ import annotations

from hocket.loops.backends.inturn import run_in_turn
from hocket.loops.explain import explain_data, explain_source
from hocket.loops.runner import SiteRunner
from hocket.loops.settings import Settings
from hocket.loops.source import parsed_source

__all__ = [
    "Settings",
    "SiteRunner",
    "explain_data",
    "explain_source",
    "parsed_source",
    "run_in_turn",
]
