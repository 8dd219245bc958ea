"""Many jobs on one cluster: policies, traces, the simulator; imports no planner."""

from __future__ import annotations

from hocket.fleet.policies import POLICIES, find_policy
from hocket.fleet.problem_file import parse_problem, read_problem
from hocket.fleet.rounds.gavel import refuse_non_gavel
from hocket.fleet.rounds.state import FleetDevice, Rules
from hocket.fleet.simulator import bind, elastic_speeds, simulate
from hocket.fleet.solve.check import throughputs, verify_allocation
from hocket.fleet.solve.prices import kernels_are_compiled as prices_are_compiled
from hocket.fleet.throughputs import read_throughputs
from hocket.fleet.traces import read_trace

__all__ = [
    "POLICIES",
    "FleetDevice",
    "Rules",
    "bind",
    "elastic_speeds",
    "find_policy",
    "parse_problem",
    "prices_are_compiled",
    "read_problem",
    "read_throughputs",
    "read_trace",
    "refuse_non_gavel",
    "simulate",
    "throughputs",
    "verify_allocation",
]
