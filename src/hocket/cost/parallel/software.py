"""Behaviour of the training program that decides its speed and memory, besides the config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hocket.cost.chips import Libraries
from hocket.cost.parallel.overheads import DEFAULT_OVERHEADS, MemoryOverheads

Attention = Literal["plain", "flash", "flash2", "fused"]
"""``plain`` keeps the matrix of all pairs of tokens; the others never write it: FlashAttention 1
and 2, and the kernels that were made for Hopper (cuDNN, FlashAttention 3)."""
Selective = Literal["attention", "ops", "activations"]
"""Scope of selective recomputation: the inside of attention, every second matrix product and all
cheap ops, or the results of norms and of the MLP's activation."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program and how it is set."""

    name: str
    dtype: str = "bfloat16"
    """Arithmetic of matrix products: float16, bfloat16, float8 or float32."""
    attention: Attention = "flash"
    gradient_bytes: int = 4
    """Bytes per parameter in which gradients are summed."""
    reduce_bytes: int | None = None
    """Bytes per parameter in which gradients are sent; None for those in which they are summed."""
    scatters_activations: bool = True
    """True if tensor-parallel ranks each send their part to the next stage, which gathers it."""
    overlaps_tensor: bool = False
    """True if tensor-parallel collectives hide behind matrix products."""
    overlaps_data: bool = False
    """True if collectives of data-parallel ranks hide behind the backward pass."""
    overlaps_pipeline: bool = False
    """True if activations travel to the next stage while another chunk computes."""
    fuses_accumulation: bool = True
    """True if matrix products add to the gradients of earlier microbatches themselves; otherwise
    one more pass over all gradients does, after each microbatch."""
    gathers_by_tensor: bool = False
    """True if fully divided weights are gathered tensor by tensor, which fills one network adapter
    at a time, instead of layer by layer."""
    spare_gradient_bytes: int = 0
    """Bytes per parameter of gradients that stay in memory beside their sum."""
    libraries: Libraries = "current"
    """Age of its matrix and attention libraries."""
    is_eager: bool = False
    """True if norms, rotations and activations are many small kernels instead of fused ones."""
    rematerialises: bool = False
    """True if results of norms and of the MLP's activation are recomputed inside the kernels of the
    backward pass instead of saved, as ``torch.compile`` partitions its graphs by default."""
    selective: Selective = "attention"
    cast_bytes: float = 6.0
    """Moved per element of the inputs, output gradients and weights of a product to make it 8 bits
    wide: read for the scale, read again, written twice (as it is and transposed)."""
    casts_weights: bool = True
    """True if weights are made 8 bits wide again for every microbatch."""
    float8_rate: float = 1.0
    """Of the rate of 8-bit products, where each row has a scale of its own."""
    gap_s: float = 0.4e-3
    """Gaps between the kernels of one pass over one layer."""
    balances_context: bool = True
    """True if context-parallel ranks share the work of a causal mask evenly: each takes a part from
    the front of the sequence and one from the back."""
    sends_once: bool = False
    """True if a token goes to a host once, however many of its experts are there (DeepEP)."""
    overlaps_experts: bool = False
    """True if tokens travel to experts while another microbatch computes."""
    routing_host_s: float = 3.1e-3
    """The host's time to launch one pass over one layer's routing: tokens are counted, put in order
    and sent, and the host waits for the counts. Megatron-Bridge's runs of single sequences on B200
    take 9 ms per layer and microbatch, three times what the device needs. Experts of a fixed
    capacity, which drop tokens, need no counts: 4.7 ms there."""
    weighs_inside: bool = False
    """True if experts weigh their results themselves, so that these need not stay for the router's
    gradient."""
    optimizer_bytes: int = 12
    """Bytes per parameter besides 16-bit weights and gradients: Adam with a 32-bit copy."""
    copies_gradients: bool = True
    """True if gradients in 16 bits are copied to 32 for the optimizer."""
    logit_bytes: int = 4
    """Kept per token and word of the vocabulary for the loss."""
    overheads: MemoryOverheads = DEFAULT_OVERHEADS
    shard_ranks: int = 0
    """Replicas that divide state among them, where the others hold the same again (HSDP); 0 for
    all of them."""
    offloads: bool = False
    """True if state that replicas divide stays in the memory of the host, and the optimizer with
    it."""
    host_share: float = 0.0
    """Of the layers, those whose activations wait in the host's memory for their backward. Nothing
    is added to the step: the recipes that do so have Grace's link, which layers hide."""
    replays_graphs: bool = False
    """True if passes are recorded once as CUDA graphs and replayed: the host launches nothing."""
    pause_s: float = 0.0
    """Constant overhead of the program per pass over each layer, which nothing hides."""

    @property
    def most_shards(self) -> float:
        """The largest number of replicas that divide state among them."""
        return float(self.shard_ranks) if self.shard_ranks else math.inf

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes per parameter that data-parallel ranks add up."""
        return self.gradient_bytes if self.reduce_bytes is None else self.reduce_bytes
