"""A memory plan that is slower than predicted is exchanged once, in the midst of a training."""

import copy

import pytest
import torch
from planners.memory.steps import placed
from runtime.budget_loops import task_of
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, plain_steps

from hocket.capture import capture
from hocket.plan.sections import Memory
from hocket.planners.memory.frontier import find_frontier
from hocket.runtime.offload.dry_run import dry_runs_of
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.offload.plan_correction import (
    NUM_TIMED,
    NUM_WARM_UP,
    PlanChangeWarning,
    PlanCorrection,
)
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.strategy import LoopOptions
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop

NUM_TRIED = NUM_WARM_UP + NUM_TIMED
BUDGET = 2**30


class Times:
    """A correction that is told these times instead of measured ones."""

    def __init__(self, correction, times):
        self.correction, self.times = correction, times

    is_over = property(lambda self: self.correction.is_over)

    def note(self, step_s):
        return self.correction.note(self.times(self.correction))


@pytest.fixture
def training():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    model.eval()
    optimizer = adamw(model)
    update = planned_update(optimizer, model)
    graph = capture(model, batches[0], optimizer=update, device="cpu", forward=forward)
    frontier = find_frontier(*placed(graph), num_levels=4)
    recipe = TraceOptions(update=update, device="cpu", forward=forward)
    found = dry_runs_of(task_of(model, optimizer, batches[0], recipe))
    lean = frontier.smallest
    section = Memory(budget_bytes=(BUDGET,), blocks=lean.memory.blocks)
    strategy = found.strategy(BudgetPlan(section, lean.peak_bytes, lean.step_s))
    train = TrainingLoop(model, optimizer, strategy, LoopOptions())
    return train, PlanCorrection(found, lambda: frontier, strategy), batches, forward


def trained(train, batches, forward, times, num_steps):
    twin = copy.deepcopy(train.model)
    plain = adamw(twin)
    given = [batches[number % len(batches)] for number in range(num_steps)]
    first, correction = train._strategy, train.correction
    train.correction = Times(correction, times)
    ours = [train.step(batch).item() for batch in given]
    assert ours == plain_steps(twin, plain, given, forward=forward)
    state = train.state_dict()["model"]
    assert all(torch.equal(state[name], value) for name, value in twin.state_dict().items())
    return train._strategy is first


def test_a_plan_as_fast_as_predicted_stays(training):
    train, train.correction, batches, forward = training
    assert trained(train, batches, forward, lambda c: c.first.predicted_s, NUM_TRIED + 2)
    assert train.correction is None


def test_a_faster_plan_goes_on_and_says_so(training):
    train, train.correction, batches, forward = training
    late_s = 10 * train._strategy.predicted_s
    with pytest.warns(PlanChangeWarning, match="continues with another memory plan"):
        is_first = trained(
            train, batches, forward,
            lambda c: late_s if c._second is None else 0.5 * late_s, 2 * NUM_TRIED + 2,
        )  # fmt: skip
    assert not is_first
    section = train._strategy.budget_plan.section
    assert all(not block.is_on_host for block in section.blocks)


def test_a_plan_that_proves_slower_is_given_back(training):
    train, train.correction, batches, forward = training
    late_s = 10 * train._strategy.predicted_s
    assert trained(
        train, batches, forward,
        lambda c: late_s if c._second is None else 2 * late_s, 2 * NUM_TRIED + 2,
    )  # fmt: skip
    assert train.correction is None
