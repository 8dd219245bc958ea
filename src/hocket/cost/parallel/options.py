"""Parse settings of a training program from text such as ``async-tp,float8=rowwise``.

Each option changes the fields of `Software` that it stands for and nothing else. Predictions are
for a program with its options applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from hocket.base.errors import UsageError, unknown_name
from hocket.base.units import whole_number
from hocket.cost.parallel.software import Selective, Software

MAX_SHARDS = 1_000_000


class ProgramOption(NamedTuple):
    """An option of a training program: its meaning, and the fields of `Software` that it sets."""

    meaning: str
    fields: Mapping[str, Any] = MappingProxyType({})
    by_value: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Fields by value, for an option that is written with an equals sign."""
    values: str = ""
    """Description of the values; empty for an option without."""


OPTIONS: Mapping[str, ProgramOption] = MappingProxyType(
    {
        "async-tp": ProgramOption(
            "tensor-parallel collectives hide behind matrix products", {"overlaps_tensor": True}
        ),
        "async-ep": ProgramOption(
            "tokens are sent to experts while another microbatch computes",
            {"overlaps_experts": True},
        ),
        "compiled": ProgramOption(
            "norms, rotations and activations are fused kernels, recomputed in the backward",
            {"is_eager": False, "rematerialises": True},
        ),
        "eager": ProgramOption(
            "norms, rotations and activations are many small kernels",
            {"is_eager": True, "rematerialises": False},
        ),
        "float8": ProgramOption(
            "8-bit products with a scale per tensor or per row",
            by_value={
                "tensorwise": {"dtype": "float8"},
                # A scale per row takes a pass for each of the two uses of a tensor, and slower
                # products.
                "rowwise": {"dtype": "float8", "cast_bytes": 16.0, "float8_rate": 0.65},
            },
            values="tensorwise or rowwise",
        ),
        "graphs": ProgramOption(
            "passes are replayed as CUDA graphs: the host launches no kernels",
            {"replays_graphs": True},
        ),
        "hsdp": ProgramOption(
            "state is sharded over N replicas and replicated over the others", values="N"
        ),
        "offload": ProgramOption(
            "sharded state stays in the host's memory, with the optimizer", {"offloads": True}
        ),
        "selective": ProgramOption(
            "scope of selective recomputation",
            by_value={name: {"selective": name} for name in get_args(Selective)},
            values="attention, ops or activations",
        ),
    }
)
"""Options by name."""


def with_options(software: Software, texts: Sequence[str]) -> Software:
    """Return the program with the options of ``texts`` applied in order."""
    for text in texts:
        for part in text.split(","):
            if part.strip():
                software = replace(software, **_fields(part.strip()))
    return software


def _fields(text: str) -> Mapping[str, Any]:
    """Fields of `Software` that one option sets."""
    name, equals, value = (word.strip() for word in text.partition("="))
    if name not in OPTIONS:
        raise unknown_name("option of a program", name[:60], OPTIONS)
    option = OPTIONS[name]
    if bool(equals) != bool(option.values):
        expected = f"{name}={option.values}" if option.values else name
        raise UsageError(f"cannot read {text[:60]!r}", hint=f"write {expected}")
    if option.by_value and value not in option.by_value:
        raise unknown_name(name, value[:60], option.by_value)
    if name != "hsdp":
        return option.by_value.get(value, option.fields)
    num_ranks = whole_number(value, MAX_SHARDS)
    if not num_ranks:
        raise UsageError(
            f"hsdp is {value[:60]!r}", hint="expected the replicas that shard state: hsdp=8"
        )
    return {"shard_ranks": num_ranks}
