"""Simulator: traces run through the same ``step`` that runs a real fleet."""

from __future__ import annotations

from hocket.fleet.simulator.bind import TraceWork, bind
from hocket.fleet.simulator.elastic import elastic_speeds
from hocket.fleet.simulator.fleet_run import FleetRun
from hocket.fleet.simulator.simulate import Faults, simulate

__all__ = ["Faults", "FleetRun", "TraceWork", "bind", "elastic_speeds", "simulate"]
