"""Which loss a step minimises: said, named, or warned about."""

import pytest
import torch
from cli.terminal import hocket
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture import capture
from hocket.capture.loss import LOSSES, ChosenLoss, describe_loss

MODELS = """
import torch
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)
    def forward(self, x):
        return {"loss": self.layer(x).square().sum(), "logits": x}
def logits(batch=3):
    return nn.Linear(4, 6), torch.randn(batch, 4)
def own(batch=3):
    return Own(), torch.randn(batch, 4)
def halved(output):
    return output.sum() / 2
"""


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x):
        return {"loss": self.layer(x).square().sum()}


def test_a_graph_says_which_loss_it_holds():
    x = torch.randn(3, 4)
    found = [
        capture(Own(), x).meta["loss"],
        capture(nn.Linear(4, 6), x).meta["loss"],
        capture(nn.Linear(4, 1), x[:1]).meta["loss"],
        capture(nn.Linear(4, 6), x, loss="cross-entropy").meta["loss"],
        capture(nn.Linear(4, 6), x, loss=lambda out: out.sum()).meta["loss"].partition(" ")[0],
        capture(nn.Linear(4, 6), x, optimizer=None).meta["loss"],
    ]
    assert found == ["model", "mean", "model", "cross-entropy", "function", None]


def test_named_losses_never_fall_below_zero_except_the_mean():
    logits = torch.tensor([[-9.0, 2.0, 1.0], [-3.0, -1.0, 0.5]])
    for name in LOSSES:
        value = float(ChosenLoss(name)(logits))
        assert value >= 0 or name == "mean", name
    assert float(ChosenLoss("mean")(logits)) < 0
    expected = nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long))
    assert float(ChosenLoss("cross-entropy")(logits)) == pytest.approx(float(expected))
    assert "no loss" in describe_loss("mean")


def test_an_unknown_loss_is_refused_with_a_suggestion():
    with pytest.raises(UsageError, match="unknown loss 'cross-entropi'") as caught:
        capture(nn.Linear(4, 6), torch.randn(3, 4), loss="cross-entropi")
    assert "cross-entropy" in caught.value.hint


def test_commands_say_the_loss_warn_about_logits_and_run_what_was_planned(tmp_path):
    (tmp_path / "m.py").write_text(MODELS)
    plan = ["--on", "1xcpu-core", "--planner", "one-device"]
    said = hocket("plan", "m.py:logits", *plan, cwd=tmp_path).stderr
    assert "the mean of the model's output" in said
    assert "takes more memory; name yours with --loss" in said
    assert "loss" not in hocket("plan", "m.py:own", *plan, "-o", "o.json", cwd=tmp_path).stderr
    said = hocket(
        "plan", "m.py:logits", *plan, "--loss", "m.py:halved", "-o", "h.json", cwd=tmp_path
    )
    assert "minimised: m.py:halved" in said.stderr
    run = hocket("run", "h.json", "--steps", 2, cwd=tmp_path)
    assert "minimised: m.py:halved" in run.stderr
    assert "warning: the step minimises the mean" in hocket("run", "plan.json", cwd=tmp_path).stderr
