"""Parts of the user's optimizer with some of its parameters, so that blocks are updated separately.

A part has the class, settings and state of the optimizer, and a subset of its parameters. Parts
work for every optimizer whose update of a parameter reads no other parameter (`updates_in_parts`).
`HostUpdate` uses parts for ZeRO-Offload updates on the host. `versions_of` detects writes to
parameters by code outside of hocket.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_PER_PARAMETER_PACKAGES = ("torch", "transformers", "bitsandbytes")
"""Packages whose optimizers update every parameter independently of the others."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_HOST = torch.device("cpu")
_parts: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Parts created by this file; `count_fused` ignores their steps."""
_num_fused_steps = 0


# ── writes by others ─────────────────────────────────────────────────────────────────────────────


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return numbers that change when code outside of hocket writes to the tensors.

    Fused optimizers do not move PyTorch's version counters, so their steps are counted.
    """
    return [_num_fused_steps, *(tensor._version for tensor in tensors)]


def count_fused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step of the user's fused optimizer; runs after every optimizer's step."""
    global _num_fused_steps
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and optimizer not in _parts:
        _num_fused_steps += 1


register_optimizer_step_post_hook(count_fused)


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def has_fused_kernels(optimizer: torch.optim.Optimizer) -> bool:
    """True if PyTorch updates all parameters of such an optimizer in one kernel."""
    return type(optimizer) in _FUSED


def updates_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """True if the update of a parameter reads that parameter alone, and nothing observes steps.

    Optimizers of unknown packages may take norms over all parameters; a hook of an optimizer, or a
    function in place of its ``step``, expects one call per step with all gradients.
    """
    step = vars(optimizer).get("step")
    is_plain = step is None or hasattr(step, "_wrapped_by_lr_sched")
    is_hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    package = type(optimizer).step.__module__.partition(".")[0]
    return is_plain and not is_hooked and package in _PER_PARAMETER_PACKAGES


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with its present settings, but no groups and states."""
    # Without `__init__`, whose arguments are not known here.
    part: torch.optim.Optimizer = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    # Learning-rate schedulers wrap `step` to count the steps of the entire optimizer.
    part.__dict__.pop("step", None)
    # Hooks belong to the whole optimizer's step, too: see `updates_in_parts`.
    part._optimizer_step_pre_hooks = OrderedDict()
    part._optimizer_step_post_hooks = OrderedDict()
    part.param_groups, part.state = [], defaultdict(dict)
    _parts.add(part)
    return part


def part_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[nn.Parameter, nn.Parameter],
    *,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer for some parameters, with its present settings.

    ``parameters`` maps each to the one that is updated in its place, with its state.
    """
    part = without_parameters(optimizer)
    settings: dict[str, Any] = {}
    if fused and has_fused_kernels(optimizer):
        settings = {"fused": True, "foreach": False}
    part.param_groups = [{**group, "params": [], **settings} for group in optimizer.param_groups]
    groups = group_of(optimizer, parameters)
    for parameter, updated in parameters.items():
        if parameter in groups:
            part.state[updated] = optimizer.state[parameter]
            part.param_groups[groups[parameter]]["params"].append(updated)
    return part


class _Groups(NamedTuple):
    """Groups of an optimizer when they were last read."""

    lists: list[tuple[list[nn.Parameter], int]]
    group_of: dict[nn.Parameter, int]


_groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Groups] = weakref.WeakKeyDictionary()


def group_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> dict[nn.Parameter, int]:
    """Return the group index of each parameter.

    The result is cached, because every block needs it, until groups or parameters change.
    """
    lists = [(group["params"], len(group["params"])) for group in optimizer.param_groups]
    known = _groups.get(optimizer)
    is_same = known is not None and len(known.lists) == len(lists) and all(
        params is before and count == number
        for (params, count), (before, number) in zip(lists, known.lists, strict=True)
    )  # fmt: skip
    if known is None or not is_same or any(p not in known.group_of for p in parameters):
        known = _Groups(lists, {p: n for n, (params, _) in enumerate(lists) for p in params})
        _groups[optimizer] = known
    return known.group_of


# ── a whole update on the host ───────────────────────────────────────────────────────────────────


class _Master(NamedTuple):
    """Master copy of a parameter, and the parameter's version when both were equal."""

    parameter: nn.Parameter
    versions: list[int]
    address: int


class HostUpdate:
    """Runs steps of an optimizer on the host, which holds its state and a copy of every parameter.

    ZeRO-Offload (Ren et al., 2021): once all gradients are computed they are copied to the host,
    the user's optimizer updates the copies, and parameters are copied back.
    """

    def __init__(self) -> None:
        self._masters: dict[nn.Parameter, _Master] = {}

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Run one step with the gradients that parameters have."""
        trained = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        masters = {parameter: self._master(parameter) for parameter in trained}
        for parameter, master in masters.items():
            master.grad = parameter.grad.to(_HOST)
            state = optimizer.state[parameter]
            for key, value in state.items():
                # A checkpoint may have put them on the device.
                if isinstance(value, torch.Tensor) and value.device != _HOST:
                    state[key] = value.to(_HOST)
        part_of(optimizer, masters, fused=True).step()
        for parameter, master in masters.items():
            master.grad = None
            parameter.detach().copy_(master.detach())
            self._masters[parameter] = _Master(
                master, versions_of([parameter]), parameter.data_ptr()
            )
        # Learning-rate schedulers warn unless `optimizer.step` was called before them.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self._masters.get(parameter)
        now = versions_of([parameter]), parameter.data_ptr()
        # Unchanged since the last update: the copy need not be read from the device again.
        if known is not None and (known.versions, known.address) == now:
            return known.parameter
        return nn.Parameter(parameter.detach().to(_HOST, copy=True))
