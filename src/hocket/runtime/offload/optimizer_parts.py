"""The optimizer's update on the host: its state and a twin of every parameter live there.

ZeRO-Offload (Ren et al., 2021): gradients are copied to the host when all are there, the person's
own optimizer updates the twins, and parameters are copied back. The device holds no state.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

# Notice writes to parameters by others, fused optimizers included.

own_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers of single blocks, whose steps are not somebody else's."""
_num_fused_steps = 0


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Numbers that change when somebody else writes to the tensors.

    Fused optimizers do not move PyTorch's version counters, so their steps are counted.
    """
    return [_num_fused_steps, *(tensor._version for tensor in tensors)]


def count_fused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count a step of somebody else's fused optimizer; a hook after every optimizer's step."""
    global _num_fused_steps
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused and optimizer not in own_optimizers:
        _num_fused_steps += 1


register_optimizer_step_post_hook(count_fused)


# Updates of single blocks by the person's own optimizer, on the device or by a thread on the host.
#
# A block's update is a step of an optimizer that is the person's own but for its parameters:
# state, settings and class are shared, so any optimizer works whose update of a parameter looks at
# that parameter alone. Of the blocks whose gradients have come, the one is updated that the next
# forward pass needs first: gradients of the first block come last, and what is left of the later
# blocks is updated while the next forward pass runs. A large block is updated in parts, between
# which a lower one that has come goes first. On a GPU the host's updates of Adam, AdamW, SGD and
# Adagrad take PyTorch's fused kernels, which read and write everything once, with all cores but
# one: a team of threads waits for its slowest member, and whoever starts the device's work would
# take its core away.

_UPDATE_IN_PARTS = ("torch", "transformers", "bitsandbytes")
"""Packages whose optimizers update every parameter by itself."""
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def has_fused_kernels(optimizer: torch.optim.Optimizer) -> bool:
    """True if PyTorch updates all parameters of such an optimizer in one kernel."""
    return type(optimizer) in _FUSED


def counters_beside(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Have counters of steps where their parameters are, as fused kernels want them."""
    for parameter in parameters:
        states = optimizer.state.get(parameter, {})
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and not value.dim():
                states[key] = value.to(parameter.device)


def updates_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """True if the update of a parameter looks at that parameter alone, and nothing looks on.

    Optimizers of unknown packages may take norms over all parameters; a hook of an optimizer, or a
    function in the place of its ``step``, runs once per step and sees all gradients.
    """
    step = vars(optimizer).get("step")
    is_plain = step is None or hasattr(step, "_wrapped_by_lr_sched")
    is_hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    package = type(optimizer).step.__module__.partition(".")[0]
    return is_plain and not is_hooked and package in _UPDATE_IN_PARTS


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with the settings that it has now, and with no groups or states yet."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    # A scheduler counts steps of the whole optimizer by a function that it puts here.
    made.__dict__.pop("step", None)
    # Hooks are of the whole optimizer's step, too: see `updates_in_parts`.
    made._optimizer_step_pre_hooks = OrderedDict()
    made._optimizer_step_post_hooks = OrderedDict()
    made.param_groups, made.state = [], defaultdict(dict)
    own_optimizers.add(made)
    return made


def part_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[nn.Parameter, nn.Parameter],
    *,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer with these parameters alone, and the settings that it has now.

    ``parameters`` says for each which one is updated in its place, with its state.
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
    """Where the parameters of an optimizer were when they were looked for."""

    lists: list[tuple[list[nn.Parameter], int]]
    group_of: dict[nn.Parameter, int]


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Groups] = weakref.WeakKeyDictionary()


def group_of(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> dict[nn.Parameter, int]:
    """In which group of the optimizer each parameter is. There are many blocks, and each would go
    through all parameters; they are gone through again where groups changed, or one is missed."""
    lists = [(group["params"], len(group["params"])) for group in optimizer.param_groups]
    known = _known.get(optimizer)
    is_same = known is not None and len(known.lists) == len(lists) and all(
        params is before and count == number
        for (params, count), (before, number) in zip(lists, known.lists, strict=True)
    )  # fmt: skip
    if known is None or not is_same or any(p not in known.group_of for p in parameters):
        known = _Groups(lists, {p: n for n, (params, _) in enumerate(lists) for p in params})
        _known[optimizer] = known
    return known.group_of


# The optimizer's update on the host: its state and a twin of every parameter live there.
#
# ZeRO-Offload (Ren et al., 2021): gradients are copied to the host when all are there, the
# person's own optimizer updates the twins, and parameters are copied back. The device holds no
# state.


_HOST = torch.device("cpu")


class _Twin(NamedTuple):
    """A parameter's copy on the host, and what the parameter was when they were the same."""

    parameter: nn.Parameter
    versions: list[int]
    address: int


class HostUpdate:
    """Makes steps of an optimizer on the host."""

    def __init__(self) -> None:
        self._twins: dict[nn.Parameter, _Twin] = {}

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """One step with the gradients that parameters have."""
        trained = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        twins = {parameter: self._twin(parameter) for parameter in trained}
        for parameter, twin in twins.items():
            twin.grad = parameter.grad.to(_HOST)
            _bring_home(optimizer.state[parameter])
        part_of(optimizer, twins, fused=True).step()
        for parameter, twin in twins.items():
            twin.grad = None
            parameter.detach().copy_(twin.detach())
            self._twins[parameter] = _Twin(twin, versions_of([parameter]), parameter.data_ptr())
        # Schedulers look whether it was called.
        optimizer._opt_called = True  # type: ignore[attr-defined]

    def _twin(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self._twins.get(parameter)
        now = versions_of([parameter]), parameter.data_ptr()
        if known is not None and (known.versions, known.address) == now:
            return known.parameter
        return nn.Parameter(parameter.detach().to(_HOST, copy=True))


def _bring_home(state: dict[str, object]) -> None:
    """States that a checkpoint has put to the device."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.device != _HOST:
            state[key] = value.to(_HOST)
