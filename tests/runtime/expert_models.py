"""Small mixtures of experts: a list of modules, or batched matrices multiplied in several ways."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, HIDDEN, EXPERTS, WORDS = 16, 64, 6, 32


class Listed(nn.Module):
    """Experts that are modules; each has its share of the rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        parts = self.norm(x).flatten(0, 1).chunk(EXPERTS)
        mixed = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        return x + torch.cat(mixed).view_as(x)


class Batched(nn.Module):
    """Experts that are matrices of two parameters; ``multiply`` says how."""

    def __init__(self, multiply, is_turned=False):
        super().__init__()
        sides = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
        up, down = (reversed(each) if is_turned else each for each in sides)
        self.norm, self.multiply = nn.LayerNorm(WIDTH), multiply
        self.up = nn.Parameter(torch.randn(EXPERTS, *up) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, *down) / HIDDEN**0.5)

    def forward(self, x):
        rows = self.norm(x).flatten(0, 1).view(EXPERTS, -1, WIDTH)
        made = self.multiply(functional.gelu(self.multiply(rows, self.up)), self.down)
        return x + made.reshape(x.shape)


class Sorted(nn.Module):
    """Experts that rows choose; rows are sorted by expert, as Transformers does it."""

    def __init__(self):
        super().__init__()
        self.norm, self.route = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x):
        rows = self.norm(x).flatten(0, 1)
        weight, chosen = self.route(rows).softmax(-1).max(-1)
        chosen, order = chosen.sort()
        counts = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        made = functional.grouped_mm(rows[order], self.up.transpose(-2, -1), offs=ends)
        made = functional.grouped_mm(functional.gelu(made), self.down, offs=ends)
        mixed = torch.zeros_like(rows).index_copy(0, order, made * weight[order, None])
        return x + mixed.view_as(x)


WAYS = {
    "bmm": (torch.bmm, False),
    "turned": (lambda rows, matrices: rows @ matrices.mT, True),
    "einsum": (lambda rows, matrices: torch.einsum("emk,ekn->emn", rows, matrices), False),
    "from the left": (lambda rows, matrices: torch.bmm(matrices, rows.mT).mT, True),
}


class Mixture(nn.Module):
    """A language model of layers of experts, which returns its loss."""

    def __init__(self, make_layer, num_layers=3):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(make_layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, labels):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


MODELS = {
    "listed": lambda: Mixture(Listed),
    "sorted": lambda: Mixture(Sorted).bfloat16(),
} | {name: lambda how=how: Mixture(lambda: Batched(*how)) for name, how in WAYS.items()}


def words(count):
    """Batches of words and labels."""
    return [tuple(torch.randint(WORDS, (2, 4, EXPERTS))) for _ in range(count)]
