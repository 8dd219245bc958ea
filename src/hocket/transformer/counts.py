"""Parameters and FLOPs of a transformer, from its shape alone.

FLOPs are counted in the published conventions, each by its name, because a paper's fraction of peak
depends on its convention. None of them subtracts the masked half of causal attention unless it says
so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hocket.transformer.shape import Transformer

Convention = Literal[
    "model",
    "model-causal",
    "hardware-full-recompute",
    "hardware-selective-published",
    "hardware-selective-once",
]
"""How the FLOPs of a step are counted.

``model``: a forward pass, and a backward pass of twice its work (MFU; Chowdhery et al. 2022), over
all pairs of tokens; ``model-causal``: only pairs under the causal mask.
``hardware-full-recompute``: layers run forward twice (SC'21). ``hardware-selective-published``:
attention products count six times their forward pass, as in the HFU of Korthikanti et al.;
``hardware-selective-once``: they count four times, as they are executed.
"""


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters of a model's parts."""

    embedding: int
    """Token and position embeddings."""
    layers: int
    """All layers together."""
    final: int
    """Last norm, and the output layer where it is not the embedding."""
    inactive: int
    """Parameters of experts that a token is not routed to."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.layers + self.final

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.inactive


def parameter_counts(model: Transformer) -> ParameterCounts:
    """Parameters of the embedding, the layers and what follows them."""
    embedding = model.vocabulary * model.hidden
    if model.learned_positions:
        embedding += model.sequence * model.hidden
    num_sparse = sparse_layers(model)
    layers = (model.layers - num_sparse) * layer_parameters(model, sparse=False)
    if num_sparse:
        layers += num_sparse * layer_parameters(model, sparse=True)
    return ParameterCounts(
        embedding=embedding,
        layers=layers,
        final=norm_parameters(model)
        + (0 if model.tied_embeddings else model.vocabulary * model.hidden),
        inactive=num_sparse * _inactive_parameters(model),
    )


def sparse_layers(model: Transformer) -> int:
    """Layers that have experts."""
    return model.layers - model.experts.dense_layers if model.experts else 0


def layer_parameters(model: Transformer, *, sparse: bool) -> int:
    """Parameters of one layer, with experts or with the dense MLP."""
    norms = 2 * norm_parameters(model)
    if not sparse:
        return attention_parameters(model) + mlp_parameters(model, model.mlp_width) + norms
    assert model.experts is not None
    router = model.hidden * model.experts.count
    return attention_parameters(model) + norms + router + expert_parameters(model)


def norm_parameters(model: Transformer) -> int:
    """Parameters of one norm."""
    return model.hidden * (2 if model.biases else 1)


def attention_parameters(model: Transformer) -> int:
    """Projections of queries, keys, values and of the output."""
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    matrices = 2 * model.hidden * query + 2 * model.hidden * key
    return matrices + (query + 2 * key + model.hidden if model.biases else 0)


def mlp_parameters(model: Transformer, width: int) -> int:
    """An MLP of the given inner width."""
    num_wide = 1 if model.mlp == "gelu" else 2
    matrices = (num_wide + 1) * model.hidden * width
    return matrices + (num_wide * width + model.hidden if model.biases else 0)


def expert_parameters(model: Transformer) -> int:
    """All experts of one layer: routed ones and shared ones."""
    if model.experts is None:
        return 0
    routed = model.experts.count * mlp_parameters(model, model.experts.mlp_width)
    shared = model.experts.shared_width
    return routed + (mlp_parameters(model, shared) if shared else 0)


def _inactive_parameters(model: Transformer) -> int:
    if model.experts is None:
        return 0
    num_inactive = model.experts.count - model.experts.active
    return num_inactive * mlp_parameters(model, model.experts.mlp_width)


# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────


def layer_forward_flops(model: Transformer, *, sparse: bool) -> float:
    """FLOPs of one layer's matrix products for one sequence, without attention scores."""
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    weights = 2 * model.hidden * (query + key) + _mlp_weights(model, sparse=sparse)
    return 2.0 * model.sequence * weights


def attention_forward_flops(model: Transformer) -> float:
    """FLOPs of the products over all pairs of tokens in one layer, for one sequence."""
    return 4.0 * model.sequence**2 * model.heads * model.head_width


def logits_forward_flops(model: Transformer) -> float:
    """FLOPs of the output layer for one sequence."""
    return 2.0 * model.sequence * model.hidden * model.vocabulary


def step_flops(model: Transformer, global_batch: int, convention: Convention) -> float:
    """FLOPs of one training step of ``global_batch`` sequences in a published convention."""
    num_sparse = sparse_layers(model)
    products = (model.layers - num_sparse) * layer_forward_flops(model, sparse=False)
    if num_sparse:
        products += num_sparse * layer_forward_flops(model, sparse=True)
    attention = model.layers * attention_forward_flops(model)
    logits = 3 * logits_forward_flops(model)
    passes, attention_passes = {
        "model": (3, 3),
        "model-causal": (3, 1.5),
        "hardware-full-recompute": (4, 4),
        "hardware-selective-published": (3, 6),
        "hardware-selective-once": (3, 4),
    }[convention]
    return global_batch * (passes * products + attention_passes * attention + logits)


def _mlp_weights(model: Transformer, *, sparse: bool) -> float:
    """Weights of the MLP's matrices that one token uses."""
    num_matrices = 2 if model.mlp == "gelu" else 3
    if not sparse or model.experts is None:
        return num_matrices * model.hidden * model.mlp_width
    experts = model.experts
    width = experts.active * experts.mlp_width + experts.shared_width
    return num_matrices * model.hidden * width + model.hidden * experts.count
