"""Names of the weight matrices in layers of known model families, for tensor parallelism.

As in Megatron-LM (Shoeybi et al., 2019), the first matrices of attention and MLP are split by
columns and the last ones by rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Names of the matrices in a layer."""

    name: str
    columns: Mapping[str, int]
    """Column-parallel matrices, with the number of matrices concatenated in each."""
    rows: tuple[str, ...]
    whole: str
    """Pattern of parameters that are replicated on every rank, such as norms."""
    head_width: tuple[str, str] = ("", "head_dim")
    """Module of a layer, and its attribute with the head width."""


FAMILIES = (
    Family(
        "GPT-2",
        {"attn.c_attn": 3, "mlp.c_fc": 1},
        ("attn.c_proj", "mlp.c_proj"),
        r"ln_[12]\..*",
        ("attn", "head_dim"),
    ),
    Family(
        "Llama, Mistral, Qwen2",
        {
            "self_attn.q_proj": 1, "self_attn.k_proj": 1, "self_attn.v_proj": 1,
            "mlp.gate_proj": 1, "mlp.up_proj": 1,
        },
        ("self_attn.o_proj", "mlp.down_proj"),
        r"(input|post_attention)_layernorm\..*",
        ("self_attn", "head_dim"),
    ),
    Family(
        "OPT",
        {"self_attn.q_proj": 1, "self_attn.k_proj": 1, "self_attn.v_proj": 1, "fc1": 1},
        ("self_attn.out_proj", "fc2"),
        r"(self_attn|final)_layer_norm\..*",
        ("self_attn", "head_dim"),
    ),
    Family(
        "BERT",
        {
            "attention.self.query": 1, "attention.self.key": 1, "attention.self.value": 1,
            "intermediate.dense": 1,
        },
        ("attention.output.dense", "output.dense"),
        r"(attention\.)?output\.LayerNorm\..*",
        ("attention.self", "attention_head_size"),
    ),
    # With and without a gate: the larger set of names has to be tried first.
    *(
        Family(
            "the built-in transformer",
            {
                "attention.query": 1, "attention.key": 1, "attention.value": 1, "mlp.up": 1, **gate,
            },
            ("attention.output", "mlp.down"),
            r"(attention|mlp)_norm\..*",
            ("attention", "head_width"),
        )
        for gate in ({"mlp.gate": 1}, {})
    ),
)  # fmt: skip


def named_family(modules: Collection[str]) -> Family | None:
    """The family whose matrices have the names of a layer's modules; None if there is none."""
    known = set(modules)
    return next((f for f in FAMILIES if {*f.columns, *f.rows} <= known), None)


def without_rule(family: Family, parameters: Collection[str]) -> str:
    """The first parameter of a layer that the family does not name; empty if all are known."""
    divided = tuple(f"{name}." for name in (*family.columns, *family.rows))
    unknown = (
        name for name in parameters
        if not name.startswith(divided) and not re.fullmatch(family.whole, name)
    )  # fmt: skip
    return next(unknown, "")
