"""Parameters and FLOPs of a transformer, from its shape alone.

A paper's fraction of peak depends on how it counts FLOPs, so the published conventions are all here
by name. Only ``model-causal`` leaves out the masked half of causal attention.
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
"""Convention by which the FLOPs of a step are counted.

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
    """Parameters of the embedding, the layers and the end of a model."""
    embedding = model.vocabulary * model.hidden
    if model.learned_positions:
        embedding += model.sequence * model.hidden
    num_sparse = sparse_layers(model)
    layers = (model.layers - num_sparse) * layer_parameters(model, sparse=False)
    layers += num_sparse * layer_parameters(model, sparse=True)
    return ParameterCounts(
        embedding=embedding,
        layers=layers,
        final=norm_parameters(model)
        + (0 if model.tied_embeddings else model.vocabulary * model.hidden),
        inactive=num_sparse * _inactive_parameters(model),
    )


def sparse_layers(model: Transformer) -> int:
    """Number of layers that have experts."""
    return model.layers - model.experts.dense_layers if model.experts else 0


def layer_parameters(model: Transformer, *, sparse: bool) -> int:
    """Parameters of one layer, with experts or with the dense MLP."""
    # Two norms: before attention and before the MLP.
    common = _attention_parameters(model) + 2 * norm_parameters(model)
    experts = model.experts
    if not sparse or experts is None:
        return common + mlp_parameters(model, model.mlp_width)
    routed = experts.count * mlp_parameters(model, experts.mlp_width)
    shared = mlp_parameters(model, experts.shared_width) if experts.shared_width else 0
    # The router's matrix has one column per expert.
    return common + model.hidden * experts.count + routed + shared


def norm_parameters(model: Transformer) -> int:
    """Parameters of one norm."""
    return model.hidden * (2 if model.biases else 1)


def attention_weights(model: Transformer) -> int:
    """Elements of the matrices for queries, keys, values and attention's output."""
    own = model.attention
    heads = own.query_rank * own.query_width + own.key_rank * own.up_width
    return heads + model.hidden * (own.latent_width + own.output_width)


def _attention_parameters(model: Transformer) -> int:
    own, latent = model.attention, model.latent
    biases = own.query_width + own.up_width + model.hidden if model.biases else 0
    # With MLA, the latent vectors have norms of their own.
    norms = latent.query_rank + latent.key_rank if latent else 0
    return attention_weights(model) + biases + norms


def mlp_parameters(model: Transformer, width: int) -> int:
    """An MLP of the given inner width."""
    num_wide = 1 if model.mlp == "gelu" else 2
    matrices = (num_wide + 1) * model.hidden * width
    return matrices + (num_wide * width + model.hidden if model.biases else 0)


def _inactive_parameters(model: Transformer) -> int:
    if model.experts is None:
        return 0
    num_inactive = model.experts.count - model.experts.active
    return num_inactive * mlp_parameters(model, model.experts.mlp_width)


# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────


def step_flops(model: Transformer, global_batch: int, convention: Convention) -> float:
    """FLOPs of one training step of ``global_batch`` sequences in a published convention."""
    num_sparse = sparse_layers(model)
    mlps = (model.layers - num_sparse) * _mlp_weights(model, sparse=False)
    mlps += num_sparse * _mlp_weights(model, sparse=True)
    # 2 FLOPs per weight and token: a multiplication and an addition.
    products = 2.0 * model.sequence * (model.layers * attention_weights(model) + mlps)
    widths = model.attention.query_width + model.attention.output_width
    attention = model.layers * 2.0 * model.sequence**2 * widths
    # The output layer is never recomputed, so it always counts three passes.
    logits = 3 * 2.0 * model.sequence * model.hidden * model.vocabulary
    passes, attention_passes = {
        "model": (3, 3),
        "model-causal": (3, 1.5),
        "hardware-full-recompute": (4, 4),
        "hardware-selective-published": (3, 6),
        "hardware-selective-once": (3, 4),
    }[convention]
    return global_batch * (passes * products + attention_passes * attention + logits)


def _mlp_weights(model: Transformer, *, sparse: bool) -> float:
    """Elements of the MLP's matrices that one token uses."""
    num_matrices = 2 if model.mlp == "gelu" else 3
    if not sparse or model.experts is None:
        return num_matrices * model.hidden * model.mlp_width
    experts = model.experts
    width = experts.active * experts.mlp_width + experts.shared_width
    return num_matrices * model.hidden * width + model.hidden * experts.count
