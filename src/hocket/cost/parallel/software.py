"""Behaviour of a training program that determines speed and memory besides the parallel config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hocket.cost.chips import Libraries
from hocket.cost.parallel.overheads import DEFAULT_OVERHEADS, MemoryOverheads

Attention = Literal["plain", "flash", "flash2", "fused"]
"""``plain`` writes the score matrix of all pairs of tokens to memory. The others never do:
FlashAttention 1 and 2, and the kernels written for Hopper (cuDNN, FlashAttention 3)."""
Selective = Literal["attention", "ops", "activations"]
"""Scope of selective recomputation: the inside of attention; every second matrix product and all
cheap ops; or the results of norms and of the MLP's activation function."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program with its settings."""

    name: str
    dtype: str = "bfloat16"
    """Type in which matrix products are computed: float16, bfloat16, float8 or float32."""
    attention: Attention = "flash"
    gradient_bytes: int = 4
    """Bytes per parameter of the accumulated gradients."""
    reduce_bytes: int | None = None
    """Bytes per parameter of gradients in collectives; None for ``gradient_bytes``."""
    scatters_activations: bool = True
    """True if tensor-parallel ranks each send their shard to the next stage, which gathers."""
    overlaps_tensor: bool = False
    """True if tensor-parallel collectives hide behind matrix products."""
    overlaps_data: bool = False
    """True if data-parallel collectives hide behind the backward pass."""
    overlaps_pipeline: bool = False
    """True if activations are sent to the next stage while another chunk computes."""
    fuses_accumulation: bool = True
    """True if the products that compute weight gradients add them to the sum of earlier
    microbatches; otherwise a further pass over all gradients does so after each microbatch."""
    gathers_by_tensor: bool = False
    """True if fully sharded weights are gathered tensor by tensor, which keeps only one network
    adapter busy at a time, instead of layer by layer."""
    spare_gradient_bytes: int = 0
    """Bytes per parameter of gradients that are held in addition to their accumulated sum."""
    libraries: Libraries = "current"
    """Generation of its matrix and attention libraries: of 2023 or current."""
    is_eager: bool = False
    """True if norms, rotations and activations are many small kernels instead of fused ones."""
    rematerialises: bool = False
    """True if results of norms and of the MLP's activation function are recomputed inside backward
    kernels instead of saved, which is how ``torch.compile`` partitions its graphs by default."""
    selective: Selective = "attention"
    cast_bytes: float = 6.0
    """Bytes moved per element to cast inputs, output gradients and weights of a product to 8 bits:
    two reads (one for the scale) and two writes (plain and transposed)."""
    casts_weights: bool = True
    """True if weights are cast to 8 bits again for every microbatch."""
    float8_rate: float = 1.0
    """Factor on the rate of 8-bit products; below 1 if every row has its own scale."""
    gap_s: float = 0.4e-3
    """Seconds between the kernels of one pass over one layer, summed over the layer."""
    balances_context: bool = True
    """True if context-parallel ranks get equal work under a causal mask: each holds one part from
    the front of the sequence and one from the back."""
    sends_once: bool = False
    """True if a token is sent to a host once, however many of its experts are there (DeepEP)."""
    overlaps_experts: bool = False
    """True if tokens are sent to experts while another microbatch computes."""
    routing_host_s: float = 3.1e-3
    """Seconds of the host to launch one pass over one layer's routing. Tokens are counted, sorted
    and sent, and the host waits for the counts: Megatron-Bridge's runs of single sequences on B200
    take 9 ms per layer and microbatch, three times the device's time. Experts of a fixed capacity,
    which drop tokens, need no counts and take 4.7 ms there."""
    weighs_inside: bool = False
    """True if experts apply the router's weights to their results themselves, so that the results
    need not be saved for the router's gradient."""
    optimizer_bytes: int = 12
    """Bytes per parameter besides 16-bit weights and gradients: Adam with a 32-bit copy."""
    copies_gradients: bool = True
    """True if 16-bit gradients are copied to 32 bits for the optimizer."""
    logit_bytes: int = 4
    """Bytes saved for the loss per token and vocabulary entry."""
    overheads: MemoryOverheads = DEFAULT_OVERHEADS
    shard_ranks: int = 0
    """Number of replicas that shard state among them (HSDP); further groups of as many replicas
    hold copies. 0 to shard over all replicas."""
    offloads: bool = False
    """True if sharded state stays in host memory, where the optimizer runs."""
    host_share: float = 0.0
    """Fraction of the layers whose activations are offloaded to the host until their backward pass.
    No time is added to the step: the recipes that offload use Grace's link, and layers hide those
    copies."""
    replays_graphs: bool = False
    """True if passes are captured as CUDA graphs and replayed, so the host launches no kernels."""
    pause_s: float = 0.0
    """Seconds of constant overhead per pass over each layer, which nothing hides."""

    @property
    def most_shards(self) -> float:
        """Largest number of replicas that shard state among them."""
        return float(self.shard_ranks) if self.shard_ranks else math.inf

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes per parameter of gradients in data-parallel collectives."""
        return self.gradient_bytes if self.reduce_bytes is None else self.reduce_bytes
