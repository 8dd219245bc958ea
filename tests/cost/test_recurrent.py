"""Recurrent layers that stand word by word, priced as cuDNN runs them."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hocket.capture import capture  # noqa: E402
from hocket.cost.recurrent import WORD_HOST_S, recurrent_ops  # noqa: E402
from hocket.cost.roofline import estimate_costs  # noqa: E402
from hocket.hardware import cluster_from_text  # noqa: E402

WORDS, BATCH, WIDTH = 12, 8, 64
ON = cluster_from_text("1xh200-141g")


class Reader(nn.Module):
    def __init__(self, kind, dtype=torch.float32, layers=1, **options):
        super().__init__()
        self.words = kind(WIDTH, WIDTH, layers, dtype=dtype, **options)
        self.last = nn.Linear(WIDTH * (1 + options.get("bidirectional", False)), 4, dtype=dtype)

    def forward(self, x):
        return self.last(self.words(x)[0])


def captured(kind, device="accelerator", **options):
    dtype = options.get("dtype", torch.float32)
    words = torch.randn(WORDS, BATCH, WIDTH, dtype=dtype)
    return capture(Reader(kind, **options), words, loss=lambda out: out.sum(), device=device)


def word_s(graph):
    return float(estimate_costs(graph, ON).op_s.sum()) / WORDS


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_word_takes_what_cudnn_takes_to_launch_one(kind, dtype):
    graph = captured(kind, dtype=dtype)
    assert graph.meta["recurrent"] == ["words"]
    least = WORD_HOST_S[0] + 2 * WORD_HOST_S[1]
    # The input's product, the last layer and the optimizer come on top.
    assert least < word_s(graph) < least + 50e-6


@pytest.mark.parametrize("options", [{"layers": 2}, {"bidirectional": True}])
def test_layers_and_directions_count_each(options):
    one, two = captured(nn.GRU), captured(nn.GRU, **options)
    least = WORD_HOST_S[0] + 2 * WORD_HOST_S[1]
    assert word_s(two) - word_s(one) > 0.8 * least


def test_words_are_many_times_shorter_than_their_ops():
    graph = captured(nn.GRU)
    assert word_s(replace(graph, meta={})) > 5 * word_s(graph)
    assert not recurrent_ops(replace(graph, meta={"recurrent": "words"})).any()
    assert not recurrent_ops(replace(graph, meta={"recurrent": [3, None]})).any()


def test_processors_and_other_layers_are_priced_op_by_op():
    graph = captured(nn.GRU)
    words = recurrent_ops(graph)
    assert 0 < words.sum() < graph.num_ops
    host = cluster_from_text("1xcpu-host")
    plain = estimate_costs(replace(graph, meta={}), host).op_s
    assert np.array_equal(estimate_costs(graph, host).op_s, plain)
    assert "recurrent" not in captured(nn.GRU, device="cpu").meta
