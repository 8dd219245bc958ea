"""Third-party models that predictions are compared on: transformers' code, built from configs.

Rows of 2026-11-18 of these models were used to choose constants of kernels and of the host;
``held_out.py`` has models that were not. Families: dense and grouped attention, mixtures
of experts, encoder-decoders, vision with and without hierarchy, convolution, U-Net, recurrent,
recommender. Each has a large batch, which the device limits, and a small one, which the host does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model, its batches and how a batch of any size is made."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    sizes: tuple[int, ...]
    """Samples of a batch, the large one first."""
    precisions: tuple[str, ...] = ("bf16", "fp32")


def tokens(seq: int, vocabulary: int) -> Callable[[int], Batch]:
    """Batches of words, each the label of itself."""

    def make(size: int) -> Batch:
        ids = torch.arange(size * seq).reshape(size, seq) % (vocabulary - 1)
        return {"input_ids": ids, "labels": ids}

    return make


def images(side: int, classes: int = 1000) -> Callable[[int], Batch]:
    """Batches of labelled images."""

    def make(size: int) -> Batch:
        return {
            "pixel_values": torch.zeros(size, 3, side, side),
            "labels": torch.arange(size) % classes,
        }

    return make


def _causal(config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config.use_cache = False
        return hf.AutoModelForCausalLM.from_config(config)

    return build


def decoder(
    name: str, family: str, config: Any, seq: int, sizes: tuple[int, ...],
    precisions: tuple[str, ...] = ("bf16", "fp32"),
) -> Model:  # fmt: skip
    batch = tokens(seq, config.vocab_size)
    return Model(name, family, _causal(config), batch, sizes, precisions)


def vision(name: str, family: str, config: Any, side: int, sizes: tuple[int, ...]) -> Model:
    config.num_labels = 1000

    def build() -> nn.Module:
        return hf.AutoModelForImageClassification.from_config(config)

    return Model(name, family, build, images(side), sizes)


class Recommender(nn.Module):
    """A DLRM: tables, pairwise products of their rows, two stacks of linear layers."""

    def __init__(self, tables: int = 26, rows: int = 100_000, width: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _stack(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = _stack(pairs + width, 1024, 1024, 512, 1)
        self.register_buffer("upper", torch.triu_indices(tables + 1, tables + 1, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, labels: torch.Tensor) -> Any:
        bottom = self.bottom(dense)
        rows = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, *rows], dim=1)
        products = features @ features.transpose(1, 2)
        pairs = products[:, self.upper[0], self.upper[1]]
        logits = self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)


def _stack(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Words(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int = 33_280, width: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.embed(input_ids))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    """A residual block of a diffusion U-Net with its time embedding."""

    def __init__(self, before: int, after: int, time: int = 512) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(nn.functional.silu(self.norm1(x)))
        hidden = hidden + self.time(time)[:, :, None, None]
        hidden = self.conv2(nn.functional.silu(self.norm2(hidden)))
        return hidden + self.skip(x)


class SelfAttention(nn.Module):
    """Attention over the pixels of a U-Net's lower levels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.mix = nn.MultiheadAttention(channels, channels // 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(2).transpose(1, 2)
        mixed, _ = self.mix(rows, rows, rows, need_weights=False)
        return x + mixed.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """A diffusion U-Net of four levels, attention in the two lower ones."""

    def __init__(self, widths: tuple[int, ...] = (192, 384, 576, 768)) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, channels = [widths[0]], widths[0]
        for level, width in enumerate(widths):
            for _ in range(2):
                attends = SelfAttention(width) if level >= 2 else nn.Identity()
                self.down.append(nn.ModuleList([Block(channels, width), attends]))
                channels = width
                skips.append(channels)
            if level < len(widths) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(width, width, 3, 2, 1)]))
                skips.append(channels)
        self.middle = Block(channels, channels)
        for level in reversed(range(len(widths))):
            for _ in range(3):
                attends = SelfAttention(widths[level]) if level >= 2 else nn.Identity()
                self.up.append(
                    nn.ModuleList([Block(channels + skips.pop(), widths[level]), attends])
                )
                channels = widths[level]
            if level:
                self.up.append(nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1)]))
        self.last = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        kept = [hidden]
        for parts in self.down:
            hidden = parts[1](parts[0](hidden, time)) if len(parts) == 2 else parts[0](hidden)
            kept.append(hidden)
        hidden = self.middle(hidden, time)
        for parts in self.up:
            if len(parts) == 2:
                hidden = parts[1](parts[0](torch.cat([hidden, kept.pop()], dim=1), time))
            else:
                hidden = parts[0](nn.functional.interpolate(hidden, scale_factor=2.0))
        return nn.functional.mse_loss(self.last(hidden), target)


def _latents(size: int) -> Batch:
    shape = (size, 4, 64, 64)
    return {"x": torch.zeros(shape), "time": torch.zeros(size, 512), "target": torch.zeros(shape)}


def _clicks(size: int) -> Batch:
    sparse = torch.arange(size * 26).reshape(size, 26) * 7919 % 100_000
    return {"dense": torch.zeros(size, 13), "sparse": sparse, "labels": torch.zeros(size)}


def _whisper(size: int) -> Batch:
    return {
        "input_features": torch.zeros(size, 80, 3000),
        "labels": torch.arange(size * 128).reshape(size, 128) % 50000,
    }


def _translated(size: int) -> Batch:
    ids = torch.arange(size * 512).reshape(size, 512) % 32000
    return {"input_ids": ids, "labels": ids[:, :128].contiguous()}


def models() -> list[Model]:
    """All models; configurations are made when asked for, for each is a class of transformers."""
    small = {"num_hidden_layers": 16, "hidden_size": 2048}
    return [
        decoder("llama-1b", "grouped attention", hf.LlamaConfig(
            **small, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
            vocab_size=128256, tie_word_embeddings=True), 2048, (4, 1), ("bf16",)),
        decoder("qwen3-0.6b", "grouped attention", hf.Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True),
            1024, (8, 1)),
        decoder("gpt-neox-410m", "dense", hf.GPTNeoXConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
            vocab_size=50304), 1024, (8, 1)),
        decoder("gemma2-like", "grouped attention", hf.Gemma2Config(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=18, num_attention_heads=8,
            num_key_value_heads=4, head_dim=128, vocab_size=64000, attn_implementation="eager"),
            1024, (8, 2), ("bf16",)),
        decoder("phi3-half", "dense", hf.Phi3Config(
            hidden_size=3072, intermediate_size=8192, num_hidden_layers=12, num_attention_heads=32,
            vocab_size=32064, pad_token_id=0), 2048, (4, 1), ("bf16",)),
        decoder("gpt2-medium", "dense", hf.GPT2Config(n_embd=1024, n_layer=24, n_head=16),
                 1024, (8, 1)),
        decoder("opt-350m-like", "dense", hf.OPTConfig(
            hidden_size=1024, ffn_dim=4096, num_hidden_layers=24, num_attention_heads=16,
            word_embed_proj_dim=1024, vocab_size=50272), 1024, (8, 1)),
        decoder("mixtral-like", "experts", hf.MixtralConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=4, num_local_experts=8, vocab_size=32000), 1024, (8, 1), ("bf16",)),
        Model("bert-large", "dense", lambda: hf.BertForMaskedLM(hf.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
            intermediate_size=4096)), tokens(512, 30522), (16, 2)),
        Model("t5-base", "encoder-decoder", lambda: hf.T5ForConditionalGeneration(hf.T5Config(
            d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0,
            attn_implementation="eager")),
            _translated, (16, 2)),
        Model("whisper-small", "encoder-decoder",
              lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(
                  d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
                  decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)),
              _whisper, (8, 1)),
        vision("vit-large", "vision", hf.ViTConfig(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
            num_attention_heads=16), 224, (64, 4)),
        vision("swin-base", "hierarchical", hf.SwinConfig(
            embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32]), 224, (64, 4)),
        vision("convnext-base", "hierarchical", hf.ConvNextConfig(
            hidden_sizes=[128, 256, 512, 1024], depths=[3, 3, 27, 3]), 224, (64, 4)),
        vision("efficientnet-b3", "convolution", hf.EfficientNetConfig(
            width_coefficient=1.2, depth_coefficient=1.4, hidden_dim=1536, image_size=300),
            300, (64, 4)),
        vision("resnet101", "convolution", hf.ResNetConfig(depths=[3, 4, 23, 3]), 224, (128, 8)),
        Model("unet", "diffusion", UNet, _latents, (16, 2)),
        Model("lstm", "recurrent", Words, tokens(128, 33_280), (128, 16)),
        Model("dlrm", "recommender", Recommender, _clicks, (8192, 256)),
    ]  # fmt: skip
