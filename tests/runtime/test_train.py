"""`hocket.prepare`: a person's own loop on a plan trains as plain PyTorch does, bit for bit."""

import copy

import pytest
import torch
from runtime.small_zoo import SMALL_ZOO
from runtime.train_loops import (
    adamw,
    assert_loops_agree,
    assert_same_state,
    plain_loss,
    plain_steps,
    random_plan,
)
from runtime.train_models import USER_MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.base.errors import UsageError
from hocket.capture import CaptureWarning
from hocket.cost.measured_steps import read_runs
from hocket.runtime.training_loop import NUM_DRIFTING, Watch


@pytest.mark.filterwarnings("ignore:OPTForCausalLM is placed by modules")
@pytest.mark.parametrize("name", USER_MODELS)
def test_models_as_people_write_them_train_as_in_plain_pytorch(name):
    assert_loops_agree(USER_MODELS[name], seed=len(name), steps=8)


def zoo(name):
    def build():
        model, batch = SMALL_ZOO[name]()
        return model, [batch], None

    return build


@pytest.mark.parametrize("name", ["bert-large", "lstm"])
def test_zoo_models_train_as_in_plain_pytorch(name):
    assert_loops_agree(zoo(name), seed=len(name), steps=4)


class Early(nn.Module):
    """Stops where the data says so."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.mean() > 0.05:
                break
        return self.out(x).square().mean()


class SparseWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(1)).square().mean()


@pytest.mark.parametrize("build", [
    lambda: (Early(), [torch.randn(3, 4) for _ in range(4)], None),
    lambda: (SparseWords(), [torch.randint(0, 20, (3, 5)) for _ in range(2)], None),
])  # fmt: skip
def test_a_model_that_cannot_be_recorded_trains_by_modules_and_says_what_is_lost(build):
    torch.manual_seed(0)
    model, batches, _ = build()
    twin = copy.deepcopy(model)
    with pytest.warns(CaptureWarning, match="placed by modules.*are lost"):
        train = hocket.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3), batches[0],
                               on="2xv100-16g")  # fmt: skip
    ours = [train.step(batch).item() for batch in batches]
    assert ours == plain_steps(twin, torch.optim.SGD(twin.parameters(), lr=0.3), batches)
    assert_same_state(model, twin)
    assert "depend" in train.lost


class MeanKept(nn.Module):
    """Gives its buffer another tensor instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, rows):
        out = self.body(rows)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return (out - self.mean).square().mean()


class DrawnAgain(nn.Module):
    """Its dropout draws the same mask again when it is recomputed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        self.out = nn.Linear(6, 2)

    def forward(self, rows):
        return self.out(checkpoint(self.body, rows, use_reentrant=False)).square().mean()


class Renormed(nn.Module):
    """Rows of its embedding are made shorter before they are read."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4, max_norm=0.5)

    def forward(self, rows):
        return self.embed(rows.abs().long() % 6).sum(1).square().mean()


@pytest.mark.parametrize("build", [MeanKept, Renormed])
def test_what_calls_alone_do_not_show_is_left_to_pytorch(build):
    with pytest.warns(CaptureWarning, match="does not show all"):
        assert_loops_agree(
            lambda: (build(), [torch.randn(5, 6) for _ in range(3)], None), 3, steps=4
        )


def test_checkpoints_of_the_model_with_dropout_are_traced(recwarn):
    assert_loops_agree(
        lambda: (DrawnAgain(), [torch.randn(5, 6) for _ in range(3)], None), 3, steps=4
    )
    assert not recwarn.list


def test_hooks_of_parameters_are_part_of_the_step():
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(3, 6, 4)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    how = {"forward": lambda net, rows: net(rows).square().mean()}
    train = hocket.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.3), batches[0], on="2xv100-16g", **how
    )
    ours = [train.step(batch).item() for batch in batches]
    assert ours == plain_steps(twin, torch.optim.SGD(twin.parameters(), lr=0.3), batches, **how)
    assert train.lost == ""


def test_hooks_that_run_when_a_gradient_is_there_run():
    def clamp(parameter):
        parameter.grad.clamp_(-1e-3, 1e-3)

    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(3, 6, 4)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each[0].weight.register_post_accumulate_grad_hook(clamp)
    how = {"forward": lambda net, rows: net(rows).square().mean()}
    with pytest.warns(CaptureWarning, match=r"a hook runs when the gradient of '0\.weight'"):
        train = hocket.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.3), batches[0], on="2xv100-16g", **how
        )
    ours = [train.step(batch).item() for batch in batches]
    assert ours == plain_steps(twin, torch.optim.SGD(twin.parameters(), lr=0.3), batches, **how)


def test_the_loop_of_plain_pytorch_works_as_it_is():
    torch.manual_seed(3)
    model, batches, forward = USER_MODELS["digits"]()
    twin = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(twin)
    plan = random_plan(model, optimizer, batches[0], 3, forward)
    train = hocket.prepare(model, optimizer, batches[0], plan=plan, forward=forward)
    torch.manual_seed(3)
    losses = []
    for batch in batches:
        loss = train(batch)
        (3 * loss).backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(3)
    for batch, ours in zip(batches, losses, strict=True):
        loss = plain_loss(twin, batch, forward)
        (3 * loss).backward()
        assert loss.item() == ours
        plain.step()
        plain.zero_grad()
    assert_same_state(model, twin)


def test_evaluation_changes_nothing_and_gives_what_the_model_gives():
    torch.manual_seed(4)
    model, batches, forward = USER_MODELS["digits"]()
    optimizer = adamw(model)
    train = hocket.prepare(model, optimizer, batches[0], forward=forward,
                           plan=random_plan(model, optimizer, batches[0], 4, forward))  # fmt: skip
    train.step(batches[0])
    before = copy.deepcopy(model.state_dict())
    loss = train.evaluate(batches[1])
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    model.eval()
    assert loss.item() == plain_loss(model, batches[1], forward).item()


def test_outputs_come_back_in_the_form_of_the_model():
    torch.manual_seed(5)
    model, batches, _ = USER_MODELS["quantized"]()
    optimizer = adamw(model)
    plan = random_plan(model, optimizer, batches[0], 5)
    train = hocket.prepare(model, optimizer, batches[0], plan=plan)
    expected = model(*batches[0])
    train.step(batches[0])
    assert train.outputs["error"].item() == expected["error"].item()
    assert train.outputs["out"] is None
    kept = hocket.prepare(model, optimizer, batches[0], plan=plan, outputs=True)
    kept.step(batches[0])
    assert kept.outputs["out"].shape == (5, 1)
    model.eval()
    assert torch.equal(kept.predict(batches[1])["out"], model(*batches[1])["out"])


def test_other_shapes_are_recorded_once_and_bounded():
    torch.manual_seed(6)
    model, batches, _ = USER_MODELS["unrolled"]()
    twin = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(twin)
    train = hocket.prepare(model, optimizer, batches[0], max_shapes=2,
                           plan=random_plan(model, optimizer, batches[0], 6))  # fmt: skip
    varied = [batches[0], torch.randn(1, 4, 4), batches[1], torch.randn(1, 4, 4)]
    assert [train.step(b).item() for b in varied] == plain_steps(twin, plain, varied)
    further = [torch.randn(1, 3, 4), batches[0], torch.randn(1, 2, 4)]
    with pytest.warns(CaptureWarning, match="more than 2 shapes") as told:
        losses = [train.step(b).item() for b in further]
    assert losses == plain_steps(twin, plain, further)
    assert len(told) == 1


def test_a_batch_that_differs_is_refused_with_what_differs():
    model, batches, _ = USER_MODELS["quantized"]()
    optimizer = adamw(model)
    train = hocket.prepare(model, optimizer, {"x": batches[0][0], "y": batches[0][1]},
                           on="2xv100-16g")  # fmt: skip
    with pytest.raises(UsageError, match="no 'y'"):
        train.step({"x": batches[0][0]})
    with pytest.raises(UsageError, match="'x' is of type float64, planned was float32"):
        train.step({"x": batches[0][0].double(), "y": batches[0][1]})
    other, _, _ = USER_MODELS["unrolled"]()
    with pytest.raises(UsageError, match="gives another graph"):
        hocket.prepare(other, adamw(other), torch.randn(2, 5, 4),
                       plan=random_plan(model, optimizer, batches[0], 0))  # fmt: skip


def test_padding_makes_one_shape_of_many():
    torch.manual_seed(7)
    model, batches, _ = USER_MODELS["tied"]()
    optimizer = adamw(model)
    train = hocket.prepare(model, optimizer, batches[0], on="1xv100-16g", max_shapes=1,
                           pad=hocket.PadTo(8, values={"labels": -100}))  # fmt: skip
    for length in (3, 6, 8):
        short = {key: value[:, :length] for key, value in batches[1].items()}
        expected = train.evaluate({**short})
        assert torch.isfinite(train.step(short))
        assert torch.isfinite(expected)


def test_draws_with_a_seed_do_not_depend_on_the_placement():
    losses = []
    for seed in range(2):
        torch.manual_seed(8)
        model, batches, forward = USER_MODELS["digits"]()
        optimizer = adamw(model)
        plan = random_plan(model, optimizer, batches[0], seed, forward)
        train = hocket.prepare(model, optimizer, batches[0], plan=plan, forward=forward, seed=11)
        torch.manual_seed(seed)
        losses.append([train.step(batch).item() for batch in batches])
    assert losses[0] == losses[1]


def test_modes_and_frozen_parameters_may_change_between_steps():
    torch.manual_seed(9)
    model, batches, forward = USER_MODELS["digits"]()
    twin = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(twin)
    plan = random_plan(model, optimizer, batches[0], 9, forward)
    train = hocket.prepare(model, optimizer, batches[0], plan=plan, forward=forward)
    train.step(batches[0])
    model.features.eval()
    model.classify.weight.requires_grad_(False)
    train.step(batches[1])
    torch.manual_seed(9)
    USER_MODELS["digits"]()
    plain_steps(twin, plain, batches[:1], forward=forward)
    twin.features.eval()
    twin.classify.weight.requires_grad_(False)
    plain_steps(twin, plain, batches[1:2], forward=forward)
    assert_same_state(model, twin)


def test_a_timed_step_is_a_step_and_can_be_reported(tmp_path):
    torch.manual_seed(10)
    model, batches, forward = USER_MODELS["digits"]()
    twin = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(twin)
    plan = random_plan(model, optimizer, batches[0], 10, forward)
    train = hocket.prepare(model, optimizer, batches[0], plan=plan, forward=forward)
    with pytest.raises(UsageError, match="no step was timed"):
        train.report(tmp_path / "page.html", tmp_path / "trace.json")
    torch.manual_seed(10)
    ours = [train.step(batch, timed=True).item() for batch in batches]
    torch.manual_seed(10)
    assert ours == plain_steps(twin, plain, batches, forward=forward)
    assert_same_state(model, twin)
    train.report(tmp_path / "page.html", tmp_path / "trace.json", tmp_path / "run.json")
    assert read_runs([tmp_path / "run.json"])[0].measured_s > 0
    assert "<html" in (tmp_path / "page.html").read_text()[:200].lower()
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert train.progress().startswith(f"step 3: loss {ours[-1]:.4g}, ")
    # The plan's GPUs are simulated on the CPU, so measured times are not compared with them.
    assert train.progress().endswith("predicted on the planned devices")
    assert repr(train).endswith(f", {train.progress()})")


def test_drift_is_told_once_with_its_cause():
    watch = Watch(predicted_s=1e-9)
    loss, batch = torch.tensor(1.0), torch.zeros(4, 2)
    told = [watch.note(loss, batch) for _ in range(2 * NUM_DRIFTING)]
    assert told.count(True) == 1
    assert told.index(True) == NUM_DRIFTING
    assert watch.line(20).endswith("predicted")


def test_a_model_without_a_loss_is_trained_with_a_warning_that_says_what_is_minimised():
    model, batch = nn.Linear(4, 3), torch.randn(2, 4)
    with pytest.warns(CaptureWarning, match=r"Linear returns no loss.*mean of its output.*loss="):
        hocket.prepare(model, adamw(model), batch, on="1xv100-16g")
