"""Checkpoints as files: tensors in safetensors, everything else in a JSON manifest, no code.

Keys and shapes are those of ``model.state_dict()`` and ``optimizer.state_dict()``, independent of
the plan, so that training can continue under another plan. A tensor with several names (tied
weights) is written once, and the manifest refers to it from each name. Each rank may write its part
of the state to a separate file; one manifest then lists the tensors and pieces of tensors in each
file. Ranks also use this format to exchange their parts. `torch.distributed.checkpoint` is not
used, because it pickles its metadata, and loading a pickle can run code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from hocket.base.errors import InputFileError, UsageError
from hocket.base.jsonfile import read_json

FORMAT, PARTS_FORMAT = "hocket.checkpoint/1", "hocket.checkpoint-parts/1"
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")
"""Name of the folder of a step; a second checkpoint of the same step has an additional number."""
_TENSOR = "$tensor"
"""Manifest key whose value names a tensor in the safetensors file."""
_PIECE, _CUT = "$piece", ("dim", "num_pieces", "blocks")
_DAMAGED = "the checkpoint is damaged; take an older one"
_OWN_MODEL = "load it into the model that it was saved from"

State = dict[str, Any]
"""Training state: ``model``, ``optimizer``, ``gradients`` and ``generators`` with tensors, ``loop``
and ``extra`` with plain values."""


@dataclass(frozen=True)
class TensorCut:
    """Split of a tensor along ``dim`` into equal pieces, one per tensor-parallel rank.

    A fused projection (queries, keys and values in one matrix) consists of several matrices side by
    side: each of its ``blocks`` is split in the same way, and a rank's piece holds its part of each
    block.
    """

    dim: int
    num_pieces: int
    blocks: int = 1

    def piece(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return the piece of one rank."""
        parts = [
            block.chunk(self.num_pieces, self.dim)[index]
            for block in whole.chunk(self.blocks, self.dim)
        ]
        return torch.cat(parts, self.dim).contiguous()

    def whole(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join all pieces in the order of ranks."""
        split = [piece.chunk(self.blocks, self.dim) for piece in pieces]
        parts = [split[index][block] for block in range(self.blocks) for index in range(len(split))]
        return torch.cat(parts, self.dim).contiguous()


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A piece of a tensor that is split across ranks."""

    tensor: torch.Tensor
    cut: TensorCut
    index: int


class StatePart(NamedTuple):
    """The part of a state that one rank holds."""

    plain: str
    """JSON of the part; it names the tensors."""
    tensors: bytes
    """The tensors, in the format of safetensors."""


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def write_state(folder: Path, state: State) -> None:
    """Write a state into an existing folder."""
    plain, tensors = _taken_apart(state)
    save_file(tensors, folder / TENSORS)
    # Written last: a folder without manifest does not count as a checkpoint.
    _write_manifest(folder, {"format": FORMAT, **plain})


def write_part(folder: Path, state: State, rank: int) -> str:
    """Write the part of one rank into an existing folder; return its manifest as JSON."""
    plain, tensors = _taken_apart(state)
    save_file(tensors, folder / _part_name(rank))
    return json.dumps(plain)


def write_manifest(folder: Path, parts: Sequence[str], extra: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint whose parts were written by the ranks."""
    plain = [json.loads(part) for part in parts]
    extra = _taken_apart(extra)[0]
    _write_manifest(folder, {"format": PARTS_FORMAT, "parts": plain, "extra": extra})


def packed_part(state: State) -> StatePart:
    """Return the part of one rank in a form that can be sent to other ranks."""
    plain, tensors = _taken_apart(state)
    return StatePart(json.dumps(plain), save(tensors))


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))


def _part_name(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def _taken_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a state whose tensors are replaced by names, and the tensors by name."""
    tensors: dict[str, torch.Tensor] = {}
    written: dict[tuple[Any, ...], str] = {}

    def plain(value: Any, place: str) -> Any:
        if isinstance(value, torch.Tensor):
            look = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
            # Empty tensors all have address 0, so equal addresses do not mean tied weights.
            if look not in written or not value.numel():
                written[look] = place
                tensors[place] = value.detach().contiguous().cpu()
            return {_TENSOR: written[look]}
        if isinstance(value, TensorPiece):
            return {**plain(value.tensor, place), _PIECE: value.index, **asdict(value.cut)}
        if isinstance(value, Mapping):
            return {str(key): plain(item, f"{place}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, f"{place}/{index}") for index, item in enumerate(value)]
        if value is None or isinstance(value, str | int | float | bool):
            return value
        raise UsageError(
            f"{place} is of type {type(value).__name__!r}, which a checkpoint cannot hold",
            hint="keep tensors, numbers, texts, lists and dicts in what is saved",
        )

    return {key: plain(value, key) for key, value in state.items()}, tensors


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def newest_checkpoint(folder: str | Path) -> Path:
    """Return the folder if it is a checkpoint, else its checkpoint of the latest step."""
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
    # Compared as numbers: step 10 is later than step 9.
    return max(found)[1]


def read_state(folder: str | Path) -> State:
    """Read a checkpoint, without running any code from it."""
    place = Path(folder)
    manifest: Any = read_json(place / MANIFEST)
    kind = manifest.pop("format", None) if isinstance(manifest, dict) else None
    if kind == PARTS_FORMAT:
        names = [_part_name(rank) for rank in range(len(manifest["parts"]))]
        parts = zip(manifest["parts"], (_read_tensors(place / name) for name in names), strict=True)
        return {**_joined(parts, str(place)), "extra": manifest["extra"]}
    if kind != FORMAT:
        raise InputFileError(f"not a manifest of {FORMAT}", where=str(place / MANIFEST),
                             hint="name a folder that train.save wrote")  # fmt: skip
    tensors = _read_tensors(place / TENSORS)
    return {key: _opened(value, tensors, str(place)) for key, value in manifest.items()}


def joined_parts(parts: Sequence[StatePart]) -> State:
    """Join the parts of all ranks into one state."""
    return _joined(((json.loads(part.plain), load(part.tensors)) for part in parts), "ranks")


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputFileError(f"cannot read the tensors: {error}", where=str(path),
                             hint=_DAMAGED) from error  # fmt: skip


def _joined(parts: Iterator[tuple[Any, dict[str, torch.Tensor]]], where: str) -> State:
    found: State = {"model": {}, "gradients": {}}
    pieces: dict[tuple[str, ...], dict[int, torch.Tensor]] = {}
    cuts: dict[tuple[str, ...], TensorCut] = {}
    for plain, tensors in parts:
        for path, leaf in _leaves(plain, ()):
            if isinstance(leaf, dict) and _PIECE in leaf:
                cuts[path] = TensorCut(*(leaf.pop(key) for key in _CUT))
                index = leaf.pop(_PIECE)
                pieces.setdefault(path, {})[index] = _opened(leaf, tensors, where)
            else:
                _put(found, path, _opened(leaf, tensors, where))
    for path, by_index in pieces.items():
        if sorted(by_index) != list(range(cuts[path].num_pieces)):
            raise InputFileError(f"pieces of {'/'.join(path)!r} are missing", where=where,
                                 hint=_DAMAGED)  # fmt: skip
        _put(found, path, cuts[path].whole([by_index[i] for i in sorted(by_index)]))
    return found


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield leaves of nested dicts with their paths; tensors and empty dicts are leaves."""
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
        # An empty dict of one rank must not replace the entries of another rank.
        tree.setdefault(path[-1], {})


def _opened(value: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """Return a part of a manifest whose tensor names are replaced by tensors."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            if value[_TENSOR] not in tensors:
                raise InputFileError(f"tensor {value[_TENSOR]!r} is missing", where=where,
                                     hint=_DAMAGED)  # fmt: skip
            return tensors[value[_TENSOR]]
        return {key: _opened(item, tensors, where) for key, item in value.items()}
    return [_opened(item, tensors, where) for item in value] if isinstance(value, list) else value


# ── checks ───────────────────────────────────────────────────────────────────────────────────────


def refitted_optimizer(state: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's saved state with types that JSON cannot represent restored.

    Tuples are restored as in ``optimizer``, and parameter numbers as integers. Raises `UsageError`
    if the sizes of parameter groups differ from those of ``optimizer``.
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
    """Refuse a checkpoint of another model than ``own``; the error names the first difference."""
    for name in own:
        if name not in state:
            raise UsageError(f"the checkpoint has no {name!r}", hint=_OWN_MODEL)
    for name, tensor in state.items():
        if name not in own:
            raise UsageError(
                f"the checkpoint has {name!r}, which the model does not have", hint=_OWN_MODEL
            )
        if tensor.shape != own[name].shape:
            raise UsageError(
                f"{name!r} is {list(tensor.shape)} in the checkpoint and {list(own[name].shape)} "
                "in the model",
                hint=_OWN_MODEL,
            )
