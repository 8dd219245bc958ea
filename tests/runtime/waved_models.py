"""Models whose waves are compared with accumulation, and the fit of one of them."""

import copy

import torch
from torch import nn

from hocket.capture.attention import ACCELERATOR
from hocket.capture.perform import draw_seed
from hocket.capture.sizes import capture_sizes
from hocket.plan.make import make_problem
from hocket.planners.waves.wave_search import fit_waves


class Net(nn.Module):
    """Draws numbers, keeps statistics and uses a weight twice."""

    def __init__(self, width=32, depth=3):
        super().__init__()
        self.body = nn.Sequential(*(
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)
            )
            for _ in range(depth)
        ))  # fmt: skip
        self.out = nn.Linear(width, width)

    def forward(self, rows):
        return self.out(self.body(self.out(rows))).pow(2).mean()


class Attends(nn.Module):
    """Attention that drops or not, and dropout behind it."""

    def __init__(self, dropped, width=16, depth=3):
        super().__init__()
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.drop, self.dropped = nn.Dropout(0.2), dropped

    def forward(self, rows):
        for mix in self.mixes:
            query, key, value = (
                each.unflatten(-1, (4, -1)).transpose(1, 2) for each in mix(rows).chunk(3, -1)
            )
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, dropout_p=self.dropped
            )
            rows = rows + self.drop(attended.transpose(1, 2).flatten(-2))
        return rows.pow(2).mean()


def fitted(depth):
    torch.manual_seed(0)
    model, batch = Net(depth=depth), torch.randn(1024, 32)
    graph = capture_sizes(model, batch, device=ACCELERATOR)
    problem = make_problem(graph, "1xv100-16g")
    return model, batch, fit_waves(problem, num_waves=4)


def accumulated(case, num_waves=4, steps=3):
    """Losses and state of the same microbatches, one after the other, in plain PyTorch."""
    model, batch = copy.deepcopy(case[0]), case[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(1, steps + 1):
        torch.manual_seed(draw_seed(0, step, 0))
        parts = []
        for rows in batch.chunk(num_waves):
            loss = model(rows)
            (loss / num_waves).backward()
            parts.append(loss.detach() / num_waves)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).sum(0).item())
    return losses, model.state_dict()
