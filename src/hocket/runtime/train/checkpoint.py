"""The state of a loop as files: tensors in safetensors, the rest in a JSON manifest, no code.

Keys and shapes are those of ``model.state_dict()`` and ``optimizer.state_dict()``, whatever the
plan was, so a training goes on under another plan. Tensors that are one (tied weights) are written
once and noted. Ranks that hold parts may write a file each; one manifest says which tensors and
pieces of tensors are in which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hocket.base.errors import InputFileError, UsageError
from hocket.base.jsonfile import read_json
from hocket.runtime.train.cuts import TensorCut

FORMAT, PARTS_FORMAT = "hocket.checkpoint/1", "hocket.checkpoint-parts/1"
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")
"""The folder of a step; a second one of the same step has a number of its own."""
_TENSOR = "$tensor"
"""Key that stands for a tensor of the other file."""
_PIECE, _CUT = "$piece", ("dim", "num_pieces", "blocks")
_DAMAGED = "the checkpoint is damaged; take an older one"

State = dict[str, Any]
"""``model``, ``optimizer``, ``gradients``, ``generators`` with tensors; ``loop`` and ``extra``."""


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A piece of a tensor that is cut over ranks."""

    tensor: torch.Tensor
    cut: TensorCut
    index: int


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
    if isinstance(value, TensorPiece):
        tensor = _plain(value.tensor, place, tensors, written)
        return {**tensor, _PIECE: value.index, **asdict(value.cut)}
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


def write_part(folder: Path, state: State, rank: int) -> str:
    """Write what one rank has of a state into a folder that is there; what its manifest says."""
    tensors: dict[str, torch.Tensor] = {}
    plain = _plain(state, "", tensors, {})
    save_file(tensors, folder / _part_name(rank))
    return json.dumps(plain)


def write_manifest(folder: Path, parts: Sequence[str], extra: Mapping[str, Any]) -> None:
    """Write the manifest of a state of which each rank has written its part."""
    manifest = {"format": PARTS_FORMAT, "parts": [json.loads(part) for part in parts],
                "extra": _plain(extra, "extra", {}, {})}  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def _part_name(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def _joined_parts(place: Path, manifest: dict[str, Any]) -> State:
    """The state of which ranks have written parts: pieces are put together."""
    found: State = {}
    pieces: dict[tuple[str, ...], dict[int, torch.Tensor]] = {}
    cuts: dict[tuple[str, ...], TensorCut] = {}
    for rank, part in enumerate(manifest.get("parts", [])):
        tensors = _read_tensors(place / _part_name(rank))
        for path, leaf in _leaves(part, ()):
            if isinstance(leaf, dict) and _PIECE in leaf:
                cuts[path] = TensorCut(*(leaf[key] for key in _CUT))
                pieces.setdefault(path, {})[leaf[_PIECE]] = _opened(
                    {_TENSOR: leaf[_TENSOR]}, tensors, str(place)
                )
            else:
                _put(found, path, _opened(leaf, tensors, str(place)))
    for path, by_index in pieces.items():
        if sorted(by_index) != list(range(cuts[path].num_pieces)):
            raise InputFileError(f"pieces of {'/'.join(path)!r} are missing", where=str(place),
                                 hint=_DAMAGED)  # fmt: skip
        _put(found, path, cuts[path].whole([by_index[i] for i in sorted(by_index)]))
    return {**{key: {} for key in ("model", "gradients")}, **found, "extra": manifest["extra"]}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Leaves of nested dicts with their paths; tensors and empty dicts are leaves."""
    if isinstance(value, dict) and value and _TENSOR not in value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    if not isinstance(value, dict) or value:
        tree[path[-1]] = value
    else:
        tree.setdefault(path[-1], {})


def newest_checkpoint(folder: str | Path) -> Path:
    """The checkpoint that a folder is, or the one of the last step in it."""
    place = Path(folder)
    if (place / MANIFEST).exists():
        return place
    found = [
        (tuple(map(int, match.groups(default="0"))), path)
        for path in place.glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and (path / MANIFEST).exists()
    ]
    if not found:
        raise InputFileError(
            "there is no checkpoint", where=str(place), hint="name a folder that train.save wrote"
        )
    return max(found)[1]


def read_state(folder: str | Path) -> State:
    """The state that was written into a folder; nothing of it is run."""
    place = Path(folder)
    manifest = read_json(place / MANIFEST)
    kind = manifest.pop("format", None) if isinstance(manifest, dict) else None
    if isinstance(manifest, dict) and kind == PARTS_FORMAT:
        return _joined_parts(place, manifest)
    if not isinstance(manifest, dict) or kind != FORMAT:
        raise InputFileError(f"not a manifest of {FORMAT}", where=str(place / MANIFEST),
                             hint="name a folder that train.save wrote")  # fmt: skip
    tensors = _read_tensors(place / TENSORS)
    return {key: _opened(value, tensors, str(place)) for key, value in manifest.items()}


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputFileError(f"cannot read the tensors: {error}", where=str(path),
                             hint=_DAMAGED) from error  # fmt: skip


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


def require_same_model(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Refuse a checkpoint of another model than ``own``, with the first thing that differs."""
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
