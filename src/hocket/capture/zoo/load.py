"""Load a model by name, from a Hugging Face config, or from a user's factory function.

`load_model` returns the model and a batch. `find_function` resolves ``package.module:function`` and
``path/file.py:function``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.base import fields
from hocket.base.errors import InputFileError, UsageError, did_you_mean, unknown_name
from hocket.base.jsonfile import looks_like_json, parse_json, read_bounded
from hocket.capture.trouble import own_code
from hocket.capture.zoo import ZOO, ZooModel, resnet
from hocket.capture.zoo.language import Built, causal_model, common_settings, token_batch
from hocket.transformer import Transformer
from hocket.transformer.files import find_model, is_config_file, preset_names, require_depth
from hocket.transformer.hf_cache import PREFIX, cached_config

# Hugging Face models from a configuration: a ``config.json``, ``hf:…`` or a preset's shape.
#
# The model's class is the class that the file names, or the causal language model of its family.
# Weights are never read, and code that a file refers to is never run.

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
    """Model and batch of a Hugging Face configuration."""
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
    """Set LayerDrop stacks with rate 0 to evaluation mode while their layers keep training.

    Otherwise they draw and compare a random number per layer, which tracing cannot follow.
    """
    for module in model.modules():
        if getattr(module, "layerdrop", None) == 0:
            module.training = False


def _sound(made: Any, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Return spectrograms with text labels; the encoder's first layers halve their length."""
    frames = 2 * made.max_source_positions
    return {
        "input_features": torch.randn(batch, made.num_mel_bins, frames),
        "labels": torch.randint(made.vocab_size, (batch, min(seq, made.max_target_positions))),
    }


def config_of(shape: Transformer) -> dict[str, Any]:
    """Configuration of the model family that a preset shape belongs to."""
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
            f"{shape.name} has experts for every token or dense layers before them",
            hint="hocket parallel divides it; hocket plan needs its config.json",
        )
    grouped = torch.get_default_dtype() == torch.bfloat16
    return common | {
        "model_type": "mixtral", "intermediate_size": experts.mlp_width,
        "num_local_experts": experts.count, "num_experts_per_tok": experts.active,
        "experts_implementation": "grouped_mm" if grouped else "batched_mm",
    }  # fmt: skip


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEPTH = re.compile(r"resnet([0-9]{2,5})")


def load_model(
    spec: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    layers: int | None = None,
    device: str = "meta",
) -> tuple[nn.Module, Any]:
    """Return model and batch of a name, a configuration or ``package.module:function``.

    A name is a built-in model or a transformer preset; a configuration is a Hugging Face
    ``config.json`` or ``hf:org/name`` from the local cache.

    Built-in models are created on ``device``; on ``meta`` they take no memory. A user's function
    (also ``path/file.py:function``) returns (model, batch); it gets those of the arguments
    ``batch``, ``seq`` and ``dtype`` that it has parameters for. ``layers`` changes the depth of a
    preset, or of a function that has a parameter of that name.
    """
    for what, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise UsageError(f"{what} is {value}", hint=f"{what} must be 1 or more")
    if dtype is not None and dtype not in _DTYPES:
        raise unknown_name("dtype", dtype, _DTYPES)
    path = config_path(spec)
    if path is None and ":" in spec:
        given = {"batch": batch, "seq": seq, "dtype": dtype, "layers": layers}
        return _from_function(spec, given)
    entry = _entry(spec, layers) if path is None else _from_file(path)
    if layers is not None:
        require_depth(spec)
    with _default_dtype(_DTYPES[dtype or entry.dtype]), torch.device(device):
        model, tensors = _require_transformers(spec, entry, batch or entry.batch, seq or entry.seq)
    model.train()
    keep_every_layer(model)
    return model, tensors


def _entry(name: str, layers: int | None = None) -> ZooModel:
    if name in ZOO and (layers is None or name not in preset_names()):
        return ZOO[name]
    depth = _DEPTH.fullmatch(name)
    if depth is None and name in preset_names():
        shape = find_model(name)
        if layers is not None:
            shape = replace(shape, layers=layers)
        build = lambda batch, seq: from_config(config_of(shape), batch, seq, name)  # noqa: E731
        return ZooModel(build, dtype="bfloat16" if shape.experts else "float32")
    if depth is None:
        hint = did_you_mean(name, (*ZOO, *preset_names()))
        raise UsageError(
            f"unknown model {name!r}",
            hint=f"{hint} Your own model is 'package.module:function', a config.json or hf:NAME; "
            "hocket list models has all names",
        )
    return resnet(int(depth[1]), batch=16)


def config_path(spec: str) -> Path | None:
    """Path of the ``config.json`` that a name refers to; None if it refers to none."""
    if spec.startswith(PREFIX):
        return cached_config(spec)
    path = Path(spec)
    return path if is_config_file(path) else None


def _from_file(path: Path) -> ZooModel:
    config = read_config(path)
    return ZooModel(lambda batch, seq: from_config(config, batch, seq, str(path)))


def _require_transformers(
    name: str, entry: ZooModel, batch: int, seq: int
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    try:
        return entry.build(batch, seq)
    except ModuleNotFoundError as error:
        from hocket.base.errors import MissingExtraError

        raise MissingExtraError(
            f"model {name!r} needs the package {error.name!r}",
            hint="pip install 'hocket[torch]'",
        ) from error


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ── the user's own function ──────────────────────────────────────────────────────────────────────


def find_function(spec: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` or ``path/file.py:function`` names."""
    module_text, _, name = spec.rpartition(":")
    module = _import(module_text, spec)
    function = getattr(module, name, None)
    if not callable(function):
        callables = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"{module_text!r} has no function {name!r}", hint=did_you_mean(name, callables)
        )
    found: Callable[..., Any] = function
    return found


def _from_function(spec: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    function = find_function(spec)
    accepted = _accepted(function, options)
    with own_code(f"{spec!r} fails", "check that the function runs outside hocket"):
        result = function(**accepted)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise UsageError(
            f"{spec!r} returned {type(result).__name__}, not a model and a batch",
            hint="return (model, batch); batch is a tensor, a tuple or a dict of tensors",
        )
    return result


def _import(module_text: str, spec: str) -> Any:
    hint = (
        "write 'package.module:function' or 'path/file.py:function', and check that it "
        "imports outside hocket"
    )
    with own_code(f"cannot import {module_text!r} of {spec!r}", hint):
        if module_text.endswith(".py"):
            return _import_file(Path(module_text))
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(module_text)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    name = f"hocket_user_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{str(path)!r} is not a Python file")
    # Files in the script's folder can be imported, as when Python runs the script.
    if (folder := str(path.absolute().parent)) not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    return module


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Options that the function has parameters for; raises an error for any other given option."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in parameters and not takes_all:
            raise UsageError(
                f"{function.__name__!r} has no parameter {key!r}",
                hint=f"add {key!r} to its parameters or leave the option out",
            )
    return given
