"""Models that can be captured by name; nothing is downloaded, and ``meta`` allocates no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Factory = Callable[[int, int], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class ZooModel:
    """Factory of a built-in model, with its usual sizes."""

    build: Factory
    """Function from batch size and sequence length to (model, batch)."""
    batch: int = 8
    seq: int = 1024
    """Tokens per sample; image models ignore it."""
    dtype: str = "float32"


def _factory(path: str) -> Factory:
    """Return the factory ``module.function`` of this package; the module is imported on use."""
    module, _, function = path.partition(".")

    def build(batch: int, seq: int) -> tuple[Any, dict[str, Any]]:
        made: tuple[Any, dict[str, Any]]
        made = getattr(import_module(f"{__name__}.{module}"), function)(batch, seq)
        return made

    return build


def resnet(depth: int, batch: int = 32) -> ZooModel:
    """A ResNet for ImageNet of any depth."""

    def build(size: int, _: int) -> tuple[Any, dict[str, Any]]:
        from hocket.capture.zoo import vision

        return vision.resnet(depth, size)

    return ZooModel(build, batch)


ZOO: dict[str, ZooModel] = {
    "gpt2": ZooModel(_factory("language.gpt2")),
    "gpt2-medium": ZooModel(_factory("language.gpt2_medium")),
    "gpt2-xl": ZooModel(_factory("language.gpt2_xl")),
    "bert-large": ZooModel(_factory("language.bert_large"), seq=512),
    "llama-1b": ZooModel(_factory("language.llama_1b")),
    "llama-7b": ZooModel(_factory("language.llama_7b")),
    "t5-base": ZooModel(_factory("language.t5_base"), seq=512),
    "vit-base": ZooModel(_factory("language.vit_base"), batch=32),
    "whisper-small": ZooModel(_factory("language.whisper_small"), batch=8, seq=128),
    "sdxl-unet": ZooModel(_factory("diffusion.sdxl_unet"), batch=4, seq=77),
    "mixtral-small": ZooModel(_factory("language.mixtral_small"), dtype="bfloat16"),
    "resnet50": resnet(50),
    "resnet101": resnet(101),
    "resnet152": resnet(152),
    "resnet1001": resnet(1001, batch=16),
    "wide-resnet": ZooModel(_factory("vision.wide_resnet"), batch=32),
    "inception-v3": ZooModel(_factory("vision.inception_v3"), batch=32),
    "gnmt-4": ZooModel(_factory("recurrent.gnmt_4"), batch=128, seq=40),
    "gnmt-8": ZooModel(_factory("recurrent.gnmt_8"), batch=128, seq=40),
    "lstm": ZooModel(_factory("recurrent.lstm"), batch=128, seq=100),
    "moe-12x32": ZooModel(_factory("experts.moe_12x32"), batch=4, seq=512),
    "mlp": ZooModel(_factory("experts.mlp"), batch=256, seq=1),
}
"""Names that ``hocket capture`` knows."""
