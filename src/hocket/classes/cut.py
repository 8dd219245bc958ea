"""Build a part from the net: omit blocks, cut channels, add a head for its classes and "others".

A cut lists the indices of the units that are kept, so the same part can be rebuilt anywhere from
the same net. The dependency graph also cuts everything that depends on a channel. O(streams ·
layers).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hocket.base.arrays import FloatArray
from hocket.classes.structure import Structure, dependency_graph, whole_group


@dataclass(frozen=True)
class PartCut:
    """Channels and blocks of the net that a part keeps."""

    classes: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    """Kept units of each stream; empty for a stream inside an omitted block."""
    omitted: tuple[str, ...] = ()
    """Names of the residual blocks that are omitted."""


def best_units(values: Sequence[FloatArray], widths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Indices of the most valuable units of each stream."""
    return tuple(
        tuple(sorted(np.argsort(-each, kind="stable")[:width].tolist()))
        for each, width in zip(values, widths, strict=True)
    )


def build_part(
    net: nn.Module, structure: Structure, example: torch.Tensor, cut: PartCut
) -> nn.Module:
    """Return a cut copy of the net with outputs for "others" and the part's classes."""
    # Building a dependency graph runs the net, and training mode would change its statistics.
    part = copy.deepcopy(net).cpu().eval()
    for parameter in part.parameters():
        parameter.requires_grad_(True)
    for name in cut.omitted:
        _replace(part, name, nn.Identity())
    graph = dependency_graph(part, example.cpu())
    for stream, parts, kept in zip(structure.model.streams, structure.parts, cut.kept, strict=True):
        gone = sorted(set(range(stream.units)) - set(kept))
        channels = [each for unit in gone for each in parts.channels_of(unit, stream.units)]
        if kept and channels:
            # The first producer may have been omitted with its block.
            root = next(each for each in parts.producers if not _is_in(each, cut.omitted))
            whole_group(graph, part.get_submodule(root), sorted(channels)).prune()
    _replace_head(part, structure.head, cut.classes)
    return part


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _replace(net: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(net.get_submodule(parent), leaf, new)


def _replace_head(part: nn.Module, name: str, classes: tuple[int, ...]) -> None:
    old = part.get_submodule(name)
    assert isinstance(old, nn.Linear)
    new = nn.Linear(old.in_features, 1 + len(classes))
    with torch.no_grad():
        # "Others" starts as the mean of the other classes, so that its scores are comparable from
        # the start.
        rest = [each for each in range(old.out_features) if each not in classes]
        rows = [old.weight[rest].mean(dim=0) if rest else torch.zeros(old.in_features)]
        rows += [old.weight[each] for each in classes]
        new.weight.copy_(torch.stack(rows))
        new.bias.zero_()
        if old.bias is not None:
            new.bias[1:].copy_(old.bias[list(classes)])
    _replace(part, name, new)
