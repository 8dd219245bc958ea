"""The shape of a model from the ``config.json`` that Hugging Face models come with.

Each family names its sizes in its own way and leaves out what equals a default; a table per family
says where each size stands. Families that are not known are refused: guessing would be worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.transformer.shape import Experts, MlpKind, Transformer

_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Where a family of models keeps its sizes; several keys where names have changed."""

    hidden: tuple[str, ...] = ("hidden_size",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    mlp_width: tuple[str, ...] = ("intermediate_size",)
    sequence: tuple[str, ...] = ("max_position_embeddings",)
    dropout: tuple[str, ...] = ()
    mlp: MlpKind = "gelu"
    tied: bool = True
    """What the family's code assumes where the file does not say."""
    learned_positions: bool = False
    biases: bool = True


_LLAMA = _Family(mlp="swiglu", tied=False, biases=False, dropout=("attention_dropout",))
_FAMILIES = {
    "gpt2": _Family(
        hidden=("n_embd", "hidden_size"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
        mlp_width=("n_inner",),
        sequence=("n_positions", "n_ctx"),
        dropout=("resid_pdrop", "attn_pdrop"),
        learned_positions=True,
    ),
    "gpt_neox": _Family(tied=False, dropout=("hidden_dropout", "attention_dropout")),
    "bloom": _Family(
        hidden=("hidden_size", "n_embed"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
        mlp_width=(),
        sequence=("seq_length",),
        dropout=("hidden_dropout", "attention_dropout"),
    ),
    "opt": _Family(mlp_width=("ffn_dim",), dropout=("dropout",), learned_positions=True),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "phi3": _LLAMA,
    "gemma": replace(_LLAMA, tied=True),
}


def from_hf_config(config: Mapping[str, Any], name: str = "") -> Transformer:
    """The model of a parsed ``config.json``; raises `InputFileError` for families not known."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise InputFileError(
            f"models of the family {fields.shown(kind)} are not known here",
            hint=f"known: {', '.join(sorted(_FAMILIES))}; or describe the model in a TOML file",
        )
    family = _FAMILIES[kind]
    hidden = _first(config, family.hidden, "hidden")
    heads = _first(config, family.heads, "heads")
    _refuse_projection(config, hidden)
    return Transformer(
        name=name or str(config.get("_name_or_path") or kind),
        hidden=hidden,
        layers=_first(config, family.layers, "layers"),
        heads=heads,
        kv_heads=_first(config, ("num_key_value_heads",), "kv_heads", heads),
        head_width=_first(config, ("head_dim",), "head_width", hidden // heads),
        mlp_width=_first(config, family.mlp_width, "mlp_width", _usual_width(family, hidden)),
        mlp=family.mlp,
        vocabulary=_first(config, ("vocab_size",), "vocabulary"),
        sequence=_first(config, family.sequence, "sequence", 2048 if kind == "bloom" else None),
        tied_embeddings=fields.flag(
            config.get("tie_word_embeddings", family.tied), "tie_word_embeddings"
        ),
        learned_positions=family.learned_positions,
        biases=family.biases,
        dropout=any(
            fields.number(config.get(key) or 0.0, key, 0.0, 1.0) > 0 for key in family.dropout
        ),
        experts=_experts(config) if kind in ("mixtral", "qwen3_moe") else None,
        source="config.json",
    )


def _usual_width(family: _Family, hidden: int) -> int | None:
    return 4 * hidden if family.mlp == "gelu" else None


def _experts(config: Mapping[str, Any]) -> Experts:
    return Experts(
        count=_first(config, ("num_local_experts", "num_experts"), "experts.count", 8),
        active=_first(config, ("num_experts_per_tok",), "experts.active", 2),
        mlp_width=_first(config, ("moe_intermediate_size", "intermediate_size"), "experts.width"),
    )


def _refuse_projection(config: Mapping[str, Any], hidden: int) -> None:
    width = config.get("word_embed_proj_dim", hidden)
    if width != hidden:
        raise InputFileError(
            f"its embedding is {fields.shown(width)} wide and its layers are {hidden}",
            hint="models that project their embedding are not described by a transformer's shape",
        )


def _first(
    config: Mapping[str, Any], keys: tuple[str, ...], meaning: str, default: int | None = None
) -> int:
    """The first of the keys that is stated, as a size; null means that it is not."""
    for key in keys:
        if config.get(key) is not None:
            return fields.integer(config[key], key, 1, _MAX_SIZE)
    if default is None:
        wanted = " or ".join(repr(key) for key in keys)
        raise InputFileError(
            f"the file has no key {wanted}",
            hint=f"add it, or state {meaning} = … in a TOML file",
        )
    return default
