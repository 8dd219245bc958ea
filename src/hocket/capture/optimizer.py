"""Append optimizer updates to a recording, one fused call per parameter.

A fused implementation reads parameter, gradient and state once, writes in place and needs no
workspace, so its cost is one op per parameter with the bytes that it moves. `Optimizer` describes
name, settings and states of an optimizer; `as_optimizer` reads them from a name or from an object
of ``torch.optim``, and `optimizer_of_meta` from the metadata of a graph.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hocket.base.errors import UsageError, unknown_name
from hocket.capture.describe import dtype_index, layout_text
from hocket.capture.recording import Cost, RawCall, Recording, Ref, Source, Value
from hocket.graph import Phase, Role

OPTIMIZER_STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "sgd-momentum": ("momentum_buffer",),
}
"""Optimizers whose update rule is known, with the names of their state tensors per parameter."""

_ADAM: Mapping[str, float] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "adamw": {**_ADAM, "weight_decay": 1e-2},
    "adam": {**_ADAM, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
    "sgd-momentum": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.9},
}
"""Default settings of each optimizer, those of ``torch.optim`` where it has defaults."""
_OTHER_UPDATES = ("amsgrad", "maximize", "nesterov", "dampening", "decoupled_weight_decay")
"""Settings that change the update rule of an implemented optimizer."""
_USUAL_STATES = ("state_1", "state_2")
_MUON = "muon"
TORCH_OPTIMIZERS: Mapping[str, str] = {
    name.lower(): name
    for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop",
    )
}  # fmt: skip
"""Further optimizers that can be chosen by name, with their classes in ``torch.optim``."""


@dataclass(frozen=True)
class Optimizer:
    """Update rule of a step, its settings and its state."""

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings that differ from the defaults."""
    only: frozenset[str] | None = None
    """Names of the parameters to update; None means all that have a gradient."""
    states: tuple[str, ...] | None = None
    """Names of state tensors of the parameter's size; None for an implemented optimizer.

    For other optimizers only the number of these tensors is known, not the update rule.
    """

    @property
    def all_settings(self) -> dict[str, float]:
        """Settings, completed with the defaults."""
        return {**DEFAULTS.get(self.name, {}), **self.settings}

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors per parameter."""
        return OPTIMIZER_STATES[self.name] if self.states is None else self.states

    def moved_bytes(self, parameter_bytes: int) -> int:
        """Bytes that an update of one parameter reads and writes; everything but the gradient
        counts twice."""
        return parameter_bytes * (2 * (2 + len(self.state_names)) - 1)

    def update_flops(self, shape: tuple[int, ...]) -> float:
        """FLOPs of matrix products in an update: Muon's five Newton-Schulz iterations.

        Each iteration computes ``X @ X.T``, its square and their product with ``X`` in bfloat16.
        """
        if self.name != _MUON or len(shape) != 2:
            return 0.0
        short, long = sorted(shape)
        return 5.0 * (4 * short**2 * long + 2 * short**3)

    def to_meta(self) -> dict[str, Any]:
        """Graph metadata from which the step can be captured again."""
        meta: dict[str, Any] = {"optimizer": self.name}
        if self.settings:
            meta["optimizer_settings"] = dict(self.settings)
        if self.only is not None:
            meta["optimizer_parameters"] = sorted(self.only)
        if self.states is not None:
            meta["optimizer_states"] = list(self.states)
        return meta


def optimizer_of_meta(meta: Mapping[str, Any]) -> Optimizer | None:
    """Read the optimizer from a graph's metadata, which may come from an untrusted file."""
    name = meta.get("optimizer")
    if name is None:
        return None
    states = meta.get("optimizer_states")
    if states is None:
        as_optimizer(name, None)
    elif not isinstance(states, list) or not all(isinstance(each, str) for each in states):
        raise UsageError("the graph's notes about its optimizer make no sense", hint="plan again")
    settings, only = meta.get("optimizer_settings", {}), meta.get("optimizer_parameters")
    are_settings = isinstance(settings, Mapping) and all(
        key in DEFAULTS.get(name, {}) and isinstance(value, (int, float))
        for key, value in settings.items()
    )
    are_names = only is None or (
        isinstance(only, list) and all(isinstance(item, str) for item in only)
    )
    if not are_settings or not are_names:
        raise UsageError("the graph's notes about its optimizer make no sense", hint="plan again")
    names = None if only is None else frozenset(only)
    return Optimizer(name, dict(settings), names, None if states is None else tuple(states))


def required_optimizer(meta: Mapping[str, Any]) -> Optimizer:
    """Read the optimizer from a graph's metadata; refuse a graph without one."""
    found = optimizer_of_meta(meta)
    if found is None:
        raise UsageError("nothing is trained without an optimizer", hint="plan a training step")
    return found


def as_optimizer(given: Any, model: nn.Module | None) -> Optimizer | None:
    """Convert a name or a ``torch.optim`` object to an `Optimizer`; None means inference."""
    if given is None or isinstance(given, Optimizer):
        return given
    if isinstance(given, str):
        if given in OPTIMIZER_STATES:
            return Optimizer(given)
        if given not in TORCH_OPTIMIZERS:
            raise unknown_name("optimizer", given, (*OPTIMIZER_STATES, *TORCH_OPTIMIZERS))
        kind: Any = getattr(torch.optim, TORCH_OPTIMIZERS[given])
        return Optimizer(given, states=_tried_states(kind([nn.Parameter(torch.ones(4, 4))])))
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        raise UsageError(
            f"{given.__name__} is a class of optimizers, not one of them",
            hint=f"make one: {given.__name__}(model.parameters())",
        )
    if not isinstance(given, torch.optim.Optimizer) or model is None:
        raise UsageError(
            f"an optimizer cannot be of type {type(given).__name__!r}",
            hint=f"name one ({', '.join(OPTIMIZER_STATES)}) or pass one of torch.optim",
        )
    return _of_torch(given, model)


def _of_torch(given: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    if isinstance(given, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS computes the loss several times per update, which a plan does not",
            hint="use another optimizer of torch.optim",
        )
    only = updated_names(given, model)
    kind = type(given).__name__
    # Costs do not depend on settings, so those of the largest group describe the optimizer. The
    # user's optimizer itself applies the settings of every group.
    largest = max(given.param_groups, key=lambda g: sum(p.numel() for p in g["params"]))
    first = {key: value for key, value in largest.items() if key != "params"}
    name = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd"}.get(kind, "")
    if name == "sgd" and first["momentum"]:
        name = "sgd-momentum"
    is_known = bool(name) and type(given).__module__.partition(".")[0] == "torch"
    used = [key for key in _OTHER_UPDATES if first.get(key) and (name, key) != _DECOUPLED]
    if not is_known or used:
        return Optimizer(kind.lower(), only=only, states=_tried_states(given))
    if "betas" in first:
        first["beta1"], first["beta2"] = first["betas"]
    settings = {key: float(first[key]) for key in DEFAULTS[name]}
    changed = {key: value for key, value in settings.items() if value != DEFAULTS[name][key]}
    return Optimizer(name, changed, only)


def _tried_states(given: torch.optim.Optimizer) -> tuple[str, ...]:
    """State tensors of a parameter's size that an optimizer keeps, found by updating a small
    parameter.

    Optimizers from outside PyTorch are not tried, because their update may have side effects; two
    state tensors are assumed, as most of them have.
    """
    if type(given).__module__.partition(".")[0] != "torch":
        return _USUAL_STATES
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    own: Any = object.__new__(type(given))
    vars(own).update(vars(given))
    # A scheduler's wrapper and the user's hooks must not notice the trial step.
    vars(own).pop("step", None)
    own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    on_cpu = {key: False for key in ("fused", "capturable", "foreach") if key in given.defaults}
    own.param_groups = [{**given.param_groups[0], **on_cpu, "params": [parameter]}]
    own.state = defaultdict(dict)
    try:
        with torch.random.fork_rng(devices=[]):
            own.step()
    except Exception:
        return _USUAL_STATES
    found = own.state[parameter].items()
    return tuple(
        str(name)
        for name, value in found
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    )


def updated_names(given: torch.optim.Optimizer, model: nn.Module) -> frozenset[str] | None:
    """Names of the parameters that an optimizer updates; None if it updates all of the model.

    Raises `UsageError` if the optimizer holds parameters that the model does not have.
    """
    updated = {id(parameter) for group in given.param_groups for parameter in group["params"]}
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    if not updated <= set(names.values()):
        raise UsageError(
            f"{type(given).__name__} updates parameters that are not the model's",
            hint="make the optimizer from model.parameters()",
        )
    only = frozenset(name for name, number in names.items() if number in updated)
    return None if len(only) == len(names) else only


_DECOUPLED = ("adamw", "decoupled_weight_decay")
"""Optimizer and setting with decoupled weight decay, which capture implements as AdamW."""


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuse embeddings with sparse gradients: their size varies, so a traced step cannot hold
    them."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"{path or type(module).__name__!r} makes sparse gradients, whose size depends on "
                "the data",
                hint="build it with sparse=False and AdamW, Adam or SGD: SparseAdam and other "
                "updates of sparse gradients are not supported",
            )


def append_optimizer(recording: Recording, optimizer: Optimizer) -> None:
    """Append the update of every parameter that has a gradient, in parameter order."""
    parameters = [source for source in recording.sources if source.value in recording.gradients]
    for source in parameters:
        if optimizer.only is None or source.name in optimizer.only:
            _append_update(recording, optimizer, source)


def _append_update(recording: Recording, optimizer: Optimizer, parameter: Source) -> None:
    layout = recording.values[parameter.value].layout
    gradient = recording.gradients[parameter.value]
    states = []
    for state in optimizer.state_names:
        recording.storage_bytes.append(layout.size_bytes)
        number = len(recording.values)
        own = layout._replace(offset=0)
        recording.values.append(Value(len(recording.storage_bytes) - 1, own))
        recording.producer.append(-1)
        name = f"{parameter.name}.{state}"
        recording.sources.append(Source(name, Role.OPTIMIZER_STATE, number))
        states.append(number)
    read = (parameter.value, gradient, *states)
    touched = optimizer.moved_bytes(layout.size_bytes)
    kind = f"optimizer.{optimizer.name}"
    flops = optimizer.update_flops(tuple(layout.shape))
    dtype = torch.bfloat16 if flops else layout.dtype
    cost = Cost(kind, f"{kind}({layout_text(layout)})", dtype_index(dtype), flops, touched)
    call = RawCall(
        kind, tuple(Ref(number) for number in read), optimizer.all_settings, read, (),
        (parameter.value,), cost, phase=Phase.OPTIMIZER,
        module=parameter.name.rpartition(".")[0],
    )  # fmt: skip
    recording.calls.append(call)
