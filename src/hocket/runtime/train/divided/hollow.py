"""Weights of a model that was built without memory: each rank reads its own from files.

A model made under ``torch.device("meta")`` has names and shapes alone. The tensors that a rank
needs, or its pieces of them, are read by name from safetensors files; the others never are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hocket.base.errors import InputFileError, UsageError
from hocket.runtime.train.cuts import TensorCut
from hocket.runtime.train.divided.mesh import Mesh


def fill_hollow(
    model: nn.Module,
    weights: str | Path | None,
    is_needed: Callable[[torch.Tensor], bool],
    cuts: Mapping[int, TensorCut],
    mesh: Mesh,
) -> None:
    """Read the tensors without memory that this rank needs from ``weights``: a file or a folder."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    hollow = {name: t for name, t in named.items() if t.is_meta and is_needed(t)}
    if not hollow:
        return
    if weights is None:
        raise UsageError(
            f"{next(iter(hollow))!r} has no memory, and no file was named to read it from",
            hint="give weights=, a file or folder of safetensors with the model's names",
        )
    found: set[str] = set()
    for path in _files(Path(weights)):
        for name, whole in _tensors(path, hollow):
            cut = cuts.get(id(hollow[name]))
            value = whole if cut is None else cut.piece(whole, mesh.tensor_rank)
            _put(hollow[name], value, name, mesh.device)
            found.add(name)
    missing = [name for name in hollow if name not in found]
    if missing:
        raise InputFileError(
            f"there is no {missing[0]!r}", where=str(weights),
            hint="build only what is in the files without memory; buffers that are computed when "
            "a model is built must be real",
        )  # fmt: skip


def _files(place: Path) -> list[Path]:
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise InputFileError("there are no safetensors files", where=str(place))
    return files


def _tensors(path: Path, wanted: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in set(file.keys()) & wanted.keys():
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputFileError(f"cannot read the weights: {error}", where=str(path)) from error


@torch.no_grad()
def _put(tensor: torch.Tensor, value: torch.Tensor, name: str, device: torch.device) -> None:
    if tensor.shape != value.shape:
        raise InputFileError(
            f"{name!r} is {list(value.shape)} in the file and {list(tensor.shape)} in the model"
        )
    real: torch.Tensor = value.to(device, tensor.dtype, copy=True)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
