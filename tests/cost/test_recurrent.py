"""Recurrent layers that stand word by word, priced as cuDNN runs them."""

from dataclasses import replace

import numpy as np
import pytest
from cost.cost_samples import CPU, TESLA, cluster_of, graph_of
from torch import nn, ones

from hocket.capture import capture
from hocket.cost.efficiency import work_of
from hocket.cost.roofline import WORD_HOST_S, as_tf32, estimate_costs, products_of, recurrent_ops
from hocket.graph import Phase

WORDS = 5
LAYER = "aten.mkldnn_rnn_layer"
WORD_BY_WORD = [
    {"kind": "aten.addmm", "flops": 1e3, "bytes_touched": 64, "signature": "a"},
    {"kind": "aten.sigmoid", "bytes_touched": 64, "signature": "b"},
    {"kind": "aten.mm", "flops": 1e3, "bytes_touched": 64, "phase": Phase.BACKWARD},
    {"kind": LAYER, "flops": 1e3, "bytes_touched": 64,
     "signature": f"{LAYER}.default(float32[{WORDS},2,4], float32[16,4])"},
    {"kind": f"{LAYER}_backward", "flops": 1e3, "bytes_touched": 64, "phase": Phase.BACKWARD,
     "signature": f"{LAYER}_backward.default(float32[{WORDS},2,4], float32[16,4])"},
    {"kind": "optimizer.adamw", "bytes_touched": 64, "phase": Phase.OPTIMIZER},
]  # fmt: skip


def words(**meta):
    graph = graph_of([{**op, "module": "reader"} for op in WORD_BY_WORD])
    return replace(graph, meta={"recurrent": ["reader"], **meta})


def test_only_passes_through_noted_layers_are_words():
    assert recurrent_ops(words()).tolist() == [True] * 5 + [False]
    for other in (["another"], "reader", [3, None], None, {"reader": 1}):
        assert not recurrent_ops(words(recurrent=other)).any()


def test_a_whole_layer_has_a_product_per_word_and_two_backward():
    graph = words()
    family = work_of(graph).family
    assert products_of(graph, family)[:5].tolist() == [1, 0, 1, WORDS, 2 * WORDS]


@pytest.mark.parametrize("given", [f"{WORDS},2,4", f"2,{WORDS},4"])
def test_a_net_of_cudnn_has_them_for_all_layers_and_directions(given):
    """Captured on a GPU; no note is needed."""
    name = "aten._cudnn_rnn"
    text = f"default(float32[{given}], [float32[16,4], float32[16]], 4, None, float32[6,2,4], None)"
    graph = graph_of(
        [{"kind": name, "flops": 1e3, "bytes_touched": 64, "signature": f"{name}.{text}"}]
    )
    assert recurrent_ops(graph).tolist() == [True]
    assert products_of(graph, work_of(graph).family).tolist() == [6 * WORDS]
    op_s = estimate_costs(graph, cluster_of(TESLA)).op_s.sum()
    assert op_s == pytest.approx(6 * WORDS * WORD_HOST_S[0], rel=0.05)


def test_the_host_launches_words_and_processors_compute_them():
    graph = words()
    captured = replace(graph, meta={})
    op_s = estimate_costs(graph, cluster_of(TESLA)).op_s[0]
    forward_s, backward_s = WORD_HOST_S
    launched = (1 + WORDS) * forward_s + (1 + 2 * WORDS) * backward_s
    # All but the optimizer's op, which is the last.
    assert op_s[:5].sum() == pytest.approx(launched, rel=0.05)
    on_host = [estimate_costs(given, cluster_of(CPU)).op_s for given in (graph, captured)]
    assert np.array_equal(*on_host)


def test_replayed_words_take_their_kernels_alone():
    op_s = estimate_costs(words(), cluster_of(TESLA), launches="replayed").op_s[0]
    assert op_s.sum() < 0.2 * estimate_costs(words(), cluster_of(TESLA)).op_s.sum()
    assert op_s[3] > op_s[0] > op_s[1] == 0


def test_products_of_words_have_the_rate_of_tf32():
    assert as_tf32(TESLA).peak_flops["float32"] == TESLA.peak_flops["tf32"]
    assert as_tf32(CPU) is CPU
    long = {"kind": "aten.mm", "flops": 1e12, "bytes_touched": 64, "signature": "c"}
    graph = graph_of([{**long, "module": "reader"}])
    inside, alone = (
        estimate_costs(replace(graph, meta=meta), cluster_of(TESLA)).op_s.sum()
        for meta in ({"recurrent": ["reader"]}, {})
    )
    assert alone / inside == pytest.approx(4.0)


def test_captured_layers_are_noted_for_accelerators():
    model, given = nn.GRU(4, 4), ones(2, 1, 4)
    graph = capture(nn.Sequential(model), given, loss=lambda out: out[0].sum())
    assert graph.meta["recurrent"] == ["0"]
    assert recurrent_ops(graph).sum() > 10
    on_host = capture(nn.Sequential(model), given, loss=lambda out: out[0].sum(), device="cpu")
    assert "recurrent" not in on_host.meta
