"""Attainable fractions of peak rates by GPU architecture, each with its source.

A datasheet states peak rates; kernels attain a fraction that differs between architectures.
Hopper's fractions were measured (``benchmarks/cost/predict_kernels.py``), Ampere's were fitted to
the mean of published tables of A100 clusters. Unlisted device types use Ampere's, and predictions
for them carry a range (`Chip.uncertainty`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

Libraries = Literal["2023", "current"]
"""Generation of the matrix and attention libraries; those for Hopper were still immature in 2023.
"""


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """Attained rates of fused attention, as fractions of the 16-bit peak.

    FLOPs of the forward pass count the half that a causal mask leaves, the backward pass 2.5 times
    that. The rates hold for heads of 128 elements in long sequences.
    """

    forward: float
    backward: float
    forward_half: float = 0.0
    """Sequence length at which half of the rate is attained."""
    backward_half: float = 0.0
    width_half: float = 0.0
    """Head width at which half of the rate of very wide heads is attained."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Attainable rates of a GPU architecture."""

    name: str
    matrix_share: float
    """Fraction of the 16-bit peak attained by large matrix products back to back, which power
    limits."""
    mixed_share: float
    """Fraction attained in steps that spend more than half of their time on other work, which saves
    power."""
    float8_share: float
    """Fraction of the 8-bit peak attained by large matrix products."""
    matrix_depth: float
    """Inner dimension of a product at which half of the time is spent on starting and ending tiles.
    """
    attention: Mapping[str, AttentionRates] = field(hash=False)
    """Rates by kernel: ``flash`` (FlashAttention 1), ``flash2``, ``fused`` (cuDNN, FlashAttention
    3)."""
    float32_convolution_share: float = 0.45
    """Fraction of the float32 peak attained by convolutions."""
    uncertainty: float
    """Relative error of a predicted step without measurements."""
    source: str


AMPERE = Chip(
    name="ampere",
    matrix_share=0.82,
    mixed_share=0.82,
    float8_share=0.66,
    matrix_depth=400.0,
    attention=MappingProxyType(
        {
            "flash": AttentionRates(forward=0.38, backward=0.3455),
            # Dao 2023 (arXiv:2307.08691), figures 5 and 6: about 200 and 175 TFLOP/s on A100.
            "flash2": AttentionRates(
                forward=0.64, backward=0.56, forward_half=350, backward_half=700
            ),
            "fused": AttentionRates(
                forward=0.64, backward=0.56, forward_half=350, backward_half=700
            ),
        }
    ),
    uncertainty=0.15,
    source="published tables of A100 clusters (SC'21, Korthikanti, BLOOM, vTrain) on average",
)
HOPPER = Chip(
    name="hopper",
    matrix_share=0.66,
    mixed_share=0.84,
    float8_share=0.63,
    matrix_depth=60.0,
    attention=MappingProxyType(
        {
            # FlashAttention 1 uses none of Hopper's instructions: 200 TFLOP/s in llm-foundry's long
            # sequences.
            "flash": AttentionRates(forward=0.20, backward=0.182),
            "flash2": AttentionRates(
                forward=0.352, backward=0.334, forward_half=350, backward_half=1000, width_half=14
            ),
            "fused": AttentionRates(
                forward=0.62, backward=0.545, forward_half=380, backward_half=650, width_half=54
            ),
        }
    ),
    uncertainty=0.15,
    source="measured on one H200 of 700 W, 2026-11-15 (benchmarks/cost/predict_kernels.py): "
    "products of 4096 and wider hold 680 TFLOP/s, in 8 bits 1290; less 5 %, for the slowest of "
    "many chips sets the pace (Sinha et al., SC'22: chips that power limits differ by 8 %); "
    "in eager steps of 19 models 780 to 900 (benchmarks/predict/thirdparty.py, 2026-11-18)",
)
HOPPER_2023 = replace(
    HOPPER,
    matrix_depth=500.0,
    source="llm-foundry's tables of 2023 (CUDA 11.8 to 12.1) on average, every model left out "
    "once: small products lose as on Ampere, for cuBLAS had few tiles of Hopper's own yet",
)
HOPPER_500W = replace(
    HOPPER,
    matrix_share=0.515,
    mixed_share=0.66,
    float8_share=0.49,
    source="as HOPPER; products are limited by power, which their rate follows with an exponent of "
    "about 3/4: (500 W / 700 W)^0.75 = 0.78",
)
BLACKWELL = replace(
    HOPPER,
    name="blackwell",
    uncertainty=0.30,
    source="taken for Hopper: nothing was measured",
)
UNKNOWN = replace(
    AMPERE, name="unknown", uncertainty=0.35, source="taken for Ampere: nothing was measured"
)
VECTOR = replace(
    UNKNOWN,
    name="vector",
    float32_convolution_share=0.82,
    source="no matrix units for float32. TensorFlow's table of benchmarks (2017): 142 images/s of "
    "Inception-V3, 219 of ResNet-50 and 92 of ResNet-152 on a P100, batch 64; predicted 142, 205 "
    "and 82. Not a K80: 30 and 52 images/s, 36 and 51 predicted with the usual share",
)
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "h100-96g": HOPPER_500W,
        "h100": HOPPER,
        "h200": HOPPER,
        "gh200": HOPPER,
        "b200": BLACKWELL,
        "gb200": BLACKWELL,
        "b300": BLACKWELL,
        "gb300": BLACKWELL,
        "a100": AMPERE,
        **dict.fromkeys(("rtx2080", "t4", "v100", "p100", "titanx"), VECTOR),
    }
)
"""Architectures by prefix of the device type's name; the first match counts."""


def chip_of(kind: str, libraries: Libraries = "current") -> Chip:
    """Architecture of a device type."""
    found = next((chip for start, chip in CHIPS.items() if kind.startswith(start)), UNKNOWN)
    return HOPPER_2023 if found is HOPPER and libraries == "2023" else found


MULTIPROCESSORS: Mapping[str, int] = MappingProxyType(
    {
        "h200": 132, "h100-pcie": 114, "h100": 132, "gb200": 148, "b200": 148,
        "v100": 80, "p100": 56, "k80": 13, "t4": 40, "l40s": 142, "l4": 58, "a6000": 84,
        "a40": 84, "a10g": 80, "titanx": 24, "rtx2080": 46, "rtx3060": 28, "rtx3070": 46,
        "rtx3080": 68, "rtx3090": 82, "rtx4060": 24, "rtx4070": 46, "rtx4080": 76, "rtx4090": 128,
        "rtx5070": 48, "rtx5080": 84, "rtx5090": 170,
    }
)  # fmt: skip
"""Number of multiprocessors by prefix of the device type's name, from the datasheet of its preset.

A100 is left out because `AMPERE` was fitted to its tables with the wave size of an H200.
"""


def num_multiprocessors(kind: str) -> int:
    """Number of multiprocessors of a device type; those of an H200 if it is unknown."""
    found = (count for start, count in MULTIPROCESSORS.items() if kind.startswith(start))
    return next(found, MULTIPROCESSORS["h200"])
