"""Throughputs of models on device types, predicted or planned; imports the planners."""

from __future__ import annotations

from hocket.fleet.throughputs.planned import plan_gangs, planned_throughputs
from hocket.fleet.throughputs.predict import predict
from hocket.fleet.throughputs.servers import find_servers
from hocket.fleet.throughputs.table import stacked, throughputs_to_dict, write_throughputs

__all__ = [
    "find_servers",
    "plan_gangs",
    "planned_throughputs",
    "predict",
    "stacked",
    "throughputs_to_dict",
    "write_throughputs",
]
