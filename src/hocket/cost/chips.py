"""Attainable fractions of peak rates by GPU architecture, each with its source.

A datasheet states peak rates; kernels attain a fraction that differs between architectures. The
fractions are in ``rates.toml``: Hopper's were measured (``benchmarks/cost/predict_kernels.py``),
Ampere's were fitted to the mean of published tables of A100 clusters. Unlisted device types use
Ampere's, and predictions for them carry a range (`Chip.uncertainty`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from hocket.cost.rates import RATES

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


def _chip(name: str) -> Chip:
    table = dict(RATES["chips"][name])
    base = table.pop("base", None)
    if base is not None:
        # A chip may inherit the rates of another and change some.
        return replace(_chip(base), name=name, **table)
    rates = {kernel: AttentionRates(**own) for kernel, own in table.pop("attention").items()}
    return Chip(name=name, attention=MappingProxyType(rates), **table)


CHIPS: Mapping[str, Chip] = MappingProxyType({name: _chip(name) for name in RATES["chips"]})
"""Architectures by name."""
MULTIPROCESSORS: Mapping[str, int] = RATES["multiprocessors"]
"""Number of multiprocessors by prefix of the device type's name."""


def chip_of(kind: str, libraries: Libraries = "current") -> Chip:
    """Architecture of a device type, by the first prefix of its name that is listed."""
    # The order of the table matters: the first prefix that matches decides.
    listed = RATES["architecture"].items()
    name = next((name for start, name in listed if kind.startswith(start)), "unknown")
    return CHIPS["hopper-2023" if name == "hopper" and libraries == "2023" else name]


def num_multiprocessors(kind: str) -> int:
    """Number of multiprocessors of a device type; those of an H200 if it is unknown."""
    found = (count for start, count in MULTIPROCESSORS.items() if kind.startswith(start))
    return next(found, MULTIPROCESSORS["h200"])
