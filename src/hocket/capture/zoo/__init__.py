"""Models that can be captured by name; nothing is downloaded, and on ``meta`` nothing allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hocket.capture.zoo import diffusion, experts, language, recurrent, vision

Factory = Callable[[int, int], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class ZooModel:
    """Factory of a model of the zoo, and the sizes that it is usually run with."""

    build: Factory
    """From batch and sequence length to (model, batch)."""
    batch: int = 8
    seq: int = 1024
    """Tokens per example; models of images ignore it."""
    dtype: str = "float32"


def _resnet(depth: int, *, batch: int = 32) -> ZooModel:
    return ZooModel(lambda size, _, depth=depth: vision.resnet(depth, size), batch)  # type: ignore[misc]


ZOO: dict[str, ZooModel] = {
    "gpt2": ZooModel(language.gpt2),
    "gpt2-medium": ZooModel(language.gpt2_medium),
    "gpt2-xl": ZooModel(language.gpt2_xl),
    "bert-large": ZooModel(language.bert_large, seq=512),
    "llama-1b": ZooModel(language.llama_1b),
    "llama-7b": ZooModel(language.llama_7b),
    "t5-base": ZooModel(language.t5_base, seq=512),
    "vit-base": ZooModel(language.vit_base, batch=32),
    "whisper-small": ZooModel(language.whisper_small, batch=8, seq=128),
    "sdxl-unet": ZooModel(diffusion.sdxl_unet, batch=4, seq=77),
    "mixtral-small": ZooModel(language.mixtral_small, dtype="bfloat16"),
    "resnet50": _resnet(50),
    "resnet101": _resnet(101),
    "resnet152": _resnet(152),
    "resnet1001": _resnet(1001, batch=16),
    "wide-resnet": ZooModel(vision.wide_resnet, batch=32),
    "inception-v3": ZooModel(vision.inception_v3, batch=32),
    "gnmt-4": ZooModel(recurrent.gnmt_4, batch=128, seq=40),
    "gnmt-8": ZooModel(recurrent.gnmt_8, batch=128, seq=40),
    "lstm": ZooModel(recurrent.lstm, batch=128, seq=100),
    "moe-12x32": ZooModel(experts.moe_12x32, batch=4, seq=512),
    "mlp": ZooModel(experts.mlp, batch=256, seq=1),
}
"""Names that ``hocket capture`` knows."""
