"""Memory plans and budgets that are refused say what to type instead."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import hocket
from hocket.api.memory import budget_of
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.units import parse_bytes
from hocket.capture import capture
from hocket.plan.files import SavedPlan
from hocket.plan.sections import Memory

TOO_FEW_BYTES = 2_000


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, rows):
        return self.layers(rows).square().mean()


def test_a_plan_that_holds_more_than_its_budget_is_refused_with_a_budget_that_can_be_typed():
    model, rows = Net(), torch.randn(8, 16)
    fitted = hocket.fit(capture(model, rows, device="cpu", optimizer="sgd"), "1xh200", "1GiB")
    plan = fitted.plan()
    plan = plan.having(replace(plan[Memory], budget_bytes=(TOO_FEW_BYTES,)))
    saved = SavedPlan(fitted.frontier.problem, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NoFeasiblePlanError, match="its plan allows") as refused:
        hocket.prepare(model, optimizer, rows, plan=saved)
    named = re.search(r"--memory (\S+),", refused.value.hint)
    assert named is not None
    assert 0 < parse_bytes(named[1]) < TOO_FEW_BYTES


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
