"""Samples that can be taken apart, and those that cannot."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from hocket.capture import sizes as apart
from hocket.capture.sizes import capture_sizes, samples_apart, trying_samples
from hocket.capture.zoo.experts import moe
from hocket.graph.meeting import reading_samples, where_samples_meet


class Encoder(nn.Module):
    """Draws by a module and by a function, normalises over samples, has a list of layers."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = x + functional.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return self.drop(self.norm(x))


def mean_loss(model, x):
    return model(x).square().mean()


def sum_loss(model, x):
    return model(x).square().sum()


def compared_loss(model, x):
    """Each sample against all others, as contrastive training does."""
    rows = functional.normalize(model(x), dim=-1)
    return functional.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


@pytest.mark.parametrize(
    ("loss", "is_apart"), [(mean_loss, True), (sum_loss, False), (compared_loss, False)]
)
def test_a_loss_that_looks_across_samples_is_seen(loss, is_apart):
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(9, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    found = samples_apart(model, x, forward=loss)
    assert found.is_apart == is_apart
    assert (
        "checked on a small copy" in found.message or "away from that of the whole" in found.message
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert len(model.layers) == 6


class Rounded(nn.Module):
    """Words scored under the model's own autocast, in which ``mixes`` may look across samples."""

    def __init__(self, dtype, mixes=lambda rows: rows, *, is_explicit=False):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(64, 48), nn.LayerNorm(48), nn.Linear(48, 64)
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        self.dtype, self.mixes, self.is_explicit = dtype, mixes, is_explicit

    def forward(self, words, labels):
        with torch.autocast(words.device.type, dtype=self.dtype):
            rows = self.table(words)
            if self.is_explicit:
                rows = rows.to(self.dtype)  # autocast has a part in it: weights are wide
            rows = rows + self.down(functional.gelu(self.up(rows)))
            scores = self.head(self.norm(self.mixes(rows)))
        return functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


def over_samples(rows):
    return functional.batch_norm(rows.flatten(1), None, None, training=True).view_as(rows)


def centred(rows):
    return rows - rows.mean(0, keepdim=True)


@pytest.mark.parametrize("is_explicit", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_roundings_of_16_bits_are_not_taken_for_samples_that_meet(dtype, is_explicit):
    """A GPT under bfloat16 was refused: its gradients were "0% away"."""
    torch.manual_seed(0)
    words = torch.randint(64, (8, 32))
    found = samples_apart(Rounded(dtype, is_explicit=is_explicit), (words, words))
    assert found.is_apart, found.message
    for mixes in (over_samples, centred):
        model = Rounded(dtype, mixes, is_explicit=is_explicit)
        found = samples_apart(model, (words, words))
        assert found.is_apart is False, found.message
        # The figure and what is allowed, not both "0%".
        figures = re.findall(r"([\d.]+) %", found.message)
        assert len(figures) == 2
        assert float(figures[0]) > float(figures[1]) > 0


def test_what_autocast_would_round_away_is_still_seen():
    """A part of the loss for all samples at once, as mixtures of experts have it, is less than
    what bfloat16 rounds."""

    def with_balance(model, batch):
        rows = model.table(batch[0])
        return model(*batch) + 3e-2 * rows.mean((0, 1)).square().sum()

    torch.manual_seed(0)
    words = torch.randint(64, (8, 32))
    found = samples_apart(Rounded(torch.bfloat16), (words, words), forward=with_balance)
    assert found.is_apart is False, found.message


def test_labels_that_do_not_count_and_models_without_memory_are_tried():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

        def forward(self, input_ids, labels):
            scores = self.head(self.table(input_ids))
            return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}

    tokens = torch.randint(0, 50, (4, 6))
    labels = tokens.clone()
    labels[0, 2:] = -100
    assert (
        "gradients match" in samples_apart(Words(), {"input_ids": tokens, "labels": labels}).message
    )
    with torch.device("meta"):
        model, tokens = Words(), torch.zeros(4, 6, dtype=torch.long)
    assert (
        "gradients match" in samples_apart(model, {"input_ids": tokens, "labels": tokens}).message
    )


class Tables(nn.Module):
    """A table for every column: with fewer of them there are too few pairs."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(5))

    def forward(self, columns):
        rows = torch.stack([t(columns[:, i]) for i, t in enumerate(self.tables)], 1)
        first, second = torch.tril_indices(5, 5, -1)
        return torch.bmm(rows, rows.mT)[:, first, second].square().mean()


def test_a_model_that_counts_its_layers_is_tried_whole():
    found = samples_apart(Tables(), torch.randint(0, 9, (6, 5)))
    assert found.is_apart, found.message


def test_what_cannot_be_tried_says_why():
    torch.manual_seed(0)

    def fails(model, x):
        if len(x) < 9:
            raise RuntimeError("nine samples or nothing")
        return model(x).mean()

    def draws(model, x):
        return (model(x) * torch.rand(())).mean()

    assert "nine samples or nothing" in samples_apart(nn.Linear(4, 4), torch.randn(9, 4),
                                                      forward=fails).message  # fmt: skip
    assert "not the same twice" in samples_apart(nn.Linear(4, 4), torch.randn(9, 4),
                                                 forward=draws).message  # fmt: skip
    large = samples_apart(nn.Linear(20_000, 20_000, device="meta"), torch.ones(4, 20_000))
    assert "400 million weights" in large.message


def test_a_batch_that_cannot_be_taken_apart_is_not_shared_out():
    def spread(model, x):
        return model(x).mean(0).square().sum()

    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(8, 8)
    for forward, is_shared in ((mean_loss, True), (spread, False)):
        graph = capture_sizes(model, x, forward=forward)
        found = trying_samples(graph, model, x, forward=forward)
        assert graph.other_batch is not None
        assert (found.other_batch is not None) == is_shared
        noted = found.meta["samples" if is_shared else "unsplit"]
        assert ("gradients match" if is_shared else "away from that of the whole") in noted


def chosen_rows(model, x):
    """One row of each sample, picked by what is in it."""
    y = model(x).unflatten(-1, (2, -1))
    picked = y[torch.arange(len(x)), x[:, 0].long().clamp(0, 1)]
    return picked.softmax(-1).square().mean() + 0.1 * model.layers[0].weight.square().sum()


READ = {
    "mean": (mean_loss, ""),
    "own rows": (chosen_rows, ""),
    "sum over a number": (lambda m, x: m(x).square().sum() / (len(x) * 8), ""),
    "two means": (lambda m, x: 0.5 * m(x).mean() + m(x).square().mean(), ""),
    "sum": (sum_loss, "its loss is a sum over samples"),
    "square of a mean": (lambda m, x: m(x).mean(0).square().sum(), "of a sum or mean over samples"),
    "centred": (lambda m, x: (m(x) - m(x).mean(0)).abs().mean(), "of a sum or mean over samples"),
    "running sum": (lambda m, x: m(x).cumsum(0).square().mean(), "cumsum along them"),
    "sorted": (lambda m, x: (m(x).sort(0)[0] * x).mean(), "sort along them"),
    "weighed": (lambda m, x: (m(x).softmax(0) * x).mean(), "softmax along them"),
    "largest": (lambda m, x: m(x).amax(0).mean(), "amax over samples"),
    "shuffled": (lambda m, x: (m(x)[x[:, 0].argsort()] * x).mean(), "sort along them"),
}


@pytest.mark.parametrize("name", READ)
def test_where_samples_meet_is_read_off_the_ops(name):
    forward, told = READ[name]
    graph = capture_sizes(Encoder(), torch.zeros(6, 8), forward=forward)
    assert graph.other_batch is not None
    found = where_samples_meet(graph)
    assert told in found if told else not found
    read = reading_samples(graph)
    assert (read.other_batch is None) == bool(told)
    assert ("unsplit" in read.meta) == bool(told)


def test_what_is_too_large_to_try_is_read(monkeypatch):
    """Experts of a fixed capacity drop tokens by what other samples took."""
    monkeypatch.setattr(apart, "_MOST_PARAMETERS", 0)
    model, batch = moe(4, 8, layers=2, experts=4, width=64, hidden=32, vocabulary=50)
    coupled = trying_samples(capture_sizes(model, batch), model, batch)
    assert coupled.other_batch is None
    assert coupled.meta["unsplit"] == "samples meet in layers.0.mixture: cumsum along them"
    free = capture_sizes(Encoder(), torch.zeros(6, 8), forward=mean_loss)
    free = trying_samples(free, Encoder(), torch.zeros(6, 8), forward=mean_loss)
    assert free.other_batch is not None
    assert free.meta["samples"].startswith("no cross-sample ops found; not checked")


class GroupedExperts(nn.Module):
    """Rows sorted by expert, multiplied in groups, and put back."""

    def __init__(self, width=32, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.weight = nn.Parameter(torch.randn(experts, width, width))

    def forward(self, x):
        rows = x.flatten(0, 1)
        order = self.router(rows).argmax(-1).sort()[1]
        counts = torch.histc(order.float(), len(self.weight), 0, len(self.weight) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        found = functional.grouped_mm(rows[order], self.weight, offs=ends)
        back = torch.empty_like(order).index_put((order,), torch.arange(len(order)))
        return found[back].view_as(x)


def test_experts_that_drop_nothing_keep_samples_apart():
    model, x = GroupedExperts().bfloat16(), torch.zeros(4, 8, 32, dtype=torch.bfloat16)
    graph = capture_sizes(model, x, forward=mean_loss)
    assert any("grouped_mm" in kind for kind in graph.kinds)
    assert graph.other_batch is not None
    assert not where_samples_meet(graph)


@pytest.mark.parametrize("counts_answers", [False, True])
def test_label_smoothing_is_a_mean_over_samples(counts_answers):
    def smoothed(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def by_own_answers(model, batch):
        scores = model(batch[0])
        right = scores.argmax(1) == batch[1]
        return functional.cross_entropy(scores, batch[1], reduction="sum") / right.sum()

    model, batch = nn.Linear(8, 4), (torch.randn(6, 8), torch.randint(0, 4, (6,)))
    loss = by_own_answers if counts_answers else smoothed
    graph = capture_sizes(model, batch, forward=loss, optimizer="sgd")
    assert bool(where_samples_meet(graph)) == counts_answers
