"""What ranks draw for their dropout, seen in the gradient of a weight before it."""

import torch
from torch import nn

import hocket

WIDTH = 64


class Dropped(nn.Module):
    """Two layers that can be two stages, with dropout of a half after the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return nn.functional.dropout(x * self.scale, 0.5, self.training)


def sum_of(model, x):
    return model(x).sum() / x.shape[0]


def seen(tell, configs):
    """By config: gradients of the scales in three steps, and again from after the first."""
    return {name: _draws(config) for name, config in configs.items()}


def _draws(config):
    torch.manual_seed(0)
    model, batch = Dropped(), torch.ones(config.global_batch, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = hocket.prepare(model, optimizer, batch, plan=config, forward=sum_of, seed=7)

    def step():
        train.step(batch)
        grads = [layer.scale.grad for layer in model.layers]
        return [None if grad is None else grad.tolist() for grad in grads]

    first = step()
    state = train.state_dict()
    after = [step(), step()]
    train.load_state_dict(state)
    return {"steps": [first, *after], "again": [step(), step()]}
