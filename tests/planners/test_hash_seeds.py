"""Plans do not hang on how Python hashes strings, nor on threads, folder or locale."""

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
from planners.memory.steps import MIB, chain_step, placed

from hocket.plan.make import make_problem
from hocket.base.jsonfile import dump_json
from hocket.graph.batches import with_other_batch
from hocket.graph.generators import generate
from hocket.plan.files import plan_to_data
from hocket.plan.plan import Plan
from hocket.planners.auto import auto
from hocket.planners.memory.budget import keep_budget
from hocket.planners.parallel.compare import compare_parallel


def tell(problem, plan):
    print(dump_json(plan_to_data(problem, plan)))


for family, num_ops in (("layered", 8), ("series-parallel", 26)):
    problem = make_problem(generate(family, num_ops, 0), "2xt4")
    tell(problem, auto(problem, Plan()))

graph = chain_step(2, ops_per_layer=2)
half = chain_step(2, ops_per_layer=2, activation=4 * MIB, flops=1e11)
problem = make_problem(with_other_batch(graph, 4, half, 2), "1xv100-16g+1xt4")
comparison = compare_parallel(problem)
for candidate in comparison.candidates:
    if candidate.plan is not None:
        tell(problem, candidate.plan)
print(comparison.why)

problem, plan = placed(chain_step(3, activation=32 * MIB))
tell(problem, keep_budget(problem, plan, 300 * MIB).plan())
"""


def test_plans_are_the_same_with_every_hash_seed_number_of_threads_folder_and_locale(tmp_path):
    one_thread = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
    )
    surroundings = (
        ({"PYTHONHASHSEED": "1"}, None),
        ({"PYTHONHASHSEED": "2", "LC_ALL": "C", "LANG": "tr_TR", **one_thread}, tmp_path),
    )
    tests = str(Path(__file__).parents[1])
    said = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONPATH": tests, **variables},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for variables, folder in surroundings
    }
    assert len(said) == 1
    told = said.pop()
    assert '"parallel"' in told
    assert '"memory"' in told
