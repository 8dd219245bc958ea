"""Find a transformer by name or file: a preset, TOML, an HF ``config.json``, or ``hf:NAME``.

TOML files state the keys of `Transformer`; values common to most GPTs may be left out. All files
are read strictly: an error names the key that is unknown or whose value is impossible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

from hocket.base import fields
from hocket.base.errors import InputFileError, UsageError, did_you_mean
from hocket.base.jsonfile import looks_like_json, parse_json, read_bounded
from hocket.base.regular import is_file
from hocket.base.toml import parse_toml
from hocket.transformer.hf_cache import PREFIX, cached_config
from hocket.transformer.shape import Experts, Latent, MlpKind, Transformer

MAX_SIZE = 2**31 - 1

# Hugging Face's ``config.json``: each family has its own names for sizes and leaves out default
# values. Unknown families are refused, because a guess could be silently wrong.


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Keys of a model family's sizes; several keys for one size if names have changed."""

    hidden: tuple[str, ...] = ("hidden_size",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    mlp_width: tuple[str, ...] = ("intermediate_size",)
    sequence: tuple[str, ...] = ("max_position_embeddings",)
    dropout: tuple[str, ...] = ()
    mlp: MlpKind = "gelu"
    tied: bool = True
    """True if embeddings are tied by default."""
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
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), replace(_LLAMA, tied=True)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _LLAMA),
}


def from_hf_config(config: Mapping[str, Any], name: str = "") -> Transformer:
    """Read a parsed ``config.json``; raises `InputFileError` for unknown families."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise InputFileError(
            f"the model family {fields.shown(kind)} is not known",
            hint=f"known: {', '.join(sorted(_FAMILIES))}; or describe the model in a TOML file",
        )
    family = _FAMILIES[kind]
    hidden = _first(config, family.hidden, "hidden")
    heads = _first(config, family.heads, "heads")
    width = config.get("word_embed_proj_dim", hidden)
    if width != hidden:
        raise InputFileError(
            f"its embedding is {fields.shown(width)} wide and its layers are {hidden}",
            hint="models with a projection after the embedding are not supported",
        )
    latent = _hf_latent(config) if "kv_lora_rank" in config else None
    # A null ``head_dim`` counts as missing, as in Transformers.
    head_width = _first(config, ("head_dim",), "head_width", hidden // heads)
    if latent is not None:
        unrotated = _first(config, ("qk_nope_head_dim",), "head_width")
        head_width = unrotated + latent.rope_width
    return Transformer(
        name=name or str(config.get("_name_or_path") or kind),
        hidden=hidden,
        layers=_first(config, family.layers, "layers"),
        heads=heads,
        kv_heads=_first(config, ("num_key_value_heads",), "kv_heads", heads),
        head_width=head_width,
        mlp_width=_first(
            config, family.mlp_width, "mlp_width", 4 * hidden if family.mlp == "gelu" else None
        ),
        mlp=family.mlp,
        vocabulary=_first(config, ("vocab_size",), "vocabulary"),
        # BLOOM uses ALiBi, so its configs may lack a sequence length.
        sequence=_first(config, family.sequence, "sequence", 2048 if kind == "bloom" else None),
        tied_embeddings=fields.flag(
            config.get("tie_word_embeddings", family.tied), "tie_word_embeddings"
        ),
        learned_positions=family.learned_positions,
        biases=family.biases,
        dropout=any(
            fields.number(config.get(key) or 0.0, key, 0.0, 1.0) > 0 for key in family.dropout
        ),
        experts=_hf_experts(config) if kind in _HAVE_EXPERTS else None,
        latent=latent,
        source="config.json",
    )


def _hf_experts(config: Mapping[str, Any]) -> Experts:
    width = _first(config, ("moe_intermediate_size", "intermediate_size"), "experts.width")
    count = _first(config, _EXPERT_COUNTS, "experts.count", 8)
    return Experts(
        count=count,
        active=_first(config, ("num_experts_per_tok",), "experts.active", 2),
        mlp_width=width,
        shared_width=width * _first(config, ("n_shared_experts",), "experts.shared_width", 0),
        dense_layers=_first(config, ("first_k_dense_replace",), "experts.dense_layers", 0),
    )


def _hf_latent(config: Mapping[str, Any]) -> Latent:
    return Latent(
        key_rank=_first(config, ("kv_lora_rank",), "latent.key_rank"),
        query_rank=_first(config, ("q_lora_rank",), "latent.query_rank", 0),
        rope_width=_first(config, ("qk_rope_head_dim",), "latent.rope_width"),
        value_width=_first(config, ("v_head_dim",), "latent.value_width"),
    )


def _first(
    config: Mapping[str, Any], keys: tuple[str, ...], meaning: str, default: int | None = None
) -> int:
    """Size under the first of the keys that is present and not null."""
    for key in keys:
        if config.get(key) is not None:
            return fields.integer(config[key], key, 0 if default == 0 else 1, MAX_SIZE)
    if default is None:
        wanted = " or ".join(repr(key) for key in keys)
        raise InputFileError(
            f"the file has no key {wanted}",
            hint=f"add it, or state {meaning} = … in a TOML file",
        )
    return default


PRESETS = Path(__file__).parent / "presets"
"""Folder of the built-in models."""
_DECODERS = PRESETS / "decoders.toml"
MAX_LAYERS = 10_000
"""Largest number of layers, which are listed one by one; trained models have a few hundred."""
_MAX_TOML_BYTES = 1_000_000
_MAX_JSON_BYTES = 512 * 2**20
_CONFIG_BYTES = 65_536
_REQUIRED = ("hidden", "layers", "heads", "vocabulary", "sequence")
_OPTIONAL = (
    "name", "kv_heads", "head_width", "mlp_width", "mlp", "tied_embeddings", "learned_positions",
    "biases", "dropout", "experts", "latent", "source",
)  # fmt: skip
_MLPS: tuple[MlpKind, ...] = get_args(MlpKind)
_GATED = {"mlp": "swiglu", "learned_positions": False, "biases": False, "dropout": False}
"""Values that all models of ``decoders.toml`` share."""
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_HAVE_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2")


def find_model(text: str) -> Transformer:
    """The model of a preset name or of a file."""
    lower = text.strip().lower()
    if lower in _decoders():
        return model_from_dict({**_GATED, **_decoders()[lower]}, default_name=lower)
    if lower in preset_names():
        return read_model(PRESETS / f"{lower}.toml")
    if text.startswith(PREFIX):
        return replace(read_model(cached_config(text)), name=text.removeprefix(PREFIX))
    path = Path(text)
    if path.suffix in (".toml", ".json", ".gz") or is_file(path):
        return read_model(path)
    raise UsageError(
        f"unknown model {text[:100]!r}",
        hint=f"{did_you_mean(lower, preset_names())} or give a TOML file, a config.json or "
        "hf:NAME; hocket list models shows all names",
    )


def is_shape(text: str) -> bool:
    """True for a preset, a ``config.json`` or ``hf:NAME``, which can be captured at any batch."""
    is_file_of_shape = text.startswith(PREFIX) or is_config_file(Path(text))
    return text.lower() in preset_names() or is_file_of_shape


@cache
def preset_names() -> tuple[str, ...]:
    """Names of the built-in models."""
    own_files = {path.stem for path in PRESETS.glob("*.toml")} - {_DECODERS.stem}
    return tuple(sorted(own_files | set(_decoders())))


@cache
def _decoders() -> Mapping[str, Mapping[str, Any]]:
    """Built-in models that differ only in sizes, by name."""
    return parse_toml(_DECODERS.read_bytes())


def require_depth(text: str) -> None:
    """Raise `UsageError` if the number of layers of a model cannot be changed."""
    if text not in preset_names():
        raise UsageError(
            f"the number of layers of {text!r} cannot be changed",
            hint="name a transformer preset (hocket list models), or a function with a parameter "
            "'layers'",
        )


def read_model(path: str | Path) -> Transformer:
    """The model of a TOML file or an HF ``config.json``; raises `InputFileError`."""
    path = Path(path)
    where = str(path)
    with fields.located(where):
        if path.suffix == ".toml":
            data = read_bounded(path, _MAX_TOML_BYTES, lambda head: True, "TOML")
            return model_from_dict(parse_toml(data), default_name=path.stem)
        data = read_bounded(path, _MAX_JSON_BYTES, looks_like_json)
        value = fields.mapping(parse_json(data, where), "the file")
        if "model_type" in value:
            model = from_hf_config(value, name=_config_name(path))
            check_model(model)
            return model
    raise InputFileError(
        "is no model's config.json: it has no key 'model_type'",
        hint=f"describe the model in a TOML file with {', '.join(_REQUIRED)}",
        where=where,
    )


def model_from_dict(data: Mapping[str, Any], default_name: str = "model") -> Transformer:
    """Read a model from a mapping in the schema of the TOML files."""
    fields.record(data, "the model", required=_REQUIRED, optional=_OPTIONAL)
    hidden, heads = _size(data, "hidden"), _size(data, "heads")
    mlp = fields.choice(data.get("mlp", "gelu"), "mlp", _MLPS)
    if mlp == "swiglu" and "mlp_width" not in data:
        raise fields.missing("the model", "mlp_width", "a gated MLP has no default width")
    model = Transformer(
        name=fields.text(data.get("name", default_name), "name")[:100],
        hidden=hidden,
        layers=_size(data, "layers"),
        heads=heads,
        kv_heads=_size(data, "kv_heads", heads),
        head_width=_size(data, "head_width", hidden // heads),
        mlp_width=_size(data, "mlp_width", 4 * hidden),
        mlp=mlp,
        vocabulary=_size(data, "vocabulary"),
        sequence=_size(data, "sequence"),
        tied_embeddings=_flag(data, "tied_embeddings"),
        learned_positions=_flag(data, "learned_positions"),
        biases=_flag(data, "biases"),
        dropout=_flag(data, "dropout"),
        experts=Experts(**_sizes(data, "experts", 3)) if "experts" in data else None,
        latent=Latent(**_sizes(data, "latent", 3)) if "latent" in data else None,
        source=fields.text(data.get("source", ""), "source"),
    )
    check_model(model)
    # Checked after `check_model`, whose messages are more specific.
    if "head_width" not in data and hidden % heads:
        raise InputFileError(
            f"a hidden width of {hidden} cannot be shared by {heads} heads",
            hint="heads must divide hidden; where they do not, state head_width",
        )
    return model


def model_to_dict(model: Transformer) -> dict[str, Any]:
    """A mapping that `model_from_dict` reads back to an equal model."""
    return {key: value for key, value in asdict(model).items() if value is not None}


def check_model(model: Transformer) -> None:
    """Raise `InputFileError` for an impossible shape."""
    if model.layers > MAX_LAYERS:
        raise InputFileError(
            f"there are {model.layers} layers, more than {MAX_LAYERS}", hint="lower layers"
        )
    if model.heads % model.kv_heads:
        raise InputFileError(
            f"{model.heads} heads cannot share {model.kv_heads} heads of keys and values",
            hint="kv_heads must divide heads",
        )
    if model.head_width < 1:
        raise InputFileError("there are more heads than hidden has elements", hint="lower heads")
    experts = model.experts
    if experts is None:
        return
    if experts.active > experts.count:
        raise InputFileError(
            f"each token uses {experts.active} of {experts.count} experts",
            hint="experts.active must not exceed experts.count",
        )
    if experts.dense_layers >= model.layers:
        raise InputFileError(
            f"{experts.dense_layers} of {model.layers} layers are dense",
            hint="leave out [experts] where no layer has any",
        )


def _sizes(data: Mapping[str, Any], name: str, num_required: int) -> dict[str, int]:
    """Sizes in the table ``name``, whose first keys are required; only optional sizes may be 0."""
    known = [field.name for field in dataclass_fields({"experts": Experts, "latent": Latent}[name])]
    required, optional = known[:num_required], known[num_required:]
    table = fields.record(data[name], name, required=required, optional=optional)
    return {
        key: fields.integer(size, f"{name}.{key}", 1 if key in required else 0, MAX_SIZE)
        for key, size in table.items()
    }


def _size(data: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = data[key] if default is None else data.get(key, default)
    # A derived width is 0 if heads exceed hidden, which `check_model` reports.
    return value if value is default and value == 0 else fields.integer(value, key, 1, MAX_SIZE)


def _flag(data: Mapping[str, Any], key: str) -> bool:
    return fields.flag(data.get(key, True), key)


def _config_name(path: Path) -> str:
    return path.absolute().parent.name if path.stem == "config" else path.stem


def is_config_file(path: Path) -> bool:
    """True for a Hugging Face ``config.json``: the beginning of the file has a model type."""
    if path.suffix != ".json" or not is_file(path):
        return False
    try:
        # Only the head is read, because a JSON file may have hundreds of megabytes.
        with path.open("rb") as file:
            head = file.read(_CONFIG_BYTES)
    except OSError:
        return False
    return b'"model_type"' in head and b'"schema"' not in head
