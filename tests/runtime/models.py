"""Models put together from steps that are hard to place, and tensors that share storages."""

import torch
from torch import nn

STEPS = ("linear", "relu_", "view", "add_", "write_row", "write_base", "scale", "buffer", "twice",
         "dropout", "through_view", "strided", "expand", "column")  # fmt: skip


class Patchwork(nn.Module):
    """Writes in place, looks at views, shares weights, draws, and updates buffers."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.shared = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in steps)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("table", torch.zeros(3, 4))

    def forward(self, x):
        x = self.shared(x)
        for step, layer in zip(self.steps, self.layers, strict=True):
            x = getattr(self, f"_{step}")(x, layer)
        return x.square().mean()

    def _linear(self, x, layer):
        return layer(x)

    def _relu_(self, x, layer):
        return torch.relu_(x * 1.5)

    def _view(self, x, layer):
        return x.t().reshape(4, 4)

    def _add_(self, x, layer):
        return x.clone().add_(layer(x))

    def _write_row(self, x, layer):
        y = x * 1
        y[1].mul_(2.0)
        return y + 1

    def _write_base(self, x, layer):
        y = (x * 1).contiguous()  # a view before may have transposed it
        view = y.view(2, 8)
        y.mul_(3.0)
        return view.view(4, 4) + y

    def _scale(self, x, layer):
        return x * layer.weight.detach().sum()

    def _buffer(self, x, layer):
        used = x + self.count
        self.count.add_(x.detach().mean(0))
        return used * self.count.clone()

    def _twice(self, x, layer):
        return self.shared(x)

    def _dropout(self, x, layer):
        return nn.functional.dropout(x, 0.4, training=True)

    def _through_view(self, x, layer):
        self.table[1].copy_(x.detach().sum(0))
        return x + 1

    def _strided(self, x, layer):
        y = x[:, 1:3] * 1
        part = y[1:]
        return x + part.as_strided((2, 2), (2, 1), 0).sum()

    def _expand(self, x, layer):
        return x[0].expand(4, 4) + x.mean(1, keepdim=True).expand(4, 4)

    def _column(self, x, layer):
        return torch.cat([x[:, ::2], x.t()[:, 1::2]], 1)


class FlatParameters(nn.Module):
    """Parameters that look at one storage, neither at its beginning, one of them transposed."""

    def __init__(self):
        super().__init__()
        flat = torch.randn(40)
        self.first = nn.Parameter(flat[4:20].view(4, 4))
        self.second = nn.Parameter(flat[20:36].view(4, 4).t())
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return (self.layer(x @ self.first) @ self.second).square().mean()


class OverlappingBuffers(nn.Module):
    """Buffers that overlap and are written through each other, and a parameter with gaps."""

    def __init__(self):
        super().__init__()
        base = torch.randn(6, 8)
        self.register_buffer("row", base[2])
        self.register_buffer("rows", base[1:])
        self.register_buffer("wide", torch.randn(1, 4).expand(4, 4))
        self.layer = nn.Linear(4, 4)
        self.spaced = nn.Parameter(torch.randn(8, 8)[::2, ::2])

    def forward(self, x):
        self.row.add_(x.detach().mean())
        y = self.layer(x) + self.rows[1, :4] + self.wide
        self.rows.mul_(1.5)
        return (y @ self.spaced + self.row[4:]).square().mean()


class ShiftedLabels(nn.Module):
    """A batch whose parts are one tensor, shifted."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, labels):
        return (self.layer(x) - labels).square().mean()


class NamedLikeItsBatch(nn.Module):
    """A parameter with the name of an argument."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.x).square().mean()


class LateWrite(nn.Module):
    """Returns a view that was made before the last write to its memory."""

    def forward(self, x):
        made = x * 1
        view = made.view(-1)
        made.mul_(2.0)
        return view


def shared_storages():
    """Models and batches by name."""
    tokens = torch.randn(4, 5)
    return {
        "flat parameters": (FlatParameters(), {"x": torch.randn(4, 4)}),
        "overlapping buffers": (OverlappingBuffers(), {"x": torch.randn(4, 4)}),
        "shifted labels": (ShiftedLabels(), {"x": tokens[:, :-1], "labels": tokens[:, 1:]}),
        "named like its batch": (NamedLikeItsBatch(), {"x": torch.randn(4, 4)}),
    }
