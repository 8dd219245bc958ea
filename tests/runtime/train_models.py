"""Models as people write them: `build()` gives (model, batches, how a batch becomes a loss)."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class Digits(nn.Module):
    """Convolutions with batch norm and dropout; returns scores, the loss is outside."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.drop = nn.Dropout(0.3)
        self.classify = nn.Linear(4 * 4 * 4, 10)

    def forward(self, image):
        return self.classify(self.drop(self.features(image).flatten(1)))


class Straight(torch.autograd.Function):
    """Rounds forward, passes gradients straight through."""

    @staticmethod
    def forward(context, x):
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(context, gradient):
        return gradient.clamp(-1, 1)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        out = self.second(Straight.apply(torch.tanh(self.first(x))))
        return {"loss": functional.mse_loss(out, y), "out": out, "error": (out - y).abs().mean()}


class Unrolled(nn.Module):
    """A Python loop over time, with state that is written in place."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 6), nn.Linear(6, 4)

    def forward(self, series):
        state, loss = series.new_zeros(series.shape[0], 6), 0.0
        for time in range(series.shape[1] - 1):
            state = self.cell(series[:, time], state)
            loss = loss + functional.smooth_l1_loss(self.out(state), series[:, time + 1])
        return loss, state


class Tied(nn.Module):
    """Words whose embedding is also the last layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8, padding_idx=0)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 17, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens, labels):
        mask = torch.triu(torch.full((tokens.shape[1],) * 2, float("-inf")), 1)
        scores = self.out(self.mix(self.embed(tokens), src_mask=mask))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Bags(nn.Module):
    """Embeddings of bags with indices and offsets, the way recommenders have them."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 6, mode="sum")
        self.dense = nn.Linear(3, 6)
        self.top = nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 1))

    def forward(self, indices, offsets, dense, click):
        joined = self.bag(indices, offsets) * self.dense(dense)
        return functional.binary_cross_entropy_with_logits(self.top(joined).squeeze(1), click)


class Frozen(nn.Module):
    """A frozen body with a head of its own, group norm, and a running count in a buffer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU())
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        for parameter in self.body[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, x, y):
        self.seen.add_(x.shape[0])
        return functional.nll_loss(self.head(self.body(x).mean(2)).log_softmax(1), y)


class HalfAutocast(nn.Module):
    """Computes in 16 bits where it may."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = self.layers(x)
        return functional.cross_entropy(scores.float(), y)


def _qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, vocab_size=40, max_position_embeddings=32, attn_implementation="sdpa",
    ))  # fmt: skip


def _opt():
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, vocab_size=40,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.1,
    ))  # fmt: skip


def _tokens(count=3):
    batches = []
    for _ in range(count):
        tokens = torch.randint(1, 40, (2, 8))
        batches.append({"input_ids": tokens, "labels": tokens})
    return batches


def _classes(count, *shape, classes):
    return [(torch.randn(4, *shape), torch.randint(0, classes, (4,))) for _ in range(count)]


def scores_to_loss(model, batch):
    """The loss is taken outside of the model."""
    image, label = batch
    return functional.cross_entropy(model(image), label)


def _bags():
    return [
        {"indices": torch.randint(0, 50, (9,)), "offsets": torch.tensor([0, 2, 5]),
         "dense": torch.randn(3, 3), "click": torch.randint(0, 2, (3,)).float()}
        for _ in range(3)
    ]  # fmt: skip


def _words():
    data = torch.randint(1, 17, (200,))
    cuts = [data[at : at + 12].view(2, 6) for at in (0, 30, 60, 61)]
    return [{"tokens": x, "labels": y} for x, y in pairwise(cuts)]


USER_MODELS = {
    "digits": lambda: (Digits(), _classes(3, 1, 8, 8, classes=10), scores_to_loss),
    "quantized": lambda: (
        Quantized(), [(torch.randn(5, 6), torch.randn(5, 1)) for _ in range(3)], None,
    ),
    "unrolled": lambda: (Unrolled(), [torch.randn(2, 5, 4) for _ in range(3)], None),
    "tied": lambda: (Tied(), _words(), None),
    "bags": lambda: (Bags(), _bags(), None),
    "frozen": lambda: (Frozen(), _classes(3, 2, 6, classes=3), None),
    "autocast": lambda: (HalfAutocast(), _classes(3, 8, classes=4), None),
    "qwen2": lambda: (_qwen2(), _tokens(), None),
    "opt": lambda: (_opt(), _tokens(), None),
    "mixed-groups": lambda: (
        nn.Sequential(nn.Linear(8, 12), nn.Hardswish(), nn.BatchNorm1d(12), nn.Linear(12, 3)),
        _classes(3, 8, classes=3), scores_to_loss,
    ),
}  # fmt: skip
