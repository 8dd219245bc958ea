"""hocket.prepare and hocket.run within a budget of bytes: what they keep, and what they refuse."""

import copy
import re
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from planners.memory.steps import placed
from runtime.budget_loops import loop_of
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, assert_same_state, plain_steps
from torch import nn

import hocket
from hocket.base.errors import InputFileError, NoFeasiblePlanError, UsageError
from hocket.capture import capture
from hocket.plan.files import SavedPlan
from hocket.plan.sections import Memory
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.memory.given_budget import BudgetWarning, budget_of
from hocket.runtime.batches import settled
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.planned_model import ModelSource
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunCallbacks, RunOptions
from hocket.view.measured import run_data


def test_loss_of_convolutions_stays_whole_and_the_section_says_its_budget():
    """There is no last linear layer that logits could be made of in chunks."""
    torch.manual_seed(0)
    net = [torch.nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1) for n in range(4)]
    model = torch.nn.Sequential(*net)
    batch = torch.randn(2, 3, 32, 32), torch.randint(8, (2, 32, 32))

    def forward(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    train = hocket.prepare(model, adamw(model), batch, forward=forward, memory=400_000, on="1xh200")
    assert train.memory.section.loss_chunks == 1
    assert train.memory.section.budget_bytes == (400_000,)
    assert train.memory.peak_bytes <= 400_000
    assert train.step(batch).isfinite()


@pytest.mark.parametrize("name", ["convolutions", "tied"])
def test_prepare_carries_out_what_fit_offers(name):
    torch.manual_seed(0)
    if name == "tied":
        model, batches, forward = MODELS["tied"]()
        batch = settled(batches[0])
    else:
        model = nn.Sequential(*[nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1) for n in range(4)])
        batch = torch.randn(2, 3, 32, 32), torch.randint(8, (2, 32, 32))

        def forward(model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = adamw(model)
    how = {"optimizer": planned_update(optimizer, model), "device": "cpu", "forward": forward}
    frontier = find_frontier(*placed(capture(model, batch, **how)), num_levels=4)
    sections = [plan.memory for plan in frontier.plans if plan.memory is not None]
    # Logits of a language model go in chunks, the scores of pixels do not.
    assert (max(section.loss_chunks for section in sections) > 1) is (name == "tied")
    for section in (sections[-1], max(sections, key=lambda each: each.loss_chunks)):
        ample = frontier.plan.having(replace(section, budget_bytes=(2**30,)))
        saved = SavedPlan(frontier.problem, ample)
        train = hocket.prepare(model, optimizer, batch, plan=saved, forward=forward)
        assert train.step(batch).isfinite()


def test_budget_that_is_large_enough_changes_nothing():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    twin = copy.deepcopy(model)
    train = hocket.prepare(model, adamw(model), batches[0], forward=forward, memory="1GiB")
    torch.manual_seed(1)
    ours = [train.step(batch).item() for batch in batches]
    torch.manual_seed(1)
    assert ours == plain_steps(twin, adamw(twin), batches, forward=forward)


class Labelled(torch.nn.Linear):
    def forward(self, x, y=None):
        predicted = super().forward(x)
        return {"y": predicted} if y is None else {"loss": (predicted - y).square().mean()}


def test_a_batch_that_differs_is_refused_and_trains_nothing():
    model = Labelled(3, 2)
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4, 2)}
    train = hocket.prepare(model, adamw(model), batch, memory="1MiB")
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match="the batch has no 'y'; planned: x"):
        train.step({"x": batch["x"]})
    with pytest.raises(UsageError, match="the batch has 'z', which was not planned"):
        train.step({**batch, "z": batch["x"]})
    assert torch.equal(model.weight, before)
    assert train.predict({"x": batch["x"]})["y"].shape == (4, 2)


def test_run_carries_out_a_plan_of_fit():
    torch.manual_seed(0)
    model, batches, _ = MODELS["tied"]()
    model.eval()  # a run draws its masks from a seed of its own
    graph = capture(model, batches[0], device="cpu")
    plain = hocket.fit(graph, "1xh200").chosen
    fitted = hocket.fit(graph, "1xh200", int(plain.peak_bytes * 0.6))
    source = ModelSource(copy.deepcopy(model), batches[0])
    # The simulator may be a little beside what a step really holds.
    budget = int(plain.peak_bytes * 0.7)
    plan, seen = fitted.plan(), []
    plan = plan.having(replace(plan[Memory], budget_bytes=(budget,)))
    watch = RunCallbacks(on_step=lambda number, _: seen.append(number))
    options = RunOptions(steps=3)
    result = run_plan(fitted.frontier.problem, plan, options, source=source, watch=watch)
    assert seen == [1, 2, 3]
    assert 0 < result.peak_bytes["gpu0"] <= budget
    assert result.backend == "single"
    told = run_data(fitted.frontier.problem, plan, result)["devices"][0]
    assert told["peak_bytes"]["measured"] == result.peak_bytes["gpu0"]
    with pytest.raises(UsageError, match="does not run a memory plan"):
        run_plan(fitted.frontier.problem, plan, RunOptions(backend="gloo"), source=source)
    assert len(result.losses) == 3


def test_prepare_keeps_a_budget_or_refuses():
    build = MODELS["blocks"]
    model, batches, forward = build()
    plain = hocket.prepare(model, adamw(model), batches[0], forward=forward, memory="1GiB").memory
    kept = []
    for share in (0.8, 0.5):
        model, batches, forward = build()
        budget = int(plain.peak_bytes * share)
        optimizer = adamw(model)
        tracker = MemoryTracker()
        with tracker:
            train = hocket.prepare(model, optimizer, batches[0], forward=forward, memory=budget)
            tracker.held_bytes = tracker.peak_bytes = 0
            tracker.track(train._strategy.lasting)
            tracker.track(batches[0])
            for _ in range(3):
                train.step(batches[0])
        assert tracker.peak_bytes <= budget
        kept.append(train.memory.peak_bytes)
    assert max(kept) < plain.peak_bytes
    model, batches, forward = build()
    with pytest.raises(NoFeasiblePlanError, match="the minimum-memory plan needs"):
        hocket.prepare(model, adamw(model), batches[0], forward=forward, memory="10KiB")
    with pytest.raises(UsageError, match="has 2 devices; a memory plan is for one"):
        hocket.prepare(
            model, adamw(model), batches[0], forward=forward, memory="1MiB", on="2xv100-16g"
        )
    with pytest.raises(UsageError, match="memory: 'lots' is not a number with a unit"):
        hocket.prepare(model, adamw(model), batches[0], forward=forward, memory="lots")


def test_a_budget_above_what_the_card_has_is_refused_and_one_above_its_headroom_warned_of():
    model, batches, forward = MODELS["blocks"]()
    prepare = partial(hocket.prepare, model, adamw(model), batches[0], forward=forward)
    with pytest.raises(UsageError, match=r"more than gpu0 has: 16\.0 GiB") as refused:
        prepare(memory="64GiB", on="1xv100-16g")
    usable = re.search("give it ([^,]+),", refused.value.hint).group(1)
    with pytest.warns(BudgetWarning, match="a budget of 16.0 GiB is more than tensors may fill"):
        prepare(memory="16GiB", on="1xv100-16g")
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        prepare(memory=usable, on="1xv100-16g")


@pytest.mark.parametrize("memory", [-1, 2**80, 1.5, True, float("nan"), float("inf")])
def test_a_budget_is_a_number_of_bytes(memory):
    with pytest.raises(UsageError, match="is not a number of bytes"):
        budget_of(memory)
    assert budget_of(8e9) == 8 * 10**9


def in_one_tensor(layer, start=None):
    """A layer whose parameters are views of one tensor, the bias from ``start`` on."""
    flat = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
    size = layer.weight.numel()
    start = size if start is None else start
    layer.weight = nn.Parameter(flat[:size].view_as(layer.weight))
    layer.bias = nn.Parameter(flat[start : start + layer.bias.numel()])


def deep():
    torch.manual_seed(4)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)])


def test_parameters_that_lie_in_one_tensor_keep_a_budget():
    how = {"forward": lambda model, rows: model(rows).square().mean()}
    model, twin, rows = deep(), deep(), torch.randn(8, 32)
    for number in (1, 2):
        in_one_tensor(model[number][0])
    train = hocket.prepare(model, adamw(model), rows, memory=38_000, **how)
    ours = [train.step(rows).item() for _ in range(3)]
    assert ours == plain_steps(twin, adamw(twin), [rows] * 3, **how)
    assert train.memory.section.blocks[0].update == "host"
    train.state_dict()
    assert_same_state(model, twin)


def test_parameters_that_travel_rounded_are_those_that_the_host_has_changed():
    def forward(model, rows):
        with torch.autocast("cpu", torch.bfloat16):
            return model(rows).float().square().mean()

    model, twin, rows = deep(), deep(), torch.randn(8, 32)
    section = uniform(model, 0, parameters="streamed", update="host")
    optimizer = adamw(model)
    rounded = {name: torch.bfloat16 for name, _ in model.named_parameters()}
    train = loop_of(model, optimizer, section, rows, forward, rounded=rounded)
    ours = [train.step(rows).item() for _ in range(4)]
    assert ours == plain_steps(twin, adamw(twin), [rows] * 4, forward=forward)


def test_parameters_in_the_same_bytes_are_refused():
    model, rows = deep(), torch.randn(8, 32)
    in_one_tensor(model[1][0], start=1000)
    with pytest.raises(UsageError, match=r"1\.0\.weight and 1\.0\.bias are two parameters in"):
        hocket.prepare(
            model, adamw(model), rows, memory="1MiB", forward=lambda model, x: model(x).mean()
        )


def test_a_model_is_carried_by_the_last_that_prepared_it():
    model, batches, forward = MODELS["blocks"]()
    twin, optimizer = copy.deepcopy(model), adamw(model)
    lean = partial(hocket.prepare, model, optimizer, batches[0], forward=forward, memory=70_000)
    first = lean()
    torch.manual_seed(5)
    ours = [first.step(batches[0]).item(), (train := lean()).step(batches[1]).item()]
    with pytest.raises(InputFileError):
        lean(plan="no-such-plan.json")  # a call that is refused ends nothing
    ours += [train.step(batches[0]).item()]
    plain = [batches[0], batches[1], batches[0]]
    torch.manual_seed(5)
    assert ours == plain_steps(twin, adamw(twin), plain, forward=forward)
    train.state_dict()
    assert_same_state(model, twin)
    with pytest.raises(UsageError, match=r"was given to a later hocket\.prepare"):
        first.step(batches[0])
    before = model.enter.weight.detach().clone()
    with pytest.raises(UsageError, match=r"was given to a later hocket\.prepare"):
        first.state_dict()  # which would have the weights be those that it knew
    assert torch.equal(model.enter.weight, before)


def test_a_training_without_a_plan_is_told_that_a_later_one_has_its_model():
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    optimizer = adamw(model)
    prepare = partial(hocket.prepare, model, optimizer, batches[0], forward=forward)
    first = prepare()
    first.step(batches[0])
    with pytest.raises(NoFeasiblePlanError):
        prepare(memory=1000)
    first.step(batches[0])
    second = prepare(memory=70_000)
    second.step(batches[0])
    for call in (first, first.step, first.evaluate, first.predict):
        with pytest.raises(UsageError, match=r"was given to a later hocket\.prepare"):
            call(batches[0])
    third = prepare()
    third.step(batches[0])
    with pytest.raises(UsageError, match=r"was given to a later hocket\.prepare"):
        second.step(batches[0])


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_training_goes_on_after_another_budget_for_its_model_was_refused(share):
    torch.manual_seed(0)
    model, batches, forward = MODELS["tied"]()
    twin, optimizer = copy.deepcopy(model), adamw(model)
    prepare = partial(hocket.prepare, model, optimizer, batches[0], forward=forward)
    plain = prepare(memory="1GiB").memory.peak_bytes
    train = prepare(memory=int(share * plain), accumulate=2)
    torch.manual_seed(5)
    ours = [train.step(batch).item() for batch in batches]
    with pytest.raises(NoFeasiblePlanError, match="the minimum-memory plan needs"):
        prepare(memory=1000)
    with pytest.raises(UsageError, match="not the model's"):
        hocket.prepare(model, adamw(twin), batches[0], forward=forward, memory="1GiB")
    ours += [train.step(batch).item() for batch in batches]
    torch.manual_seed(5)
    assert ours == plain_steps(twin, adamw(twin), [*batches, *batches], forward=forward,
                               accumulate=2)  # fmt: skip
    train.state_dict()
    assert_same_state(model, twin)


@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_a_model_without_memory_is_refused(memory):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(UsageError, match=r"0\.weight is on the meta device"):
        hocket.prepare(model, adamw(model), torch.randn(2, 8), memory=memory, loss=torch.sum)
