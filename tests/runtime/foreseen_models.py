"""Models whose own code does what blocks do not see: sums, skips and parts outside of modules.

`build()` gives (model, batch, how a batch becomes a loss).
"""

import torch
from runtime import hf_models
from runtime.budget_models import MODELS, classified
from torch import nn
from torch.nn import functional


class SumsOutside(nn.Module):
    """Convolutions that the model itself adds to what they are made of."""

    def __init__(self, width=16, num_blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class CalledTwice(nn.Module):
    """Layers that are called again and again, each time added to what they are made of; one of them
    calls a norm in its middle that is not its own, so that one call looks like two."""

    def __init__(self, width=32, num_layers=3, num_loops=2):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(_Borrower(width) for _ in range(num_layers))
        self.layers[-1].borrowed.append(self.norm)
        self.num_loops = num_loops
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for _ in range(self.num_loops):
            for layer in self.layers:
                x = x + layer(x)
        return self.head(x.mean(1))


class _Borrower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.between = nn.Sequential(nn.GELU(), nn.Dropout(0.1))
        self.borrowed = []

    def forward(self, x):
        for norm in self.borrowed:
            x = norm(x.tanh())
        return self.leave(self.between(self.enter(x)))


class Unrolled(nn.Module):
    """A cell that is called once per word, more often than there are blocks."""

    def __init__(self, width=32):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(width, 2 * width), nn.Linear(2 * width, 10)

    def forward(self, x):
        state = None
        for word in x.unbind(1):
            state = self.cell(word.tanh(), state)
        return self.head(state[0])


class Tied(nn.Module):
    """One layer many times, one right behind the other but for a module without ops."""

    def __init__(self, width=32, num_loops=6):
        super().__init__()
        self.layer, self.head = _TiedLayer(width), nn.Linear(width, 10)
        self.nothing, self.num_loops = nn.Identity(), num_loops

    def forward(self, x):
        for _ in range(self.num_loops):
            x = self.layer(self.nothing(x))
        return self.head(x.mean(1))


class _TiedLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.enter, self.leave = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.leave(functional.gelu(self.enter(self.norm(x))))


class ActivationsOutside(nn.Module):
    """Residual blocks whose last activation the model itself applies."""

    def __init__(self, width=16, num_blocks=4):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(num_blocks)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = functional.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class PartsOutside(nn.Module):
    """Layers of a transformer as lists of parts, which the model itself puts together."""

    def __init__(self, width=32, num_layers=3):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_layers))
        self.mixes = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            x = x + mix(norm(x))
        return self.head(x.mean(1))


class _Gated(torch.autograd.Function):
    """Saves three tensors, and reads two of them in its backward pass."""

    @staticmethod
    def forward(ctx, x, gate, more):
        ctx.save_for_backward(x, gate, more)
        return x * gate + more

    @staticmethod
    def backward(ctx, gradient):
        x, gate, _ = ctx.saved_tensors
        return gradient * gate, gradient * x, gradient


class _GatedLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter, self.gate, self.more = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return _Gated.apply(self.enter(x), self.gate(x), self.more(x))


class SavesMore(nn.Module):
    """Layers whose function holds more than its backward pass reads, as recurrent cells on CUDA."""

    def __init__(self, width=64, num_layers=4):
        super().__init__()
        self.layers = nn.ModuleList(_GatedLayer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def two_convolutions(taken, made):
    return nn.Sequential(
        nn.Conv2d(taken, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(),
        nn.Conv2d(made, made, 3, padding=1), nn.ReLU(),
    )  # fmt: skip


class Skips(nn.Module):
    """A U-Net whose pools and joins are the model's own."""

    def __init__(self, width=8, depth=3):
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            two_convolutions(a, b) for a, b in zip([3, *widths], widths[:-1], strict=False)
        )
        self.middle = two_convolutions(widths[-2], widths[-1])
        up = list(reversed(range(depth)))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(widths[at + 1], widths[at], 2, stride=2) for at in up
        )
        self.join = nn.ModuleList(two_convolutions(2 * widths[at], widths[at]) for at in up)
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.head(x).mean((2, 3))


class Residual(nn.Module):
    """Residual blocks between which nothing is read but sums, made anew or in place."""

    def __init__(self, width=16, *, in_place):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=in_place)
        widths = (width, width, 2 * width, 2 * width)
        self.blocks = nn.Sequential(
            *(
                _ResidualBlock(a, b, in_place)
                for a, b in zip((width, *widths), widths, strict=False)
            )
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = self.blocks(self.relu(self.norm(self.enter(x))))
        return self.head(x.mean((2, 3)))


class _ResidualBlock(nn.Module):
    def __init__(self, taken, made, in_place):
        super().__init__()
        stride = made // taken
        self.first = nn.Conv2d(taken, made, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(made, made, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(made) for _ in range(2))
        self.skip = nn.Conv2d(taken, made, 1, stride) if stride > 1 else nn.Identity()
        self.relu, self.in_place = nn.ReLU(inplace=in_place), in_place

    def forward(self, x):
        y = self.norms[1](self.second(self.relu(self.norms[0](self.first(x)))))
        if self.in_place:
            y += self.skip(x)
        else:
            y = y + self.skip(x)
        return self.relu(y)


class ChangedRows(nn.Module):
    """Layers that look at what they make as rows of rows, which modules right behind them change in
    place; some change parts of it themselves."""

    def __init__(self, width=32, num_layers=3, *, own=()):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            self.layers.extend([
                *(module(width) for module in own), nn.Linear(width, width), nn.ReLU(inplace=True),
                nn.LayerNorm(width), nn.Dropout(0.2), nn.Hardtanh(inplace=True),
            ])  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def _seen_otherwise(width):
    """Modules that only look at what others made, which is changed in place then."""
    return nn.Sequential(
        nn.Flatten(0, 1),
        *(
            module
            for _ in range(3)
            for module in (
                nn.Linear(width, width), nn.Unflatten(1, (4, -1)), nn.ReLU(inplace=True),
                nn.Flatten(1), nn.Linear(width, width), nn.ELU(inplace=True),
            )
        ),
        nn.Linear(width, 10), nn.Unflatten(0, (4, -1)), nn.Flatten(1),
    )  # fmt: skip


class _ChangedEnds(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        y[:, ::2].mul_(2.0)
        y[:, -1, :8] += 1
        return y


class _Tanh(nn.Module):
    def __init__(self, _):
        super().__init__()

    def forward(self, x):
        return torch.tanh(x)


class Rounded(nn.Module):
    """A transformer's layers without attention, whose words are told by a layer of its own."""

    def __init__(self, width=64, num_layers=4, num_words=1024):
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.layers = nn.ModuleList(_TiedLayer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, num_words, bias=False)

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _guessed_rounded(model, words):
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(words[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def _sequence(width=256, num_layers=8):
    inner = [part for _ in range(num_layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, width), *inner, nn.Linear(width, 10))


def _labelled(model, shape):
    return model.train(), (torch.randn(shape), torch.randint(10, shape[:1])), classified


def _own(build):
    model, batches, forward = build()
    return model, batches[0], forward


FORESEEN = {
    "sums outside": lambda: _labelled(SumsOutside(), (4, 16, 64, 64)),
    "called twice": lambda: _labelled(CalledTwice(), (8, 32, 32)),
    "tied": lambda: _labelled(Tied(), (8, 32, 32)),
    "unrolled": lambda: _labelled(Unrolled(), (16, 40, 32)),
    "activations outside": lambda: _labelled(ActivationsOutside(), (4, 3, 32, 32)),
    "parts outside": lambda: _labelled(PartsOutside(), (8, 32, 32)),
    "skips": lambda: _labelled(Skips(), (4, 3, 32, 32)),
    "saves more": lambda: _labelled(SavesMore(), (512, 64)),
    "sequence": lambda: _labelled(_sequence(), (512, 32)),
    "residual": lambda: _labelled(Residual(in_place=False), (8, 3, 32, 32)),
    "residual in place": lambda: _labelled(Residual(in_place=True), (8, 3, 32, 32)),
    "changed rows": lambda: _labelled(ChangedRows(), (4, 16, 32)),
    "seen otherwise": lambda: _labelled(_seen_otherwise(32), (4, 16, 32)),
    "changed ends": lambda: _labelled(ChangedRows(own=(_ChangedEnds, _Tanh)), (4, 16, 32)),
    "rounded": lambda: (Rounded(), torch.randint(256, (8, 65)), _guessed_rounded),
    "hf gpt2": hf_models.gpt2,
    "hf bert": hf_models.bert,
    "hf vit": hf_models.vit,
    "hf resnet": hf_models.resnet,
    **{f"own {name}": lambda build=build: _own(build) for name, build in MODELS.items()},
}
