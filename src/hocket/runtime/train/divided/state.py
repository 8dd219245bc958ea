"""The state of a divided training as one process would have it, and back.

Every tensor is at home with some ranks: those of its pipeline stage, one of the replicas, and one
tensor-parallel rank per piece. A plain state is gathered tensor by tensor: each home sends its
piece, and the pieces are joined. To load one, each rank takes its pieces out of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hocket.runtime.train.broadcast import share_slots
from hocket.runtime.train.checkpoint import TensorPiece, require_same_model
from hocket.runtime.train.cuts import TensorCut

_WEIGHT, _GRADIENT = "weight", "gradient"


class Home(NamedTuple):
    """Where a tensor of the model is."""

    ranks: tuple[int, ...]
    """Of its pieces, in order; one where it is not cut."""
    cut: TensorCut | None
    is_here: bool
    """True if this rank holds it, or a piece of it."""
    is_updated: bool
    """True if this rank's optimizer updates it."""


class DividedState:
    """Gathers and hands out the state of a model whose tensors are with several ranks."""

    def __init__(
        self,
        model: nn.Module,
        home_of: Callable[[str, torch.Tensor], Home],
        device: torch.device,
        tensor_rank: int,
    ) -> None:
        self._model, self._home_of = model, home_of
        self._device, self._tensor_rank = device, tensor_rank

    def gathered(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """``model``, ``optimizer`` and ``gradients`` of all ranks on each; all ranks ask.

        Gradients are those that are ``pending``.
        """
        tensors = self._model.state_dict(keep_vars=True)
        names = _parameter_names(self._model)
        weights: dict[str, torch.Tensor] = {}
        gradients: dict[str, torch.Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        done: dict[int, str] = {}
        for name, tensor in tensors.items():
            if id(tensor) in done:
                weights[name] = weights[done[id(tensor)]]
                continue
            done[id(tensor)] = name
            home = self._home_of(name, tensor)
            slots = self._whole_slots(home, tensor, optimizer, pending)
            weights[name] = slots.pop(_WEIGHT)
            if _GRADIENT in slots:
                gradients[names[id(tensor)]] = slots.pop(_GRADIENT)
            if id(tensor) in names:
                states[names[id(tensor)]] = slots
        return {
            "model": weights,
            "optimizer": _optimizer_state(optimizer, names, states),
            "gradients": gradients,
        }

    def parts(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """What this rank keeps of a state that all ranks write together, as `gathered` is laid out.

        Tensors that are cut are `TensorPiece`s. Nothing is gathered but parts of FSDP2.
        """
        weights: dict[str, Any] = {}
        gradients: dict[str, Any] = {}
        states: dict[int, dict[str, Any]] = {}
        names, indices, done = _parameter_names(self._model), _indices(optimizer), set[int]()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            home = self._home_of(name, tensor)
            slots = self._own_slots(home, tensor, optimizer, pending)
            if dist.get_rank() not in home.ranks:
                continue
            shape = slots[_WEIGHT].shape
            piece = home.ranks.index(dist.get_rank())
            kept = {
                key: TensorPiece(value, home.cut, piece)
                if home.cut is not None and isinstance(value, torch.Tensor) and value.shape == shape
                else value
                for key, value in slots.items()
            }
            weights[name] = kept.pop(_WEIGHT)
            if id(tensor) in done:
                continue
            done.add(id(tensor))
            if _GRADIENT in kept:
                gradients[names[id(tensor)]] = kept.pop(_GRADIENT)
            if kept and id(tensor) in indices:
                states[indices[id(tensor)]] = kept
        return {"model": weights, "optimizer": {"state": states}, "gradients": gradients}

    def take(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of a plain state; ``optimizer`` of it is fitted already."""
        require_same_model(state["model"], self._whole_shapes())
        kept: dict[int, dict[str, Any]] = {}
        indices = _indices(optimizer)
        names = _parameter_names(self._model)
        with torch.no_grad():
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                home = self._home_of(name, tensor)
                if not home.is_here:
                    continue
                whole = state["model"][name]
                _copy(tensor, self._piece(whole, home))
                if not home.is_updated:
                    continue
                own_name = names.get(id(tensor))
                if own_name in state["gradients"]:
                    gradient = self._piece(state["gradients"][own_name], home)
                    tensor.grad = _like(gradient.to(tensor.dtype), tensor, self._device)
                index = indices.get(id(tensor), -1)
                slots = state["optimizer"]["state"].get(index)
                if slots is not None:
                    kept[index] = {
                        key: _like(self._piece(value, home), tensor, self._device)
                        if isinstance(value, torch.Tensor) and value.shape == whole.shape
                        else value
                        for key, value in slots.items()
                    }
        groups = state["optimizer"]["param_groups"]
        optimizer.load_state_dict({"state": kept, "param_groups": groups})

    def _whole_shapes(self) -> dict[str, torch.Tensor]:
        """The model's tensors as one process has them, without memory."""
        found = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            cut, shape = self._home_of(name, tensor).cut, list(tensor.shape)
            if cut is not None:
                shape[cut.dim] *= cut.num_pieces
            found[name] = torch.empty(shape, device="meta")
        return found

    def _piece(self, whole: torch.Tensor, home: Home) -> torch.Tensor:
        return whole if home.cut is None else home.cut.piece(whole, self._tensor_rank)

    def _whole_slots(
        self,
        home: Home,
        tensor: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        pending: bool,
    ) -> dict[str, Any]:
        own = self._own_slots(home, tensor, optimizer, pending)
        pieces = [
            share_slots(own if rank == dist.get_rank() else {}, rank, self._device)
            for rank in home.ranks
        ]
        if home.cut is None:
            return pieces[0]
        shape = tuple(pieces[0][_WEIGHT].shape)
        return {
            key: home.cut.whole([piece[key] for piece in pieces])
            if isinstance(value, torch.Tensor) and tuple(value.shape) == shape
            else value
            for key, value in pieces[0].items()
        }

    def _own_slots(
        self,
        home: Home,
        tensor: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        pending: bool,
    ) -> dict[str, Any]:
        """Weight, gradient and states of a tensor that this rank has a piece of."""
        if not home.is_here:
            return {}
        own = {_WEIGHT: tensor.detach(), **optimizer.state.get(tensor, {})}
        if pending and tensor.grad is not None:
            own[_GRADIENT] = tensor.grad
        # Weights that replicas hold parts of are put together by all of them at once.
        return {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in own.items()}


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _indices(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(parameter): index for index, parameter in enumerate(parameters)}


def _optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], states: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    found = {
        index: states[names[number]]
        for number, index in _indices(optimizer).items()
        if number in names and states.get(names[number])
    }
    return {"state": found, "param_groups": optimizer.state_dict()["param_groups"]}


def _copy(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        here = value.to(tensor.to_local().device, tensor.dtype)
        tensor.copy_(distribute_tensor(here, tensor.device_mesh, tensor.placements))
    else:
        tensor.data.copy_(value)


def _like(value: torch.Tensor, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A value laid out as a parameter is: in parts of replicas, or here."""
    value = value.to(device, copy=True)
    if isinstance(tensor, DTensor):
        return distribute_tensor(value, tensor.device_mesh, tensor.placements)
    return value
