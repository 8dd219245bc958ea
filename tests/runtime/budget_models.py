"""Small models made of blocks: `build()` gives (model, batches, how a batch becomes a loss)."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, WORDS = 16, 37


class Layer(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x, scale=None):
        y = self.drop(self.down(functional.gelu(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Chain(nn.Module):
    """Layers that share an input, with a loss outside."""

    def __init__(self, num_layers=5):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x):
        scale = x.mean(-1, keepdim=True)
        y = self.enter(x)
        for layer in self.layers:
            y = layer(y, scale)
        return self.leave(y)


class TiedWords(nn.Module):
    """A language model whose embedding is also the last layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
            for _ in range(4)
        )
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words, labels):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        scores = self.out(self.norm(x)).float()
        return functional.cross_entropy(scores.view(-1, WORDS), labels.view(-1), ignore_index=0)


class Picture(nn.Module):
    """Convolutions with batch norm, in a sequence."""

    def __init__(self):
        super().__init__()
        stages = [
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            for _ in range(4)
        ]
        self.stages = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *stages)
        self.classify = nn.Linear(4 * 64, 10)

    def forward(self, image):
        return self.classify(self.stages(image).flatten(1))


class Again(nn.Module):
    """One layer that is used three times, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.layers[1].requires_grad_(False)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for number in (0, 1, 0, 2, 0):
            x = self.layers[number](x)
        return self.leave(x)


class Recurrent(nn.Module):
    """A layer whose kernel keeps memory of its own between its passes."""

    def __init__(self):
        super().__init__()
        self.words = nn.LSTM(WIDTH, 2 * WIDTH, num_layers=2, batch_first=True)
        self.leave = nn.Linear(2 * WIDTH, 3)

    def forward(self, x):
        return self.leave(self.words(x)[0][:, -1])


def classified(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def rounded(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return classified(model, batch)


def _labelled(model, shape, num_classes, count=3, forward=classified):
    pairs = [(torch.randn(shape), torch.randint(num_classes, shape[:1])) for _ in range(count)]
    return model.train(), pairs, forward


def _words():
    batches = [tuple(torch.randint(WORDS, (2, 4, 12))) for _ in range(3)]
    return TiedWords().train(), batches, None


MODELS = {
    "blocks": lambda: _labelled(Chain(), (32, 8), 3),
    "tied": _words,
    "picture": lambda: _labelled(Picture(), (4, 1, 8, 8), 10),
    "rounded": lambda: _labelled(Picture(), (4, 1, 8, 8), 10, forward=rounded),
    "again": lambda: _labelled(Again(), (8, WIDTH), 3),
    "recurrent": lambda: _labelled(Recurrent(), (4, 6, WIDTH), 3),
}
