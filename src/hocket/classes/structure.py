"""Find the streams of a net: channels that must be cut together, and the cost of layers.

The dependency graph of torch-pruning (Fang et al., "DepGraph", CVPR 2023) lists the inputs, outputs
and statistics that depend on a channel, through sums, concatenations and reshapes. Every output
channel of a layer is in one stream; the outputs of the head are in none. O(layers²) for deep sums.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning
from torch import nn

from hocket.base.errors import UsageError
from hocket.classes.blocks import residual_blocks
from hocket.classes.widths import ChannelStream, WidthLayer, WidthModel

_MULTIPLYING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_PRODUCING = (*_MULTIPLYING, nn.Embedding)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Member:
    """A layer that reads a stream, with the layer inputs that belong to each channel."""

    name: str
    channel_of_input: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class StreamParts:
    """Layers and channels that form a stream."""

    root: str
    producers: tuple[str, ...]
    """Layers whose outputs are the stream's channels."""
    norms: tuple[str, ...]
    """Batch norms over these channels."""
    readers: tuple[Member, ...]
    heads: int
    """Number of attention heads, whose channels at equal positions are cut together; 1 without
    attention.
    """

    def channels_of(self, unit: int, units: int) -> list[int]:
        """Channels of a unit."""
        return [head * units + unit for head in range(self.heads)]


@dataclass(frozen=True)
class Structure:
    """A net as streams: the channels that may be cut, and the work that cutting saves."""

    model: WidthModel
    parts: tuple[StreamParts, ...]
    head: str
    """Name of the last linear layer, whose outputs are the class scores."""


def find_head(net: nn.Module, num_classes: int) -> str:
    """Name of the last linear layer with one output per class."""
    names = [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == num_classes
    ]
    if not names:
        raise UsageError(
            f"the net has no linear layer with {num_classes} outputs",
            hint="the last layer must be a torch.nn.Linear with one output per class",
        )
    last: str = names[-1]
    return last


def _refuse_recurrent(net: nn.Module) -> None:
    for name, module in net.named_modules():
        if isinstance(module, nn.RNNBase):
            raise UsageError(
                f"{name} ({module}) cannot be cut: a recurrent layer reads its own outputs",
                hint="use convolutions or attention",
            )


def structure_of(net: nn.Module, example: torch.Tensor, num_classes: int) -> Structure:
    """Find the streams of a net whose input is ``example`` (a batch of one)."""
    head = find_head(net, num_classes)
    _refuse_recurrent(net)
    net = net.eval()
    names = {module: name for name, module in net.named_modules()}
    graph = dependency_graph(net, example)
    covered: set[str] = set()
    parts: list[StreamParts] = []
    sizes: list[int] = []
    for name, module in net.named_modules():
        if not isinstance(module, _PRODUCING) or name in covered or name == head:
            continue
        found = _stream(graph, module, name, names, net)
        # Later layers of the same stream would describe it again.
        covered.update(found.producers)
        # The outputs of the head are the classes, and cutting channels that no layer reads saves
        # nothing.
        if head in found.producers or not found.readers:
            continue
        parts.append(found)
        sizes.append(_width(module))
    streams = tuple(
        ChannelStream(each.root, size // each.heads, len(each.readers), len(each.producers))
        for each, size in zip(parts, sizes, strict=True)
    )
    layers = _layers(net, example, parts)
    blocks = residual_blocks(net, example, parts, [layer.name for layer in layers])
    return Structure(WidthModel(streams, layers, blocks), tuple(parts), head)


def dependency_graph(net: nn.Module, example: torch.Tensor) -> Any:
    """Build the dependency graph of a net; raises an error if that is not possible."""
    try:
        with warnings.catch_warnings():
            # torch-pruning warns about parameters outside of layers, which are not changed.
            warnings.simplefilter("ignore")
            return torch_pruning.DependencyGraph().build_dependency(net, example)
    except Exception as error:
        raise UsageError(
            f"the structure of the net cannot be followed: {type(error).__name__}: {error}",
            hint="the net must take one tensor (a batch) and give one tensor of class scores",
        ) from error


def _width(module: nn.Module) -> int:
    for attribute in ("out_channels", "out_features", "embedding_dim"):
        if hasattr(module, attribute):
            return int(getattr(module, attribute))
    raise AssertionError(f"{type(module).__name__} has no width")


def whole_group(graph: Any, module: nn.Module, channels: list[int]) -> Any:
    """All layers and channels that must be cut together with some output channels of a layer."""
    prune = graph.get_pruner_of_module(module).prune_out_channels
    return graph.get_pruning_group(module, prune, channels)


def _stream(
    graph: Any, module: nn.Module, name: str, names: dict[nn.Module, str], net: nn.Module
) -> StreamParts:
    producers, norms, readers = [], [], []
    group = whole_group(graph, module, list(range(_width(module))))
    for item in group.items:
        target = item.dep.target.module
        if target not in names:
            continue
        if graph.is_out_channel_pruning_fn(item.dep.handler):
            if isinstance(target, _PRODUCING):
                producers.append(names[target])
            elif isinstance(target, _NORMS):
                norms.append(names[target])
        elif isinstance(target, _MULTIPLYING):
            member = Member(names[target], tuple(item.root_idxs), tuple(item.idxs))
            readers.append(member)
    heads = _heads(net, name) if len(producers) > 1 and _is_attention(producers) else 1
    return StreamParts(name, tuple(producers), tuple(norms), tuple(readers), heads)


def _is_attention(producers: list[str]) -> bool:
    """True if the layers are in one module, as those of queries, keys and values are."""
    return len({name.rpartition(".")[0] for name in producers}) == 1


def _heads(net: nn.Module, name: str) -> int:
    parent = net.get_submodule(name.rpartition(".")[0])
    heads = getattr(parent, "num_heads", 1)
    return heads if isinstance(heads, int) and heads >= 1 else 1


def _layers(
    net: nn.Module, example: torch.Tensor, parts: list[StreamParts]
) -> tuple[WidthLayer, ...]:
    out_of = {name: index for index, each in enumerate(parts) for name in each.producers}
    into: dict[str, list[tuple[int, int]]] = {}
    for index, each in enumerate(parts):
        for reader in each.readers:
            into.setdefault(reader.name, []).append((index, len(reader.inputs)))
    found = []
    for name, macs in multiplications(net, example).items():
        module = net.get_submodule(name)
        # A depthwise layer has the same stream as input and output, so its work grows with one
        # width only.
        reads = [] if getattr(module, "groups", 1) > 1 else into.get(name, [])
        shares = tuple((each, count / _inputs(module)) for each, count in reads)
        found.append(WidthLayer(name, macs, out_of.get(name, -1), shares, _weights(module)))
    return tuple(found)


def _weights(module: nn.Module) -> int:
    """Number of weights that multiply an input."""
    return sum(each.numel() for each in module.parameters() if each.ndim > 1)


def _inputs(module: nn.Module) -> int:
    for attribute in ("in_channels", "in_features"):
        if hasattr(module, attribute):
            return int(getattr(module, attribute))
    raise AssertionError(f"{type(module).__name__} has no inputs")


def multiplications(net: nn.Module, example: torch.Tensor) -> dict[str, float]:
    """Multiplications of each layer for one input, by its name."""
    found: dict[str, float] = {}

    def count(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            positions = output.numel() / len(example) / _width(module)
            found[name] = found.get(name, 0.0) + _weights(module) * positions

        return hook

    hooks = [
        module.register_forward_hook(count(name))
        for name, module in net.named_modules()
        if isinstance(module, _MULTIPLYING)
    ]
    try:
        with torch.no_grad():
            net(example)
    finally:
        for hook in hooks:
            hook.remove()
    return found
