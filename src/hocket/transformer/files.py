"""Find a transformer by name or file: a preset, TOML, an HF ``config.json``, ``hf:…``, a graph.

TOML files state the keys of `Transformer`; values common to most GPTs may be left out. All files
are read strictly: unknown keys and impossible figures are refused with the key's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from hocket.base import fields
from hocket.base.errors import InputFileError, UsageError, did_you_mean
from hocket.base.jsonfile import looks_like_json, parse_json, read_bounded
from hocket.base.regular import is_file
from hocket.base.toml import parse_toml
from hocket.transformer.hf_cache import PREFIX, cached_config
from hocket.transformer.shape import Experts, MlpKind, Transformer

# The shape of a model from the ``config.json`` that Hugging Face models come with.
#
# Each family has its own names for sizes and leaves out what equals a default; a table per
# family says where each size stands. Families that are not known are refused: guessing would be
# worse.

_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Config keys of a model family's sizes; several keys for one size if names have changed."""

    hidden: tuple[str, ...] = ("hidden_size",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    mlp_width: tuple[str, ...] = ("intermediate_size",)
    sequence: tuple[str, ...] = ("max_position_embeddings",)
    dropout: tuple[str, ...] = ()
    mlp: MlpKind = "gelu"
    tied: bool = True
    """Defaults of the family's code for fields that the file leaves out."""
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
    """Read a parsed ``config.json``; raises `InputFileError` for unknown families."""
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
        experts=_hf_experts(config) if kind in ("mixtral", "qwen3_moe") else None,
        source="config.json",
    )


def _usual_width(family: _Family, hidden: int) -> int | None:
    return 4 * hidden if family.mlp == "gelu" else None


def _hf_experts(config: Mapping[str, Any]) -> Experts:
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
    """Value of the first of the keys that is present and not null, as a size."""
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


PRESETS = Path(__file__).parent / "presets"
"""Folder of the built-in models."""
_DECODERS = PRESETS / "decoders.toml"
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
"""Limit on layers, which are listed one by one; the deepest trained models have a few hundred."""
_MAX_TOML_BYTES = 1_000_000
_MAX_JSON_BYTES = 512 * 2**20
_CONFIG_BYTES = 65_536
_REQUIRED = ("hidden", "layers", "heads", "vocabulary", "sequence")
_OPTIONAL = (
    "name", "kv_heads", "head_width", "mlp_width", "mlp", "tied_embeddings", "learned_positions",
    "biases", "dropout", "experts", "source",
)  # fmt: skip
_MLPS = ("gelu", "swiglu")
_GATED = {"mlp": "swiglu", "learned_positions": False, "biases": False, "dropout": False}
"""Defaults of the decoder models in one file."""


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
        hint=f"{did_you_mean(lower, preset_names())} or give a TOML file, a config.json, hf:NAME "
        "or a graph; hocket list models has all names",
    )


def is_shape(text: str) -> bool:
    """True if a name or file gives a shape that can be captured at any batch: not a graph file."""
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
    """Refuse to change the number of layers of a model that has no such option."""
    if text not in preset_names():
        raise UsageError(
            f"the number of layers of {text!r} cannot be changed",
            hint="name a transformer preset (hocket list models), or a function with a parameter "
            "'layers'",
        )


def read_model(path: str | Path) -> Transformer:
    """The model of a TOML file, an HF ``config.json`` or a graph; raises `InputFileError`."""
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
        if "schema" in value:
            return _from_graph_file(value)
    raise InputFileError(
        "is neither a model's config.json (no key 'model_type') nor a graph (no key 'schema')",
        hint=f"describe the model in a TOML file with {', '.join(_REQUIRED)}",
        where=where,
    )


def model_from_dict(data: Mapping[str, Any], default_name: str = "model") -> Transformer:
    """Read a model from a mapping in the schema of the TOML files."""
    fields.record(data, "the model", required=_REQUIRED, optional=_OPTIONAL)
    hidden, heads = _size(data, "hidden"), _size(data, "heads")
    mlp = cast(MlpKind, fields.choice(data.get("mlp", "gelu"), "mlp", _MLPS))
    if mlp == "swiglu" and "mlp_width" not in data:
        raise fields.missing("the model", "mlp_width", "a gated MLP has no usual width: state it")
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
        experts=_experts(data["experts"]) if "experts" in data else None,
        source=fields.text(data.get("source", ""), "source"),
    )
    check_model(model)
    if "head_width" not in data and hidden % heads:
        raise InputFileError(
            f"a hidden width of {hidden} cannot be shared by {heads} heads",
            hint="heads must divide hidden; where they do not, state head_width",
        )
    return model


def model_to_dict(model: Transformer) -> dict[str, Any]:
    """A mapping that `model_from_dict` reads back to an equal model."""
    data = {key: getattr(model, key) for key in (*_REQUIRED, *_OPTIONAL)}
    if model.experts is None:
        del data["experts"]
    else:
        data["experts"] = dict(vars(model.experts))
    return data


def check_model(model: Transformer) -> None:
    """Refuse shapes that no transformer has."""
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


def _experts(data: Any) -> Experts:
    required, optional = ("count", "active", "mlp_width"), ("shared_width", "dense_layers")
    table = fields.record(data, "experts", required=required, optional=optional)
    sizes = {key: fields.integer(table[key], f"experts.{key}", 1, MAX_SIZE) for key in required}
    rest = {
        key: fields.integer(table[key], f"experts.{key}", 0, MAX_SIZE)
        for key in optional
        if key in table
    }
    return Experts(**sizes, **rest)


def _from_graph_file(value: Mapping[str, Any]) -> Transformer:
    from hocket.graph.files import graph_from_dict
    from hocket.transformer.captured import from_graph

    return from_graph(graph_from_dict(value, ""))


def _size(data: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = data[key] if default is None else data.get(key, default)
    # A width that was derived may be 0 where heads exceed hidden; `check_model` says so.
    return value if value is default and value == 0 else fields.integer(value, key, 1, MAX_SIZE)


def _flag(data: Mapping[str, Any], key: str) -> bool:
    return fields.flag(data.get(key, True), key)


def _config_name(path: Path) -> str:
    return path.absolute().parent.name if path.stem == "config" else path.stem


def is_config_file(path: Path) -> bool:
    """True if a file is a Hugging Face ``config.json``: short, with a model type."""
    if path.suffix != ".json" or not is_file(path):
        return False
    try:
        with path.open("rb") as file:
            head = file.read(_CONFIG_BYTES)
    except OSError:
        return False
    return b'"model_type"' in head and b'"schema"' not in head
