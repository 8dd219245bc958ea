"""Training programs that hocket knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hocket.cost.parallel.software import Software
from hocket.errors import unknown_name
from hocket.hardware.cluster import Cluster

DEEPSPEED_PAUSE_S = 2.5e-3
"""DeepSpeed's pipeline engine waits for the device around every layer that it computes again: the
published steps of MT-NLG 530B and of BLOOM's search both show 7 to 13 ms per layer and microbatch
(three passes) that depend neither on the layer's size nor on the microbatch's."""

SOFTWARES: Mapping[str, Software] = MappingProxyType(
    {
        software.name: software
        for software in (
            Software(
                name="megatron-2021",
                dtype="float16",
                attention="plain",
                gradient_bytes=2,
                fuses_accumulation=False,
            ),
            Software(name="megatron-2022", dtype="float16", attention="plain"),
            Software(
                name="megatron-deepspeed",
                dtype="float16",
                attention="plain",
                gradient_bytes=2,
                scatters_activations=False,
                fuses_accumulation=False,
                pause_s=DEEPSPEED_PAUSE_S,
            ),
            Software(
                name="deepspeed-zero3",
                dtype="float16",
                attention="plain",
                gradient_bytes=2,
                overlaps_data=True,
                fuses_accumulation=False,
                gathers_by_tensor=True,
            ),
            Software(name="megatron-core", overlaps_tensor=True, overlaps_data=True),
            Software(
                name="torch",
                scatters_activations=False,
                overlaps_data=True,
                fuses_accumulation=False,
            ),
        )
    }
)
"""Programs by name: Megatron-LM as of SC'21 and of 2022 (sums gradients inside matrix products),
Megatron-DeepSpeed as BLOOM used it, ZeRO-3 of DeepSpeed in 2021, Megatron-Core with its overlaps,
and torch.distributed with FSDP2."""
DEFAULT_SOFTWARE = "megatron-core"


def usual_dtype(software: Software, cluster: Cluster) -> str:
    """The program's type of arithmetic, or one that all devices have where some lack it."""
    for dtype in (software.dtype, "float16", "bfloat16", "float32"):
        if all(dtype in kind.peak_flops for kind in cluster.kinds):
            return dtype
    return software.dtype


def find_software(name: str) -> Software:
    """The program of a name."""
    if name not in SOFTWARES:
        raise unknown_name("software", name, SOFTWARES)
    return SOFTWARES[name]
