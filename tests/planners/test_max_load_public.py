"""Published max-load instances, where they are at hand: experts' values and proven optima."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from planners.max_load_cases import contiguously, freely

from hocket.graph.files import read_graph
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.max_load import dpl, pipedream, throughput
from hocket.simulate.load import max_load_s
from hocket.simulate.verify import verify

DATA = Path(__file__).parents[3] / "shared" / "data" / "placement" / "dnn-partitioning"
TABLE = DATA / "reference_max_load.csv"
ROWS = list(csv.DictReader(TABLE.read_text().splitlines())) if TABLE.exists() else []

pytestmark = pytest.mark.skipif(not ROWS, reason="no ../shared/data beside the repository")

BEYOND_THE_TABLE = {"LayerGraphs/inceptionv3_training": 122.762}
"""Optima that the table has only between bounds."""
BETTER_ANYWHERE = {
    "OperatorGraphs/bert_l-3_inference": 21.909,
    "OperatorGraphs/bert_l-3_training": 54.208,
}
CHAINS = (
    "LayerGraphs/bert24_inference", "LayerGraphs/inceptionv3_inference",
    "LayerGraphs/resnet50_training", "OperatorGraphs/bert_l-6_inference",
)  # fmt: skip
"""Instances on which our chain of blocks is the one of the authors' PipeDream baseline."""


def _name(row: dict[str, str]) -> str:
    return "/".join(Path(row["instance"]).with_suffix("").parts[-2:])


def _problem(row: dict[str, str]) -> Problem:
    return make_problem(read_graph(DATA / row["instance"]), "file")


def _expert(problem: Problem, path: Path) -> np.ndarray:
    """The split of an expert; backward ops go with their forward partners."""
    split = json.loads(path.read_text())
    op_of = {int(name.rsplit("#", 1)[1]): op for op, name in enumerate(problem.graph.op_names)}
    device_of = np.full(problem.graph.num_ops, -1)
    devices = [*split["fpgas"], *split["cpus"]]
    for device, part in enumerate(devices):
        device_of[[op_of[node] for node in part["nodes"]]] = device
    missing = device_of < 0
    device_of[missing] = device_of[problem.graph.partner[missing]]
    return device_of


@pytest.mark.parametrize("row", [r for r in ROWS if r["human_expert"]], ids=_name)
def test_load_of_an_experts_split_is_the_published_one(row):
    problem = _problem(row)
    experts, stem = DATA / "human-experts", Path(row["instance"]).stem
    path = experts / f"{stem}_expert.json"
    if not path.exists():
        path = experts / f"{stem.replace('training', 'inference')}_expert.json"
    load_ms = 1e3 * max_load_s(problem, _expert(problem, path))
    assert load_ms == pytest.approx(float(row["human_expert"]), rel=1e-5)


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_contiguous_throughput_proves_the_published_optimum(row):
    problem = contiguously(_problem(row))
    plan = throughput(problem, Plan())
    verify(plan, problem)
    load_ms = 1e3 * plan.claims.max_load_s
    assert plan.claims.proven
    if row["dp_contig_optimum"]:
        assert load_ms == pytest.approx(float(row["dp_contig_optimum"]), rel=1e-9)
    expected = BEYOND_THE_TABLE.get(_name(row), float(row["cpsat_contig_best"]))
    assert load_ms == pytest.approx(expected, rel=3e-4)


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_one_order_is_as_good_as_the_published_heuristic(row):
    plan = dpl(contiguously(_problem(row)), Plan())
    published = float(row["dpl_linearised_heuristic"])
    assert 1e3 * plan.claims.max_load_s <= published * (1 + 1e-9)


@pytest.mark.parametrize("row", [r for r in ROWS if _name(r) in CHAINS], ids=_name)
def test_pipedream_is_the_published_baseline(row):
    plan = pipedream(contiguously(_problem(row)), Plan())
    load_ms = 1e3 * plan.claims.max_load_s
    assert load_ms == pytest.approx(float(row["pipedream_baseline"]), rel=1e-6)


@pytest.mark.parametrize("row", [r for r in ROWS if _name(r) in BETTER_ANYWHERE], ids=_name)
def test_free_throughput_proves_what_no_contiguous_split_reaches(row):
    problem = freely(_problem(row))
    plan = throughput(problem, Plan())
    verify(plan, problem)
    assert plan.claims.proven
    assert 1e3 * plan.claims.max_load_s <= BETTER_ANYWHERE[_name(row)]
