"""Plans do not hang on how Python hashes strings, nor on threads, folder or locale."""

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


def test_plans_are_the_same_with_every_hash_seed_number_of_threads_folder_and_locale(tmp_path):
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
    )
    surroundings = (
        ({"PYTHONHASHSEED": "1"}, None),
        ({"PYTHONHASHSEED": "2", "LC_ALL": "C", "LANG": "tr_TR", **one_thread}, tmp_path),
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, **variables},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for variables, folder in surroundings
    }
    assert len(said) == 1
    assert "[" in said.pop()
