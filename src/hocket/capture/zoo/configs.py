"""Hugging Face models from a configuration: a ``config.json``, ``hf:…`` or a preset's shape.

The class is the one that the file names, or the causal language model of its family. Weights are
never read and code that a file points to is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.base.jsonfile import looks_like_json, parse_json, read_bounded
from hocket.capture.zoo.language import Built, causal_model, common_settings, token_batch
from hocket.transformer import Transformer

_MAX_BYTES = 10_000_000
_MAX_LAYERS = 2_000
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_TOKENS = ("ForMaskedLM", "ForConditionalGeneration")
_IMAGES = "ForImageClassification"
_SIZES = {"num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"}


def read_config(path: Path) -> Mapping[str, Any]:
    """The content of a ``config.json``."""
    data = parse_json(read_bounded(path, _MAX_BYTES, looks_like_json), str(path))
    with fields.located(str(path)):
        config = fields.mapping(data, "the file")
        for key in _SIZES & set(config):
            fields.integer(config[key], key, 1, _MAX_LAYERS)
    return config


def from_config(config: Mapping[str, Any], batch: int, seq: int, where: str) -> Built:
    """The model of a configuration and a batch for it."""
    import transformers

    kind = config.get("model_type")
    rest = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    try:
        made = transformers.AutoConfig.for_model(str(kind), **{**rest, "use_cache": False})
    except (ValueError, TypeError) as error:
        text = " ".join(str(error).split())[:200]
        raise InputFileError(
            f"transformers does not know this model: {text}",
            hint="model_type must be a family of the installed transformers",
            where=where,
        ) from None
    name = _class_name(config, made)
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise InputFileError(f"transformers has no model {name[:100]!r}", where=where)
    return _built(found, made, name, batch, seq, where)


def _class_name(config: Mapping[str, Any], made: Any) -> str:
    stated = config.get("architectures")
    if isinstance(stated, list) and stated and isinstance(stated[0], str):
        return stated[0]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(made.model_type, made.model_type))


def _built(found: Any, made: Any, name: str, batch: int, seq: int, where: str) -> Built:
    if name.endswith(_IMAGES):
        size = made.image_size if isinstance(made.image_size, int) else made.image_size[0]
        images = torch.randn(batch, getattr(made, "num_channels", 3), size, size)
        labels = torch.randint(made.num_labels, (batch,))
        return found(made), {"pixel_values": images, "labels": labels}
    if name.endswith(_TOKENS) and getattr(found, "main_input_name", "") == "input_features":
        return found(made), _sound(made, batch, seq)
    takes_tokens = getattr(found, "main_input_name", "input_ids") == "input_ids"
    if not (name.endswith((*_CAUSAL, *_TOKENS)) and takes_tokens and hasattr(made, "vocab_size")):
        raise InputFileError(
            f"how to feed {name!r} is not known here",
            hint="write a function that returns model and batch: path/file.py:function",
            where=where,
        )
    for key in ("max_position_embeddings", "n_positions"):
        if isinstance(getattr(made, key, None), int):
            setattr(made, key, max(getattr(made, key), seq))
    if name.endswith(_CAUSAL):
        if getattr(found, "_supports_sdpa", False):
            made._attn_implementation = common_settings()["attn_implementation"]
        return causal_model(found(made), batch, seq)
    if made.is_encoder_decoder and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0
    return found(made), token_batch(batch, seq, made.vocab_size)


def keep_every_layer(model: torch.nn.Module) -> None:
    """Stacks that skip no layer (``layerdrop`` 0) still draw a number for each, which no recording
    can follow: they are told not to train, which their layers go on doing."""
    for module in model.modules():
        if getattr(module, "layerdrop", None) == 0:
            module.training = False


def _sound(made: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Spectra of the length that the encoder takes (its first layers halve it), and their text."""
    frames = 2 * made.max_source_positions
    return {
        "input_features": torch.randn(batch, made.num_mel_bins, frames),
        "labels": torch.randint(made.vocab_size, (batch, min(seq, made.max_target_positions))),
    }


def config_of(shape: Transformer) -> dict[str, Any]:
    """A configuration of the family that a preset's shape belongs to."""
    common = {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied_embeddings}
    if shape.mlp == "gelu" and shape.learned_positions:
        return common | {
            "model_type": "gpt2", "n_embd": shape.hidden, "n_layer": shape.layers,
            "n_head": shape.heads, "n_inner": shape.mlp_width, "n_positions": shape.sequence,
        }  # fmt: skip
    if shape.mlp == "gelu":
        return common | {
            "model_type": "bloom", "hidden_size": shape.hidden, "n_layer": shape.layers,
            "n_head": shape.heads,
        }  # fmt: skip
    common |= {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width, "intermediate_size": shape.mlp_width,
        "max_position_embeddings": shape.sequence,
    }  # fmt: skip
    experts = shape.experts
    if experts is None:
        return common | {"model_type": "llama"}
    if experts.shared_width or experts.dense_layers:
        raise InputFileError(
            f"{shape.name} has experts that every token visits or dense layers before them",
            hint="hocket parallel divides it; hocket plan needs its config.json",
        )
    grouped = torch.get_default_dtype() == torch.bfloat16
    return common | {
        "model_type": "mixtral", "intermediate_size": experts.mlp_width,
        "num_local_experts": experts.count, "num_experts_per_tok": experts.active,
        "experts_implementation": "grouped_mm" if grouped else "batched_mm",
    }  # fmt: skip
