"""A placement as a device_map, held against Accelerate itself."""

import json

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import check_device_map
from cli.terminal import hocket
from torch import nn

from hocket.api.planned import plan_graph
from hocket.base.errors import UsageError
from hocket.capture import capture
from hocket.capture.sizes import capture_sizes
from hocket.export.accelerate import device_map
from hocket.graph.generators.forward_graphs import chain
from hocket.plan.files import write_plan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel, Replica
from hocket.planners.candidates import empty_plan


class Net(nn.Module):
    """Two lists of layers, a buffer, and weights that two modules share."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.norm(x)).logsumexp(-1).mean()


@pytest.fixture(scope="module")
def problem():
    graph = capture(Net(), torch.zeros(4, dtype=torch.long), optimizer="sgd", name="net")
    return make_problem(graph, "2xv100-16g")


def placed(problem, device_of_module):
    """Every op with its module, on the device that ``device_of_module`` says."""
    graph = problem.graph
    devices = [device_of_module(graph.module_of(op)) for op in range(graph.num_ops)]
    return Plan().placing(np.array(devices, dtype=np.int32))


def layer_number(module):
    parts = module.split(".")
    return int(parts[1]) if parts[0] == "layers" else -1


def test_the_map_covers_the_model_in_as_few_entries_as_can_say_it(problem):
    plan = placed(problem, lambda module: int(layer_number(module) >= 3 or module == "norm"))
    found = device_map(problem, plan)
    assert found.elsewhere_share == 0
    assert found.device_of["layers.2"] == 0
    assert found.device_of["layers.3"] == found.device_of["norm"] == 1
    check_device_map(Net(), found.device_of)
    whole = device_map(problem, placed(problem, lambda module: 0))
    assert whole.device_of == {"": 0}


def test_what_a_map_cannot_say_is_counted(problem):
    device_of = placed(problem, lambda module: 0).device_of.copy()
    in_layer = [
        op for op in range(problem.graph.num_ops) if problem.graph.module_of(op) == "layers.1"
    ]
    device_of[in_layer[-1]] = 1
    found = device_map(problem, Plan().placing(device_of))
    assert 0 < found.elsewhere_share < 0.5


def test_accelerate_takes_the_map_of_processors(problem):
    cpus = make_problem(problem.graph, "2xcpu-core")
    plan = placed(cpus, lambda module: int(layer_number(module) >= 3))
    found = device_map(cpus, plan).device_of
    assert set(found.values()) == {"cpu"}
    model = dispatch_model(Net(), device_map=found, main_device="cpu")
    assert model(torch.zeros(4, dtype=torch.long)).isfinite()


def test_a_graph_without_modules_has_no_map():
    graph = chain(3, seed=0)
    with pytest.raises(UsageError, match="names modules"):
        device_map(make_problem(graph, "2xt4"), Plan().placing(np.array([0, 0, 1])))


def test_the_command_writes_the_map_and_refuses_the_other_kind_of_plan(tmp_path, problem):
    planned = plan_graph(problem.graph, "2xv100-16g", planners="layer-blocks")
    planned.save(tmp_path / "plan.json")
    hocket("export", "plan.json", "--to", "accelerate", "-o", "out", cwd=tmp_path)
    check_device_map(Net(), json.loads((tmp_path / "out/device_map.json").read_text()))
    refused = hocket("export", "plan.json", "--to", "megatron", cwd=tmp_path, expect=2)
    assert "megatron takes plans of hocket parallel" in refused.stderr
    assert "plan with hocket parallel" in refused.stderr


def test_what_no_other_program_can_say_is_told_alike_for_all_of_them(tmp_path):
    graph = capture_sizes(nn.Linear(4, 2), torch.zeros(4, 4))
    problem = make_problem(graph, "1xt4")
    replica = Replica(devices=problem.cluster.device_names, microbatches=(3, 1))
    plan = empty_plan(problem, "shares").having(Parallel(replicas=(replica,)))
    write_plan(tmp_path / "plan.json", problem, plan)
    for target in ("accelerate", "megatron"):
        refused = hocket("export", "plan.json", "--to", target, cwd=tmp_path, expect=2)
        assert f"{target} takes" in refused.stderr
        assert "hint: plan with" in refused.stderr
