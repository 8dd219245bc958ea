"""Traces of jobs: read from published formats, or generated."""

from __future__ import annotations

from hocket.fleet.traces.files import read_trace
from hocket.fleet.traces.generate import generate_trace
from hocket.fleet.traces.trace import Trace, write_trace_csv

__all__ = ["Trace", "generate_trace", "read_trace", "write_trace_csv"]
