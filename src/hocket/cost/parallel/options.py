"""Parse settings of a training program from text such as ``async-tp,float8=rowwise``.

Each option changes the fields of `Software` that it stands for and nothing else. Predictions are
for a program with its options applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import get_args

from hocket.base.errors import UsageError, unknown_name
from hocket.base.units import whole_number
from hocket.cost.parallel.software import Selective, Software

MAX_SHARDS = 1_000_000


@dataclass(frozen=True)
class ProgramOption:
    """One option of a training program, with its meaning and its effect on `Software`."""

    values: str
    """Allowed values after the equals sign; empty for an option without a value."""
    meaning: str
    change: Callable[[Software, str], Software]


def _float8(software: Software, value: str) -> Software:
    recipe = _one_of("float8", value, ("tensorwise", "rowwise"))
    software = replace(software, dtype="float8")
    if recipe == "tensorwise":
        return software
    # A scale per row takes another pass for each of the two uses of a tensor, and slower products.
    return replace(software, cast_bytes=16.0, float8_rate=0.65)


def _selective(software: Software, value: str) -> Software:
    kept = _one_of("selective", value, get_args(Selective))
    return replace(software, selective=kept)  # type: ignore[arg-type]


def _hsdp(software: Software, value: str) -> Software:
    num_ranks = whole_number(value, MAX_SHARDS)
    if not num_ranks:
        raise UsageError(
            f"hsdp is {value[:60]!r}", hint="expected the replicas that divide state: hsdp=8"
        )
    return replace(software, shard_ranks=num_ranks)


OPTIONS: Mapping[str, ProgramOption] = MappingProxyType(
    {
        "async-tp": ProgramOption(
            "", "tensor-parallel collectives hide behind matrix products",
            lambda s, _: replace(s, overlaps_tensor=True),
        ),
        "async-ep": ProgramOption(
            "", "tokens travel to experts while another microbatch computes",
            lambda s, _: replace(s, overlaps_experts=True),
        ),
        "compiled": ProgramOption(
            "", "norms, rotations and activations are fused kernels, recomputed in the backward",
            lambda s, _: replace(s, is_eager=False, rematerialises=True),
        ),
        "eager": ProgramOption(
            "", "norms, rotations and activations are many small kernels",
            lambda s, _: replace(s, is_eager=True, rematerialises=False),
        ),
        "float8": ProgramOption(
            "tensorwise or rowwise", "8-bit products with a scale per tensor or per row", _float8
        ),
        "graphs": ProgramOption(
            "", "passes are replayed as CUDA graphs: the host launches nothing",
            lambda s, _: replace(s, replays_graphs=True),
        ),
        "hsdp": ProgramOption(
            "N", "N replicas divide state, the others hold the same again", _hsdp
        ),
        "offload": ProgramOption(
            "", "state that replicas divide stays in the host's memory, with the optimizer",
            lambda s, _: replace(s, offloads=True),
        ),
        "selective": ProgramOption(
            "attention, ops or activations", "scope of selective recomputation",
            _selective,
        ),
    }
)  # fmt: skip
"""Options by name."""


def with_options(software: Software, texts: Sequence[str]) -> Software:
    """Return the program with the options of ``texts`` applied in order."""
    for text in texts:
        for part in text.split(","):
            if part.strip():
                software = _with(software, part.strip())
    return software


def _with(software: Software, text: str) -> Software:
    name, equals, value = (word.strip() for word in text.partition("="))
    if name not in OPTIONS:
        raise unknown_name("option of a program", name[:60], OPTIONS)
    option = OPTIONS[name]
    if bool(equals) != bool(option.values):
        expected = f"{name}={option.values}" if option.values else name
        raise UsageError(f"cannot read {text[:60]!r}", hint=f"write {expected}")
    return option.change(software, value)


def _one_of(name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise unknown_name(name, value[:60], known)
    return value
