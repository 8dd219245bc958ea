"""Third-party models that no constant was chosen with: measured after the cost model was fixed."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from models import Model, decoder, tokens, vision
from torch import nn


def _masked(name: str, family: str, build: Any, vocabulary: int, sizes: tuple[int, ...]) -> Model:
    return Model(name, family, build, tokens(512, vocabulary), sizes)


def _translated(size: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(size * 256).reshape(size, 256) % 50000
    return {"input_ids": ids, "labels": ids}


def _segmented(size: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.zeros(size, 3, 512, 512),
        "labels": torch.zeros(size, 512, 512, dtype=torch.int64),
    }


class Tagger(nn.Module):
    """A bidirectional GRU over words."""

    def __init__(self, vocabulary: int = 20_000, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.embed(input_ids))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten() % 64)


def held_out() -> list[Model]:
    """All of them."""
    return [
        decoder("qwen2.5-0.5b", "grouped attention", hf.Qwen2Config(
            hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True), 1024, (8, 1)),
        decoder("mistral-1b", "grouped attention", hf.MistralConfig(
            hidden_size=2048, intermediate_size=7168, num_hidden_layers=20,
            num_attention_heads=16, num_key_value_heads=4, vocab_size=32000), 2048, (4, 1),
            ("bf16",)),
        decoder("olmo2-1b", "dense", hf.Olmo2Config(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=12,
            num_attention_heads=16, vocab_size=50304, pad_token_id=0), 2048, (4, 1), ("bf16",)),
        decoder("bloom-560m", "dense", hf.BloomConfig(
            hidden_size=1024, n_layer=24, n_head=16, vocab_size=65024), 1024, (4, 1), ("bf16",)),
        decoder("phi-1.5-half", "dense", hf.PhiConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=12,
            num_attention_heads=32, vocab_size=51200), 1024, (8, 1)),
        decoder("starcoder2-half", "grouped attention", hf.Starcoder2Config(
            hidden_size=1536, intermediate_size=6144, num_hidden_layers=16,
            num_attention_heads=12, num_key_value_heads=2, vocab_size=49152), 1024, (8, 1),
            ("bf16",)),
        _masked("roberta-base", "dense", lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(
            vocab_size=50265, max_position_embeddings=514)), 50265, (32, 2)),
        _masked("electra-large", "dense", lambda: hf.ElectraForMaskedLM(hf.ElectraConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
            intermediate_size=4096, embedding_size=1024)), 30522, (16, 2)),
        Model("bart-base", "encoder-decoder", lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(d_model=768, encoder_layers=6, decoder_layers=6,
                          encoder_attention_heads=12, decoder_attention_heads=12,
                          encoder_ffn_dim=3072, decoder_ffn_dim=3072)), _translated, (32, 2)),
        vision("deit-small", "vision", hf.ViTConfig(
            hidden_size=384, intermediate_size=1536, num_attention_heads=6), 224, (256, 8)),
        vision("dinov2-base", "vision", hf.Dinov2Config(image_size=224, patch_size=14),
                224, (64, 4)),
        vision("resnet50", "convolution", hf.ResNetConfig(), 224, (256, 16)),
        vision("regnet-y", "convolution", hf.RegNetConfig(), 224, (128, 8)),
        vision("mobilenet-v2", "convolution", hf.MobileNetV2Config(), 224, (256, 16)),
        vision("swinv2-tiny", "hierarchical", hf.Swinv2Config(), 224, (64, 4)),
        Model("segformer-b2", "hierarchical", lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512],
                               num_labels=150)), _segmented, (16, 2)),
        Model("gru", "recurrent", Tagger, tokens(128, 20_000), (256, 16)),
    ]  # fmt: skip
