"""Transformers from Hugging Face, built from configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, torch.Tensor]]


def common_settings() -> dict[str, Any]:
    """Return settings for full sequences without padding.

    The transformers library cannot detect that a fake batch has no padding, and would build masks
    that a real run skips. For an attention implementation without a registered mask function it
    builds no mask; attention itself stays causal.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("unpadded_sdpa", sdpa_attention_forward)
    return {"use_cache": False, "attn_implementation": "unpadded_sdpa"}


def token_batch(batch: int, seq: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Token ids and labels."""
    return {
        "input_ids": torch.randint(vocabulary, (batch, seq)),
        "labels": torch.randint(vocabulary, (batch, seq)),
    }


def causal_model(model: nn.Module, batch: int, seq: int) -> Built:
    """A model that predicts the next token, and its batch."""
    causal: Any = model
    # The transformers library derives the loss only from names of newer classes, and warns for
    # others.
    causal.loss_type = "ForCausalLM"
    return causal, token_batch(batch, seq, causal.config.vocab_size)


def gpt2(batch: int, seq: int, **sizes: Any) -> Built:
    """GPT-2 with its default dropout; GPT-2 small unless ``sizes`` change it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**{**common_settings(), "n_positions": max(1024, seq), **sizes})
    return causal_model(GPT2LMHeadModel(config), batch, seq)


def gpt2_medium(batch: int, seq: int) -> Built:
    """GPT-2 medium: 24 layers, width 1024."""
    return gpt2(batch, seq, n_embd=1024, n_layer=24, n_head=16)


def gpt2_xl(batch: int, seq: int) -> Built:
    """GPT-2 XL: 48 layers, width 1600."""
    return gpt2(batch, seq, n_embd=1600, n_layer=48, n_head=25)


def bert_large(batch: int, seq: int, **sizes: int) -> Built:
    """BERT-large trained to fill in masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
             "intermediate_size": 4096, "max_position_embeddings": max(512, seq)}  # fmt: skip
    config = BertConfig(**common_settings(), **{**large, **sizes})
    return BertForMaskedLM(config), token_batch(batch, seq, config.vocab_size)


def llama_7b(batch: int, seq: int, **sizes: Any) -> Built:
    """A Llama of 6.7 billion parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **common_settings(), **{"max_position_embeddings": max(2048, seq), **sizes}
    )
    return causal_model(LlamaForCausalLM(config), batch, seq)


def llama_1b(batch: int, seq: int) -> Built:
    """A Llama of 1.2 billion parameters: grouped heads, tied embeddings."""
    return llama_7b(batch, seq, vocab_size=128256, hidden_size=2048, intermediate_size=8192,
                    num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                    tie_word_embeddings=True)  # fmt: skip


def t5_base(batch: int, seq: int, **sizes: int) -> Built:
    """T5 base: encoder and decoder of 12 layers each."""
    from transformers import T5Config, T5ForConditionalGeneration

    base = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    config = T5Config(use_cache=False, decoder_start_token_id=0, **{**base, **sizes})
    return T5ForConditionalGeneration(config), token_batch(batch, seq, config.vocab_size)


def vit_base(batch: int, seq: int, **sizes: int) -> Built:
    """ViT base on 224 x 224 images with 16 x 16 patches, 1000 classes."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(attn_implementation="sdpa", num_labels=1000, **sizes)
    size = config.image_size
    images = torch.randn(batch, config.num_channels, size, size)
    batch_of = {"pixel_values": images, "labels": torch.randint(1000, (batch,))}
    return ViTForImageClassification(config), batch_of


def whisper_small(batch: int, seq: int, **sizes: int) -> Built:
    """Whisper small: 30 seconds of sound, a text of ``seq`` tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    small = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
             "encoder_attention_heads": 12, "decoder_attention_heads": 12,
             "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}  # fmt: skip
    config = WhisperConfig(use_cache=False, attn_implementation="sdpa", **{**small, **sizes})
    frames = 2 * config.max_source_positions
    batch_of = {
        "input_features": torch.randn(batch, config.num_mel_bins, frames),
        "labels": torch.randint(config.vocab_size, (batch, min(seq, config.max_target_positions))),
    }
    return WhisperForConditionalGeneration(config), batch_of


def mixtral_small(batch: int, seq: int, **sizes: int) -> Built:
    """A Mixtral of 8 layers with 8 experts, 2 per token.

    Grouped matrix products exist in bfloat16 only; other dtypes gather the experts' weights for
    every token, which can be traced but takes much memory.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    small = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
             "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8,
             "max_position_embeddings": max(2048, seq)}  # fmt: skip
    grouped = torch.get_default_dtype() == torch.bfloat16
    config = MixtralConfig(
        **common_settings(),
        experts_implementation="grouped_mm" if grouped else "batched_mm",
        **{**small, **sizes},
    )
    return causal_model(MixtralForCausalLM(config), batch, seq)
