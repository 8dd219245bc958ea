"""Published graphs, where they are at hand: all of them load, plan, verify and simulate."""

from pathlib import Path

import numpy as np
import pytest

from hocket.api.planned import best_of
from hocket.base.errors import NoFeasiblePlanError
from hocket.graph.files import read_graph
from hocket.plan.make import make_problem
from hocket.planners.compare import compare
from hocket.simulate.engine import simulate
from hocket.simulate.verify import verify

DATA = Path(__file__).parents[3] / "shared" / "data"
PARTITIONING = sorted((DATA / "placement" / "dnn-partitioning").glob("*-inputs/*/*.json"))
PIPEDREAM = sorted((DATA / "placement" / "pipedream").rglob("*.txt"))
GRAPHS = [*PARTITIONING, *(path for path in PIPEDREAM if path.name != "LICENSE.txt")]

pytestmark = pytest.mark.skipif(not GRAPHS, reason="no ../shared/data beside the repository")

QUICK = ("one-device", "m-topo", "m-etf", "pardnn")


def _name(path: Path) -> str:
    return "/".join(path.parts[-3:])


@pytest.mark.parametrize("path", GRAPHS, ids=_name)
def test_public_graph_plans_and_simulates_on_four_cards(path):
    planned = best_of(compare(make_problem(read_graph(path), "4xv100-32g"), QUICK))
    verify(planned.plan, planned.problem)
    assert simulate(planned.problem, planned.plan).makespan_s == planned.step_s
    used = {len(set(c.plan.device_of.tolist())) for c in planned.comparison.candidates}
    if planned.problem.graph.works.any():
        assert max(used) > 1, "no candidate uses a second device"


@pytest.mark.parametrize("path", PARTITIONING, ids=_name)
def test_public_graph_plans_on_the_devices_of_its_own_file(path):
    graph = read_graph(path)
    problem = make_problem(graph, "file")
    stated = graph.meta["cluster"]
    assert problem.cluster.num_devices == stated["accelerators"] + stated["cpus"]
    try:
        planned = best_of(compare(problem, QUICK))
    except NoFeasiblePlanError:
        pytest.fail("a processor of the file holds everything, so one-device always fits")
    verify(planned.plan, problem)
    # The file's own terms: only node sizes count as memory, so peaks add up to them.
    held = int(problem.graph.held_bytes.sum())
    assert int(np.sum(planned.timeline.peak_bytes)) == held
