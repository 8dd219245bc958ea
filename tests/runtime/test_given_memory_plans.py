"""Given memory plans: reports about them, and about those that exceed the budget."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from runtime.budget_models import MODELS
from torch import nn

import hocket
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import parse_bytes
from hocket.capture import capture
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.files import SavedPlan, read_plan, write_plan
from hocket.plan.sections import Memory
from hocket.planners.memory.given_budget import budget_of
from hocket.runtime.batches import settled
from hocket.runtime.planned_model import ModelSource
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunOptions
from hocket.view import fit as view

TOO_FEW_BYTES = 2_000


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, rows):
        return self.layers(rows).square().mean()


def test_a_plan_that_holds_more_than_its_budget_is_refused_with_a_budget_that_is_kept():
    model, rows = Net(), torch.randn(8, 16)
    fitted = hocket.fit(capture(model, rows, device="cpu", optimizer="sgd"), "1xh200", "1GiB")
    plan = fitted.plan()
    plan = plan.having(replace(plan[Memory], budget_bytes=(TOO_FEW_BYTES,)))
    saved = SavedPlan(fitted.frontier.problem, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NoFeasiblePlanError, match="its plan allows") as refused:
        hocket.prepare(model, optimizer, rows, plan=saved)
    (named,) = re.findall(r'memory="(\S+)"', refused.value.hint)
    assert parse_bytes(named) > TOO_FEW_BYTES
    kept = hocket.prepare(model, optimizer, rows, memory=named, on="1xh200").memory
    assert kept.peak_bytes <= parse_bytes(named)
    # Nothing leaner is there: a tenth less is refused by prepare, too.
    with pytest.raises(NoFeasiblePlanError):
        hocket.prepare(model, optimizer, rows, memory=int(parse_bytes(named) * 0.9), on="1xh200")


def test_fit_run_and_prepare_tell_the_same_seconds(tmp_path):
    torch.manual_seed(0)
    model, batches, _ = MODELS["tied"]()
    batch = settled(batches[0])
    graph = capture(model, batch, device="cpu")
    # A slow host still updates when the next step begins, which makes one among many shorter,
    # where updates are asynchronous.
    machine = replace(cluster_from_text("1xcpu-core"), host_update_bps=2e8)
    loose = hocket.fit(graph, machine, async_update=True)
    fit = replace(loose, budget_bytes=loose.smallest_bytes)
    problem, plan = fit.frontier.problem, fit.plan()
    assert plan.claims.step_s > 1.01 * fit.chosen.step_s
    # The simulator may be a little beside what a step really holds.
    plan = plan.having(replace(plan[Memory], budget_bytes=(2 * fit.budget_bytes,)))
    write_plan(tmp_path / "plan.json", problem, plan)
    saved = read_plan(tmp_path / "plan.json")

    def told(saved):
        source = ModelSource(copy.deepcopy(model), batch)
        ran = run_plan(saved.problem, saved.plan, RunOptions(steps=1), source=source)
        own = copy.deepcopy(model)
        train = hocket.prepare(own, torch.optim.AdamW(own.parameters()), batch, plan=saved)
        return ran.predicted_step_s, train.memory.step_s, train.watch.predicted_s

    assert told(saved) == (view.data(fit)["step_s"],) * 3
    older = replace(plan, claims=replace(plan.claims, repeated_step_s=None))
    assert told(SavedPlan(problem, older)) == (plan.claims.step_s,) * 3


def test_steps_of_devices_that_are_only_played_are_not_predicted():
    model, rows = Net(), torch.randn(8, 16)
    fitted = hocket.fit(capture(model, rows, device="cpu", optimizer="sgd"), "1xh200", "1GiB")
    saved = SavedPlan(fitted.frontier.problem, fitted.plan())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert hocket.prepare(model, optimizer, rows, plan=saved).watch.predicted_s is None
    asked = hocket.prepare(model, optimizer, rows, memory="1GiB", on="1xh200")
    assert asked.watch.predicted_s is None


@pytest.mark.parametrize("memory", [[8], None, 2j])
def test_a_budget_of_another_type_is_refused(memory):
    with pytest.raises(UsageError, match="is not a number of bytes"):
        budget_of(memory)


def test_another_model_than_the_planned_one_is_not_blamed_on_pytorch():
    model, rows = Net(), torch.randn(8, 16)
    fitted = hocket.fit(capture(model, rows, device="cpu", optimizer="sgd"), "1xh200", "1GiB")
    optimizer = torch.optim.Adam(model.parameters())
    saved = SavedPlan(fitted.frontier.problem, fitted.plan())
    with pytest.raises(UsageError, match="another graph than the plan's") as refused:
        hocket.prepare(model, optimizer, rows, plan=saved)
    assert "PyTorch" not in refused.value.hint
