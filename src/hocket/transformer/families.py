"""Names that families of models give the matrices of their layers: which can be divided, and how.

As Megatron-LM divides a block (Shoeybi et al., 2019), attention and MLP widen by a matrix whose
columns are divided and narrow by one whose rows are.
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
    """With the number of matrices that stand side by side in each."""
    rows: tuple[str, ...]
    whole: str
    """Pattern of the names of parameters that every rank has whole: norms outside of both."""
    head_width: tuple[str, str] = ("", "head_dim")
    """The module of a layer, and its attribute, that say how wide a head is."""


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
    """The family whose names the modules of a layer have; None where they have others."""
    known = set(modules)
    return next((f for f in FAMILIES if {*f.columns, *f.rows} <= known), None)


def without_rule(family: Family, parameters: Collection[str]) -> str:
    """The first weight of a layer that is used on parts of it without a rule; empty for none."""
    divided = tuple(f"{name}." for name in (*family.columns, *family.rows))
    unknown = (
        name for name in parameters
        if not name.startswith(divided) and not re.fullmatch(family.whole, name)
    )  # fmt: skip
    return next(unknown, "")
