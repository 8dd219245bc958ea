"""Mixed precision as CUDA runs it, captured on a machine without CUDA."""

import pytest
import torch
import transformers
from torch import nn

from hocket.capture import capture

_SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
CONFIGS = {
    "qwen3": transformers.Qwen3Config(**_SMALL, num_key_value_heads=2, head_dim=16),
    "gpt-neox": transformers.GPTNeoXConfig(**_SMALL),
}


def _in_bfloat16(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        return model(**batch) if isinstance(batch, dict) else model(batch)


def _signatures(graph):
    return {graph.signatures[graph.op_signature[op]] for op in range(graph.num_ops)}


def _captured(name, use_cache, **more):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    model.config.use_cache = use_cache
    tokens = torch.zeros(2, 256, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens, **more}
    return capture(model, batch, forward=_in_bfloat16)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_attention_under_autocast_is_fused_in_16_bits_without_mask(name, use_cache):
    graph = _captured(name, use_cache)
    attention = [s for s in _signatures(graph) if "scaled_dot_product" in s]
    assert len(attention) == 2
    assert all("(bfloat16[2,4,256,16]" in s for s in attention)
    assert not any("[2,4,256,256]" in s or "[2,1,256,256]" in s for s in _signatures(graph))


@pytest.mark.parametrize(("padded", "has_mask"), [(False, False), (True, True)])
def test_padding_masks_are_recorded_only_where_the_batch_is_padded(padded, has_mask):
    mask = torch.ones(2, 256, dtype=torch.int64)
    mask[0, 200:] = 0 if padded else 1
    graph = _captured("qwen3", True, attention_mask=mask)
    assert any("[2,1,256,256]" in s for s in _signatures(graph)) is has_mask


def test_packed_positions_keep_their_mask():
    positions = torch.arange(128).repeat(2, 2)
    graph = _captured("qwen3", False, position_ids=positions)
    assert any("[2,1,256,256]" in s for s in _signatures(graph))


class Norms(nn.Module):
    """A 16-bit product in front of each op that CUDA's autocast widens."""

    def __init__(self):
        super().__init__()
        self.project, self.norm, self.group = nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)

    def forward(self, x):
        hidden = self.project(x)
        parts = [
            self.norm(hidden), self.group(hidden), hidden.softmax(-1), hidden.exp(), hidden.pow(2),
            hidden.cumsum(0), torch.rsqrt(hidden), nn.functional.softplus(hidden), hidden.sum(0),
            torch.zeros(4, 8).scatter_add(0, torch.zeros(4, 8, dtype=torch.int64), hidden),
        ]  # fmt: skip
        assert all(part.dtype == torch.float32 for part in parts)
        assert nn.functional.gelu(hidden).dtype == hidden.dtype == torch.bfloat16
        return sum(part.sum() for part in parts)


def test_ops_of_cudas_float32_list_run_in_float32():
    graph = capture(Norms(), torch.randn(4, 8), forward=_in_bfloat16)
    assert graph.meta["level"] == "op"
    names = _signatures(graph)
    assert any(s.startswith("aten.native_layer_norm.default(float32") for s in names)
    assert any(s.startswith("aten.addmm.default(bfloat16") for s in names)


def test_a_processors_own_autocast_is_what_it_was_after_a_capture():
    capture(Norms(), torch.randn(4, 8), forward=_in_bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.LayerNorm(8)(nn.Linear(8, 8)(torch.randn(4, 8))).dtype == torch.bfloat16
