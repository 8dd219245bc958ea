"""What a planner is."""

from __future__ import annotations

from collections.abc import Callable

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem

Planner = Callable[[Problem, Plan], Plan]
"""Pure: the same problem and plan give the same plan, byte for byte."""
