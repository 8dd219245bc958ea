"""The models of the zoo at sizes that train in a moment, all parts of each still there."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

from hocket.capture.zoo import diffusion, experts, language, recurrent, vision

TOKENS = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2(layers, heads=2):
    return lambda: language.gpt2(
        2, 8, n_layer=layers, n_embd=16 * heads, n_head=heads, vocab_size=64, **TOKENS
    )


def llama(layers, **more):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
    return lambda: language.llama_7b(2, 8, num_hidden_layers=layers, **sizes, **TOKENS, **more)


def thin(channels):
    """An eighth of the channels of a layer; images keep their three."""
    return channels if channels == 3 else channels // 8


THIN_LAYERS = SimpleNamespace(**{
    **vars(nn),
    "Conv2d": lambda taken, made, *more, **options: nn.Conv2d(
        thin(taken), thin(made), *more, **options
    ),
    "BatchNorm2d": lambda channels, **options: nn.BatchNorm2d(thin(channels), **options),
    "Linear": lambda taken, classes: nn.Linear(thin(taken), classes),
})  # fmt: skip


def thinned(build):
    """A network of images with all its layers, each of few channels."""

    def build_thin():
        with mock.patch.object(vision, "nn", THIN_LAYERS):
            return build()

    return build_thin


def resnet(*blocks, **options):
    """A residual network with this many blocks in each stage."""

    def build():
        with mock.patch.object(vision, "_stage_sizes", return_value=blocks):
            return vision.resnet(sum(blocks), 2, size=32, **options)

    return thinned(build)


def unet():
    """A U-Net of two levels whose heads are as wide as those of the large one."""
    latents = torch.randn(2, 4, 8, 8)
    batch = {"latents": latents, "time": torch.randn(2, 16), "context": torch.randn(2, 3, 24)}
    model = diffusion.UNet(widths=(32, 64), depths=(0, 1), time=16, context=24)
    return model, {**batch, "noise": torch.randn_like(latents)}


SMALL_ZOO = {
    "gpt2": gpt2(3),
    "gpt2-medium": gpt2(4),
    "gpt2-xl": gpt2(6, heads=3),
    "bert-large": lambda: language.bert_large(
        2, 8, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=48,
        vocab_size=64,
    ),
    "llama-1b": llama(2, num_key_value_heads=2, tie_word_embeddings=True),
    "llama-7b": llama(3),
    "t5-base": lambda: language.t5_base(
        2, 8, num_layers=2, d_model=32, d_kv=8, d_ff=32, num_heads=2, vocab_size=64
    ),
    "vit-base": lambda: language.vit_base(
        2, 0, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=48,
        image_size=32,
    ),
    "whisper-small": lambda: language.whisper_small(
        2, 6, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64,
        max_source_positions=8, num_mel_bins=8, pad_token_id=0, decoder_start_token_id=1,
        **TOKENS,
    ),
    "sdxl-unet": unet,
    "mixtral-small": lambda: language.mixtral_small(
        2, 8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, vocab_size=64, **TOKENS,
    ),
    "resnet50": resnet(3, 4, 6, 3),
    "resnet101": resnet(1, 1, 3, 1),
    "resnet152": resnet(1, 2, 3, 1),
    "resnet1001": resnet(1, 2, 9, 1),
    "wide-resnet": resnet(1, 1, 2, 1, width_factor=2),
    "inception-v3": thinned(lambda: vision.inception_v3(2, 0)),
    "gnmt-4": lambda: recurrent.gnmt(4, 2, 3, vocabulary=32, width=8),
    "gnmt-8": lambda: recurrent.gnmt(8, 2, 2, vocabulary=32, width=8),
    "lstm": lambda: recurrent.lstm(2, 4, vocabulary=32, width=8),
    "moe-12x32": lambda: experts.moe(
        2, 8, layers=2, experts=4, width=64, hidden=32, vocabulary=64
    ),
    "mlp": lambda: experts.mlp(4, 1, width=16),
}  # fmt: skip
