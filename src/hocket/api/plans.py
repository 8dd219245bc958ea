"""Plans: files, sections, checks, simulation."""

from __future__ import annotations

from hocket.kernels.progress import tell_before_compiling
from hocket.plan.divided import DividedTraining
from hocket.plan.files import SavedPlan, plan_bytes, read_plan, section_names, write_plan
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.schema import json_schema
from hocket.plan.sections import Memory, PlacedDivision, Placement
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.step import carried_out
from hocket.simulate.verify import violations

__all__ = [
    "DividedTraining",
    "Memory",
    "PlacedDivision",
    "Placement",
    "Plan",
    "Problem",
    "SavedPlan",
    "carried_out",
    "json_schema",
    "plan_bytes",
    "read_plan",
    "section_names",
    "simulate",
    "tell_before_compiling",
    "violations",
    "write_plan",
]
