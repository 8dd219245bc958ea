"""Models that are at hand or were built without memory, and parts of a plan's batch."""

import copy

import pytest
import torch
from cli.terminal import hocket
from runtime.plain_reference import reference_steps
from torch import nn

import hocket as package
from hocket.api.planned import Planned
from hocket.base.errors import UsageError
from hocket.capture.real import BuiltForReal, made_real
from hocket.hardware.shorthand import cluster_from_text

MODELS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.arange(6.0))
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    def forward(self, x):
        return (self.layers(x) * self.weights).square().mean()
def hollow(batch=8):
    with torch.device("meta"):
        return Net(), torch.randn(batch, 6)
def solid(batch=8):
    return Net(), torch.randn(batch, 6)
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def planned():
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, batch, package.auto(model, batch, on="2xcpu-core", optimizer=optimizer)


def test_a_notebooks_model_runs_from_its_own_weights_and_stays_as_it_is(planned):
    model, batch, plan = planned
    before = copy.deepcopy(model.state_dict())
    result = plan.run(steps=3, backend="single")
    expected = reference_steps(model, batch, steps=3, optimizer="sgd")
    assert result.losses == pytest.approx(expected.losses, rel=1e-6)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_an_unknown_option_of_a_run_is_refused_with_a_suggestion(planned):
    with pytest.raises(UsageError, match="unknown option of a run 'step'") as caught:
        planned[2].run(step=3)
    assert "steps" in caught.value.hint


def test_reprs_are_one_short_line(planned):
    plan: Planned = planned[2]
    problem, timeline = plan.problem, plan.timeline
    large = cluster_from_text("64xdgx-a100-80g")
    for value in (plan, plan.plan, timeline, plan.comparison, problem, problem.graph,
                  problem.cluster, problem.costs, large):  # fmt: skip
        text = repr(value)
        assert len(text) < 200, text
        assert "\n" not in text
        assert type(value).__name__ in text


def test_a_function_that_builds_without_memory_runs_like_one_that_does_not(tmp_path):
    (tmp_path / "m.py").write_text(MODELS)
    losses = []
    for name in ("hollow", "solid"):
        plan = ["plan", f"m.py:{name}", "--on", "1xcpu-core", "--planner", "one-device"]
        hocket(*plan, "-o", f"{name}.json", cwd=tmp_path)
        run = hocket("run", f"{name}.json", "--steps", 2, "--json", cwd=tmp_path)
        losses.append(run.stdout[run.stdout.index('"losses"') : run.stdout.index('"is_finite"')])
    assert losses[0] == losses[1]


def test_a_model_that_is_there_without_memory_is_drawn_again(planned):
    with torch.device("meta"):
        model, batch = Net(), torch.randn(8, 6)
    result = package.auto(model, batch, on="1xcpu-core").run(steps=2)
    assert result.is_finite
    assert all(parameter.is_meta for parameter in model.parameters())
    first, second = (made_real(model, batch, seed=5)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_what_no_module_can_make_again_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_module("odd", nn.Module())
        model[0].odd.register_buffer("table", torch.arange(4.0))
    with pytest.raises(UsageError, match=r"'0\.odd\.table' was built on the meta device"):
        made_real(model, torch.randn(2, 4), seed=0)


def test_the_processor_takes_the_place_of_the_meta_device():
    with BuiltForReal():
        with torch.device("meta"):
            layer = nn.Linear(3, 2)
        moved = torch.zeros(2).to("meta")
        asked = torch.empty(2, device=torch.device("meta"))
    assert not any(tensor.is_meta for tensor in (layer.weight, moved, asked))
