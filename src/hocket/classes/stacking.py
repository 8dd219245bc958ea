"""Nets of one form as one net: channels lie side by side, and every layer is called once for all.

A small net is many small kernels, each too short to fill a GPU, and k nets are k times as many. One
net whose convolutions have k groups, whose batch norms have k times the channels and whose linear
layers are batched products computes the same with the kernels of one (groups as in Krizhevsky et
al., "ImageNet classification with deep convolutional neural networks", 2012). What each net learns
stays its own. Whether the forward pass of a net allows it is tried on an input.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class StackedNets(nn.Module):
    """Alike nets as one: from a batch of inputs to ``[net, input, output]``."""

    def __init__(self, nets: Sequence[nn.Module], form: nn.Module, is_repeated: bool) -> None:
        super().__init__()
        self._nets = tuple(nets)  # in a tuple, so that they are no modules of this one
        self._form, self._is_repeated = form, is_repeated

    @property
    def count(self) -> int:
        """Number of nets."""
        return len(self._nets)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs of each net for the inputs."""
        given = torch.cat([inputs] * self.count, dim=1) if self._is_repeated else inputs
        said: torch.Tensor = self._form(given)
        return said.view(len(inputs), self.count, -1).transpose(0, 1)

    @torch.no_grad()
    def hand_back(self) -> None:
        """Put what was learnt into the nets themselves, which are not trained any more."""
        for net in self._nets:
            net.eval()
        for whole, parts in _shares(self._form, self._nets):
            for share, part in zip(shares_of(whole, self.count), parts, strict=True):
                part.copy_(share)


def shares_of(whole: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """State of each of so many nets; counts of batches are those of all."""
    return whole.chunk(count) if whole.ndim else [whole] * count


def stacked(nets: Sequence[nn.Module], example: torch.Tensor) -> StackedNets | None:
    """Nets as one, on the device where they are; None where that cannot be."""
    if len({_form_of(net) for net in nets}) > 1:
        return None
    here = [copy.deepcopy(net).cpu().eval() for net in nets]
    probe = torch.randn(2, *example.shape[1:])
    first = _reading(here[0], probe)
    try:
        form = _widened(here[0], len(nets), first)
        whole = StackedNets(here, form, is_repeated=first is None).eval()
        with torch.no_grad():
            for wide, parts in _shares(form, here):
                for share, part in zip(shares_of(wide, len(here)), parts, strict=True):
                    share.copy_(part)
            said, expected = whole(probe), torch.stack([net(probe) for net in here])
    except (_NotStackedError, RuntimeError):
        return None
    if said.shape != expected.shape or not torch.allclose(said, expected, rtol=1e-3, atol=1e-4):
        return None
    device = next(nets[0].parameters()).device
    return StackedNets(nets, form.to(device), is_repeated=first is None)


def _form_of(net: nn.Module) -> tuple[object, ...]:
    modules = tuple((name, repr(type(module))) for name, module in net.named_modules())
    tensors = tuple((name, tuple(each.shape)) for name, each in net.state_dict().items())
    return modules, tensors


def _reading(net: nn.Module, probe: torch.Tensor) -> str | None:
    """The one convolution that reads the inputs as they are: they need not be repeated for it."""
    readers: list[str] = []

    def look(name: str) -> object:
        def hook(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            if given and given[0] is probe and isinstance(module, _CONVOLUTIONS):
                readers.append(name if module.groups == 1 else "")

        return hook

    leaves = [(name, module) for name, module in net.named_modules() if not list(module.children())]
    hooks = [module.register_forward_pre_hook(look(name)) for name, module in leaves]
    with torch.no_grad():
        net(probe)
    for hook in hooks:
        hook.remove()
    return readers[0] if len(readers) == 1 and readers[0] else None


class _NotStackedError(Exception):
    """A net has a layer of which there is no wider form."""


def _widened(net: nn.Module, count: int, first: str | None) -> nn.Module:
    """A net with the layers of ``count`` nets, whose weights are anything."""
    wide = copy.deepcopy(net)
    for name, module in list(wide.named_modules()):
        if list(module.children()) or not list(module.parameters(recurse=False)):
            if list(module.parameters(recurse=False)):
                raise _NotStackedError
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(wide.get_submodule(parent), leaf, _wider(module, count, name == first))
    return wide.train(net.training)


def _wider(layer: nn.Module, count: int, is_first: bool) -> nn.Module:
    if isinstance(layer, _CONVOLUTIONS):
        groups = layer.groups if is_first else count * layer.groups
        return type(layer)(
            layer.in_channels if is_first else count * layer.in_channels,
            count * layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            stride=layer.stride,  # type: ignore[arg-type]
            padding=layer.padding,  # type: ignore[arg-type]
            dilation=layer.dilation,  # type: ignore[arg-type]
            groups=groups,
            bias=layer.bias is not None,
            padding_mode=layer.padding_mode,
        )
    if isinstance(layer, _NORMS):
        return type(layer)(
            count * layer.num_features, layer.eps, layer.momentum, layer.affine,
            layer.track_running_stats,
        )  # fmt: skip
    if isinstance(layer, nn.Linear):
        return _GroupedLinear(layer, count)
    raise _NotStackedError


class _GroupedLinear(nn.Linear):
    """Linear layers side by side."""

    def __init__(self, layer: nn.Linear, count: int) -> None:
        is_shifted = layer._parameters["bias"] is not None
        super().__init__(layer.in_features, count * layer.out_features, is_shifted)
        self._count = count

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Each share of the last dimension by its own weights."""
        weight = self.weight.view(self._count, -1, self.in_features)
        given = input.reshape(-1, self._count, self.in_features).transpose(0, 1)
        made = torch.bmm(given, weight.transpose(1, 2)).transpose(0, 1)
        made = made.reshape(*input.shape[:-1], self.out_features)
        shift = self._parameters["bias"]
        return made if shift is None else made + shift


def _shares(
    form: nn.Module, nets: Sequence[nn.Module]
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Every tensor of a form with those of the nets."""
    states = [net.state_dict() for net in nets]
    for name, whole in form.state_dict().items():
        yield whole, [state[name] for state in states]
