"""The state of a loop as files: tensors in safetensors, the rest in a JSON manifest, no code.

Keys and shapes are those of ``model.state_dict()`` and ``optimizer.state_dict()``, whatever the
plan was, so a training goes on under another plan. Tensors that are one (tied weights) are written
once and noted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hocket.base.errors import InputFileError, UsageError
from hocket.base.jsonfile import read_json

FORMAT = "hocket.checkpoint/1"
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
_TENSOR = "$tensor"
"""Key that stands for a tensor of the other file."""
_DAMAGED = "the checkpoint is damaged; take an older one"

State = dict[str, Any]
"""``model``, ``optimizer``, ``gradients``, ``generators`` with tensors; ``loop`` and ``extra``."""


def write_state(folder: Path, state: State) -> None:
    """Write a state into a folder that is there."""
    tensors: dict[str, torch.Tensor] = {}
    written: dict[tuple[Any, ...], str] = {}
    manifest = {"format": FORMAT, **{key: _plain(value, key, tensors, written)
                                     for key, value in state.items()}}  # fmt: skip
    text = json.dumps(manifest, indent=1, sort_keys=True)
    save_file(tensors, folder / TENSORS)
    (folder / MANIFEST).write_text(text)


def _plain(
    value: Any, place: str, tensors: dict[str, torch.Tensor], written: dict[tuple[Any, ...], str]
) -> Any:
    if isinstance(value, torch.Tensor):
        look = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if look not in written or not value.numel():
            written[look] = place
            tensors[place] = value.detach().contiguous().cpu()
        return {_TENSOR: written[look]}
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{place}/{k}", tensors, written) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{place}/{i}", tensors, written) for i, v in enumerate(value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise UsageError(
        f"{place} is of type {type(value).__name__!r}, which a checkpoint cannot hold",
        hint="keep tensors, numbers, texts, lists and dicts in what is saved",
    )


def read_state(folder: str | Path) -> State:
    """The state that was written into a folder; nothing of it is run."""
    place = Path(folder)
    manifest = read_json(place / MANIFEST)
    if not isinstance(manifest, dict) or manifest.pop("format", None) != FORMAT:
        raise InputFileError(f"not a manifest of {FORMAT}", where=str(place / MANIFEST),
                             hint="name a folder that train.save wrote")  # fmt: skip
    try:
        tensors = load_file(place / TENSORS)
    except (OSError, SafetensorError) as error:
        raise InputFileError(f"cannot read the tensors: {error}", where=str(place / TENSORS),
                             hint=_DAMAGED) from error  # fmt: skip
    return {key: _opened(value, tensors, str(place)) for key, value in manifest.items()}


def _opened(value: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            if value[_TENSOR] not in tensors:
                raise InputFileError(f"tensor {value[_TENSOR]!r} is missing", where=where,
                                     hint=_DAMAGED)  # fmt: skip
            return tensors[value[_TENSOR]]
        return {key: _opened(item, tensors, where) for key, item in value.items()}
    return [_opened(item, tensors, where) for item in value] if isinstance(value, list) else value


def refitted_optimizer(state: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer with the types that JSON does not know, as ``optimizer`` has them.

    Raises `UsageError` where the groups are not those of ``optimizer``.
    """
    groups = state.get("param_groups", []) if isinstance(state, dict) else []
    sizes = [len(group.get("params", ())) for group in groups]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own_sizes:
        raise UsageError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, yours has {own_sizes}",
            hint="make the optimizer as it was when the checkpoint was written",
        )
    fitted = []
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        fitted.append({key: tuple(value) if isinstance(own.get(key), tuple) else value
                       for key, value in group.items()})  # fmt: skip
    kept = {int(index): slots for index, slots in state.get("state", {}).items()}
    return {"state": kept, "param_groups": fitted}


def require_same_model(state: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Refuse a checkpoint of another model, with the first thing that differs."""
    own = model.state_dict()
    for name in own:
        if name not in state:
            raise UsageError(f"the checkpoint has no {name!r}", hint="load it into its own model")
    for name, tensor in state.items():
        if name not in own:
            raise UsageError(f"the checkpoint has {name!r}, which the model has not",
                             hint="load it into its own model")  # fmt: skip
        if tensor.shape != own[name].shape:
            raise UsageError(
                f"{name!r} is {list(tensor.shape)} in the checkpoint and {list(own[name].shape)} "
                "in the model",
                hint="load it into its own model",
            )
