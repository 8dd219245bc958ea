"""Training programs that hocket knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from hocket.base.errors import unknown_name
from hocket.cost.parallel.overheads import MemoryOverheads
from hocket.cost.parallel.software import Software
from hocket.hardware.cluster import Cluster

DEEPSPEED_PAUSE_S = 2.5e-3
"""DeepSpeed's pipeline engine waits for the device around every layer that it computes again: the
published steps of MT-NLG 530B and of BLOOM's search both show 7 to 13 ms per layer and microbatch
(three passes) that depend neither on the layer's size nor on the microbatch's."""

MEGATRON_GAP_S = 0.22e-3
_LEAN = MemoryOverheads(constant_bytes=2.5e9, state_factor=1.0, activation_factor=1.05)
"""Libraries and communication buffers where state lies in a few large tensors."""
_TITAN_OVERHEADS = replace(_LEAN, activation_factor=1.2)
"""It states what its allocator has reserved, fragments included."""
_FSDP2 = Software(
    name="torch",
    attention="flash2",
    scatters_activations=False,
    overlaps_data=True,
    fuses_accumulation=False,
    # Weights are 32-bit and divided: the 16-bit ones of a layer live while it runs.
    optimizer_bytes=10,
    logit_bytes=10,
    overheads=_LEAN,
)
_MEGATRON_CORE = Software(
    name="megatron-core",
    attention="fused",
    overlaps_tensor=True,
    overlaps_data=True,
    # ``overlap_p2p_comm``, on by default where stages are interleaved.
    overlaps_pipeline=True,
    cast_bytes=4.0,
    casts_weights=False,
    gap_s=MEGATRON_GAP_S,
    sends_once=True,
    # ``overlap_moe_expert_parallel_comm``, as its recipe for Qwen3 in 16 bits has it.
    overlaps_experts=True,
    weighs_inside=True,
    overheads=_LEAN,
)
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
            _MEGATRON_CORE,
            replace(_MEGATRON_CORE, name="megatron-core-2024", libraries="2023"),
            _FSDP2,
            # FSDP 1 under autocast, as llm-foundry trained with it in 2023.
            replace(
                _FSDP2,
                name="fsdp",
                attention="flash",
                libraries="2023",
                reduce_bytes=2,
                logit_bytes=6,
            ),
            replace(
                _FSDP2,
                name="torchtitan",
                selective="ops",
                is_eager=False,
                rematerialises=True,
                cast_bytes=8.0,
                balances_context=False,
                overheads=_TITAN_OVERHEADS,
            ),
            replace(
                _FSDP2,
                name="torchtitan-eager",
                selective="ops",
                is_eager=True,
                balances_context=False,
                logit_bytes=12,
                overheads=_TITAN_OVERHEADS,
            ),
        )
    }
)
"""Programs by name: Megatron-LM as of SC'21 and of 2022 (sums gradients inside matrix products),
Megatron-DeepSpeed as BLOOM used it, ZeRO-3 of DeepSpeed in 2021, Megatron-Core with its overlaps,
and as of the first half of 2024 (release 0.8, NeMo 24.07) with the libraries of then,
torch.distributed with FSDP2, FSDP as of 2023, and torchtitan, compiled or not."""
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
