"""Plans do not hang on how Python hashes strings in this process."""

import os
import subprocess
import sys

_SCRIPT = """
from hocket.api import make_problem
from hocket.graph.generators import generate
from hocket.plan.plan import Plan
from hocket.planners.auto import auto

for family, num_ops in (("layered", 8), ("series-parallel", 40)):
    plan = auto(make_problem(generate(family, num_ops, 0), "2xt4"), Plan())
    order = None if plan.by_device is None else [ops.tolist() for ops in plan.by_device]
    priority = None if plan.priority is None else plan.priority.tolist()
    print(plan.device_of.tolist(), order, priority, sorted(plan.claims.told().items()))
"""


def test_plans_are_the_same_with_every_hash_seed():
    said = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1
    assert "[" in said.pop()
