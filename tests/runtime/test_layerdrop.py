"""A model that draws whether to skip a layer, with a probability of 0, is traced op by op."""

from __future__ import annotations

import copy

import pytest
import torch

import hocket

transformers = pytest.importorskip("transformers")


def built(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (2, 8))
    if name == "opt":
        config = transformers.OPTConfig(
            vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32, word_embed_proj_dim=16, layerdrop=0.0,
        )  # fmt: skip
        return transformers.OPTForCausalLM(config), {"input_ids": ids, "labels": ids}
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=32, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", ["opt", "bart"])
def test_layers_that_are_never_dropped_are_traced(name: str) -> None:
    model, batch = built(name)
    model.train()
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin))
    train = hocket.prepare(model, optimizer, batch)
    assert not train.lost
    torch.manual_seed(1)
    found = [train.step(batch).item() for _ in range(3)]
    torch.manual_seed(1)
    expected = []
    for _ in range(3):
        plain.zero_grad()
        loss = twin(**batch).loss
        loss.backward()
        plain.step()
        expected.append(loss.item())
    assert found == expected
