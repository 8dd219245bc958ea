"""Find residual blocks: modules that only add to their input, so that a net works without them.

Candidates are modules whose layers read and write one stream that layers outside write too. Each is
tested in one pass of one input: with all that it adds set to zero, its output must equal its input.
Such a module can be omitted completely (Veit et al., "Residual networks behave like ensembles of
relatively shallow networks", 2016). Deep nets of thin layers need this, because layers narrower
than a vector register are no faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.classes.widths import ResidualBlock

if TYPE_CHECKING:
    from hocket.classes.structure import StreamParts


def residual_blocks(
    net: nn.Module, example: torch.Tensor, parts: Sequence[StreamParts], layers: Sequence[str]
) -> tuple[ResidualBlock, ...]:
    """Return the innermost modules that only add to a stream.

    ``layers`` are the names of the layers that multiply.
    """
    found: list[ResidualBlock] = []
    # A random input, because an input of zeros passes through many modules unchanged.
    probe = torch.randn_like(example) if example.is_floating_point() else example
    for name, _ in net.named_modules():
        prefix = f"{name}."
        for stream, each in enumerate(parts):
            inside = [producer for producer in each.producers if producer.startswith(prefix)]
            reads = any(reader.name.startswith(prefix) for reader in each.readers)
            if not name or not inside or not reads or len(inside) == len(each.producers):
                continue
            norms = [norm for norm in each.norms if norm.startswith(prefix)]
            if _only_adds(net, probe, name, [*inside, *norms]):
                inner = tuple(
                    index
                    for index, other in enumerate(parts)
                    if all(producer.startswith(prefix) for producer in other.producers)
                )
                mine = tuple(layer for layer in layers if layer.startswith(prefix))
                found.append(ResidualBlock(name, stream, inner, mine))
    names = [block.name for block in found]
    return tuple(
        # A module around such a block only adds too; the innermost modules give the finest choice.
        block
        for block in found
        if not any(other.startswith(f"{block.name}.") for other in names)
    )


def _only_adds(net: nn.Module, probe: torch.Tensor, name: str, silenced: Sequence[str]) -> bool:
    """True if a module returns its input unchanged while the named layers in it output zeros."""

    def silence(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output)

    hooks = [net.get_submodule(each).register_forward_hook(silence) for each in silenced]
    try:
        with passing(net, [name]) as seen, torch.no_grad():
            net(probe)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != 1:
        return False
    _, given, result = seen[0]
    return (
        given.shape == result.shape
        and bool(given.any())
        and torch.allclose(given, result, rtol=1e-5, atol=1e-6)
    )


@contextmanager
def passing(
    net: nn.Module, names: Sequence[str]
) -> Iterator[list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Record inputs and outputs of modules with one input tensor, in the order of their calls."""
    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if len(inputs) == 1 and all(
                isinstance(each, torch.Tensor) for each in (inputs[0], output)
            ):
                seen.append((name, inputs[0].detach(), output.detach()))

        return hook

    hooks = [net.get_submodule(name).register_forward_hook(look(name)) for name in names]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
