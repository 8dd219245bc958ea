"""Nets of one form trained as one, and the rates and the end of a training."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from hocket.base.errors import RunError
from hocket.classes.cut import build_part
from hocket.classes.fit import cut_to
from hocket.classes.material import prepared
from hocket.classes.settings import NetTraining, SplitRequest
from hocket.classes.stacking import stacked
from hocket.classes.stepping import Learner, rate_share
from hocket.classes.steps import Steps
from hocket.classes.training import Labelled, train_parts

GROUPS = [(0, 1), (2, 3), (4, 5)]


class Small(nn.Module):
    """A residual block between a convolution and a linear layer."""

    def __init__(self, width=8, outputs=3):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.inner = nn.Conv2d(width, width, 3, 1, 1, groups=2)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        return self.head((x + self.inner(x)).relu().mean((2, 3)))


class Mixing(Small):
    """Reads its channels backwards, which would mix those of several nets."""

    def forward(self, x):
        return super().forward(x) + self.head(self.stem(x).flip(1).mean((2, 3)))


def made(kind=Small, count=3, **given):
    nets = []
    for seed in range(count):
        torch.manual_seed(seed)
        nets.append(kind(**given))
    return nets


def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 3, 6, 6, generator=generator), torch.arange(40) % 6


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_stacked_parts_learn_as_they_would_apart(optimizer):
    data, teacher = Labelled(*images()), made(count=1, outputs=6)[0]
    recipe = {"steps": 10, "batch": 20, "learning_rate": 0.01, "optimizer": optimizer}
    apart, together = made(), made()
    for parts, is_stacked in ((apart, False), (together, True)):
        training = NetTraining(stacked=is_stacked, **recipe)
        assert train_parts(parts, GROUPS, teacher, data, training) == 10
    untrained = made()
    for one, other, before in zip(apart, together, untrained, strict=True):
        for (name, mine), its, old in zip(
            one.state_dict().items(),
            other.state_dict().values(),
            before.state_dict().values(),
            strict=True,
        ):
            assert torch.allclose(mine.float(), its.float(), rtol=1e-3, atol=1e-4), name
            assert not torch.equal(its, old), name
        assert not other.training


def test_each_of_stacked_nets_is_clipped_by_its_own_gradients():
    """One net far off must not slow the others down."""
    nets = made()
    with torch.no_grad():
        nets[0].head.weight.mul_(1e4)
    alone = copy.deepcopy(nets[1:])
    recipe = {"steps": 2, "batch": 20, "learning_rate": 0.01}
    data = Labelled(*images())
    train_parts(nets, GROUPS, None, data, NetTraining(stacked=True, **recipe))
    train_parts(alone, GROUPS[1:], None, data, NetTraining(**recipe))
    for one, other in zip(nets[1:], alone, strict=True):
        assert torch.allclose(one.head.weight, other.head.weight, rtol=1e-3, atol=1e-5)


def test_stacked_nets_say_what_each_says_and_read_inputs_once():
    nets = [net.eval() for net in made()]
    inputs = images()[0]
    whole = stacked(nets, inputs[:1]).eval()
    expected = torch.stack([net(inputs) for net in nets])
    assert torch.allclose(whole(inputs), expected, atol=1e-5)
    first, inner = (module for module in whole.modules() if isinstance(module, nn.Conv2d))
    assert (first.in_channels, first.groups, inner.groups) == (3, 1, 6)


@pytest.mark.parametrize(
    "nets",
    [
        [Small(), Small(width=16)],
        [Mixing(), Mixing()],
        [nn.Sequential(nn.Flatten(), nn.LayerNorm(108), nn.Linear(108, 3)) for _ in range(2)],
    ],
    ids=["unlike", "mixing", "norm of another kind"],
)
def test_nets_that_cannot_be_stacked_are_left_apart(nets):
    assert stacked(nets, images()[0][:1]) is None
    recipe = NetTraining(steps=1, batch=20, stacked=True)
    before = copy.deepcopy(nets[1].state_dict())
    assert train_parts(nets, GROUPS[:2], None, Labelled(*images()), recipe) == 1
    assert any(not torch.equal(now, before[name]) for name, now in nets[1].state_dict().items())


def test_a_training_has_the_rates_of_its_schedule(monkeypatch):
    rates = []
    monkeypatch.setattr(Learner, "set_rate", lambda self, rate: rates.append(rate))
    recipe = NetTraining(steps=10, batch=20, learning_rate=2.0)
    train_parts(made(count=1), GROUPS[:1], None, Labelled(*images()), recipe)
    assert rates == pytest.approx([2 * rate_share(step / 10) for step in range(10)])
    assert rates[2] == max(rates) == 2.0


def test_steps_leave_out_the_attention_whose_gradients_may_be_no_numbers():
    (net,) = made(count=1)
    seen = []
    net.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    train_parts([net], GROUPS[:1], None, Labelled(*images()), NetTraining(steps=2, batch=20))
    assert seen == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_training_that_runs_away_is_told(is_stacked):
    recipe = NetTraining(steps=9, batch=20, learning_rate=1e37, stacked=is_stacked)
    with pytest.raises(RunError, match="ran away"):
        train_parts(made(), GROUPS, None, Labelled(*images()), recipe)


def test_alike_parts_have_one_form_and_channels_of_their_own(tmp_path):
    digits = Path(__file__).parent / "digits_data.py"
    request = SplitRequest(net=f"{digits}:net", data=f"{digits}:images", parts=3, alike=True)
    material = prepared(request, Steps(tmp_path), lambda *told: None)
    cuts = [cut_to(material, mine, 0.3 * material.whole_macs) for mine in GROUPS]
    assert len({tuple(map(len, each.kept)) for each in cuts}) == 1
    # Which channels a class asks for hangs on how a processor rounds: two parts may agree.
    assert len({each.kept for each in cuts}) > 1
    parts = [build_part(material.net, material.structure, material.example, cut) for cut in cuts]
    assert stacked(parts, material.example) is not None
