"""Learning rates, attention kernels and the end of a training; sub-models of the same widths."""

import pytest
import torch
from torch import nn

from hocket.base.errors import RunError
from hocket.classes.settings import NetTraining
from hocket.classes.stepping import Learner, rate_share
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


def made(kind=Small, count=3, **given):
    nets = []
    for seed in range(count):
        torch.manual_seed(seed)
        nets.append(kind(**given))
    return nets


def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 3, 6, 6, generator=generator), torch.arange(40) % 6


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


def test_a_training_that_diverges_is_an_error():
    recipe = NetTraining(steps=9, batch=20, learning_rate=1e37)
    with pytest.raises(RunError, match="ran away"):
        train_parts(made(), GROUPS, None, Labelled(*images()), recipe)
