"""Attention as accelerators run it, captured without one."""

import pytest
import torch
from torch import nn

from hocket.capture import capture


class Attend(nn.Module):
    def __init__(self, heads=4, groups=4, dropout=0.1):
        super().__init__()
        self.heads, self.groups, self.dropout = heads, groups, dropout
        self.project = nn.Linear(64, 64)

    def forward(self, x, mask=None):
        batch, tokens, _ = x.shape
        query = self.project(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
        key = query[:, : self.groups]
        out = nn.functional.scaled_dot_product_attention(
            query,
            key,
            key,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=mask is None,
            enable_gqa=self.groups != self.heads,
        )
        return out.transpose(1, 2).flatten(2)


def _kinds(graph):
    return {graph.kind_of(op) for op in range(graph.num_ops)}


@pytest.mark.parametrize(
    ("groups", "dtype", "kernel"),
    [
        (4, torch.float32, "efficient"),
        (4, torch.bfloat16, "efficient"),
        (2, torch.bfloat16, "flash"),
        (2, torch.float16, "flash"),
    ],
)
def test_accelerator_capture_has_one_fused_attention_each_way(groups, dtype, kernel):
    model = Attend(groups=groups).to(dtype)
    graph = capture(model, torch.randn(2, 128, 64, dtype=dtype), loss=lambda out: out.sum())
    names = [graph.kind_of(op) for op in range(graph.num_ops)]
    assert names.count(f"aten._scaled_dot_product_{kernel}_attention") == 1
    assert names.count(f"aten._scaled_dot_product_{kernel}_attention_backward") == 1
    assert not {"aten._safe_softmax", "aten._softmax"} & set(names)


def test_shared_keys_in_float32_write_the_matrix_of_scores():
    """No fused kernel takes them: on an H200 forward keeps queries, keys and values of all heads,
    the scores and the result."""
    batch, tokens, heads = 2, 256, 4
    graph = capture(
        Attend(groups=2, dropout=0.0), torch.randn(batch, tokens, 64), loss=lambda out: out.sum()
    )
    kinds = [graph.kind_of(op) for op in range(graph.num_ops)]
    assert not any("scaled_dot_product" in kind for kind in kinds)
    assert graph.tensor_bytes.max() >= 4 * batch * heads * tokens**2


def test_accelerator_capture_holds_no_matrix_of_scores():
    batch = torch.randn(2, 256, 64)
    scores_bytes = 2 * 4 * 256 * 256 * 4
    fused = capture(Attend(), batch)
    split = capture(Attend(), batch, device="cpu")
    assert fused.tensor_bytes.max() < scores_bytes
    assert split.tensor_bytes.max() >= scores_bytes


def test_accelerator_capture_takes_masks_of_any_length():
    mask = torch.ones(2, 1, 100, 100, dtype=torch.bool).tril()
    batch = {"x": torch.randn(2, 100, 64), "mask": mask}
    assert "aten._scaled_dot_product_efficient_attention" in _kinds(capture(Attend(), batch))


def test_fused_and_split_attention_count_the_same_products():
    batch = torch.randn(2, 128, 64)
    fused = capture(Attend(dropout=0.0), batch, optimizer=None)
    split = capture(Attend(dropout=0.0), batch, optimizer=None, device="cpu")
    assert fused.flops.sum() == split.flops.sum()


def test_causal_attention_counts_the_pairs_that_a_fused_kernel_computes():
    tokens, width = 128, 16
    graph = capture(Attend(dropout=0.0), torch.randn(2, tokens, 64), optimizer=None)
    (attention,) = (op for op in range(graph.num_ops) if "scaled_dot" in graph.kind_of(op))
    pairs = 2 * 4 * tokens * (tokens + 1) / 2
    assert graph.flops[attention] == 4 * pairs * width


def test_attention_and_dropout_inside_modules_of_pytorch_are_fused():
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.1)
    kinds = _kinds(capture(layer, torch.randn(2, 16, 64)))
    assert {"aten._scaled_dot_product_efficient_attention", "aten.native_dropout"} <= kinds
    assert not {"aten._softmax", "aten.bernoulli_"} & kinds
