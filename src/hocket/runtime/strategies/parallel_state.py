"""Gather the state of a parallel training as one process would have it, and load it again.

Every tensor is owned by some ranks: its pipeline stage of one replica, with one tensor-parallel
rank per piece. A plain state is gathered tensor by tensor: each owner sends its piece, and the
pieces are joined. To load a plain state, each rank slices its pieces out of the full tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hocket.runtime.checkpoint import TensorCut, TensorPiece, require_same_model
from hocket.runtime.ranks import broadcast_slots
from hocket.runtime.strategies.rank_mesh import RankMesh

_WEIGHT, _GRADIENT = "weight", "gradient"


class TensorOwner(NamedTuple):
    """The ranks that own a tensor of the model."""

    ranks: tuple[int, ...]
    """Ranks that own the pieces, in order; one rank if the tensor is not split."""
    cut: TensorCut | None
    is_here: bool
    """True if this rank holds it, or a piece of it."""
    is_updated: bool
    """True if this rank's optimizer updates it."""


class ParallelState:
    """Gathers and scatters the state of a model whose tensors are owned by several ranks."""

    def __init__(
        self, model: nn.Module, owner_of: Callable[[torch.Tensor], TensorOwner], mesh: RankMesh
    ) -> None:
        self._model, self._owner_of = model, owner_of
        self._device, self._tensor_rank = mesh.device, mesh.tensor_rank

    def gathered(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """Return ``model``, ``optimizer`` and ``gradients`` of all ranks on every rank.

        All ranks must call it. Gradients are included only if they are ``pending``.
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
            owner = self._owner_of(tensor)
            slots = self._whole_slots(owner, tensor, optimizer, pending)
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
        """Return this rank's part of a state that all ranks write, in the layout of `gathered`.

        Split tensors are `TensorPiece`s. No tensors are gathered except parts of FSDP2.
        """
        weights: dict[str, Any] = {}
        gradients: dict[str, Any] = {}
        states: dict[int, dict[str, Any]] = {}
        names, indices, done = _parameter_names(self._model), _indices(optimizer), set[int]()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            owner = self._owner_of(tensor)
            slots = self._own_slots(owner, tensor, optimizer, pending)
            if dist.get_rank() not in owner.ranks:
                continue
            shape = slots[_WEIGHT].shape
            piece = owner.ranks.index(dist.get_rank())
            kept = {
                key: TensorPiece(value, owner.cut, piece)
                if owner.cut is not None
                and isinstance(value, torch.Tensor)
                and value.shape == shape
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
        """Load this rank's part of a plain state; its ``optimizer`` entry must already fit the
        optimizer."""
        require_same_model(state["model"], self._whole_shapes())
        kept: dict[int, dict[str, Any]] = {}
        indices = _indices(optimizer)
        names = _parameter_names(self._model)
        with torch.no_grad():
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                owner = self._owner_of(tensor)
                if not owner.is_here:
                    continue
                whole = state["model"][name]
                _copy(tensor, self._piece(whole, owner))
                if not owner.is_updated:
                    continue
                own_name = names.get(id(tensor))
                if own_name in state["gradients"]:
                    gradient = self._piece(state["gradients"][own_name], owner)
                    tensor.grad = _like(gradient.to(tensor.dtype), tensor, self._device)
                index = indices.get(id(tensor), -1)
                slots = state["optimizer"]["state"].get(index)
                if slots is not None:
                    kept[index] = {
                        key: _like(self._piece(value, owner), tensor, self._device)
                        if isinstance(value, torch.Tensor) and value.shape == whole.shape
                        else value
                        for key, value in slots.items()
                    }
        groups = state["optimizer"]["param_groups"]
        optimizer.load_state_dict({"state": kept, "param_groups": groups})

    def _whole_shapes(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors with their unsplit shapes, on the meta device."""
        found = {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            cut, shape = self._owner_of(tensor).cut, list(tensor.shape)
            if cut is not None:
                shape[cut.dim] *= cut.num_pieces
            found[name] = torch.empty(shape, device="meta")
        return found

    def _piece(self, whole: torch.Tensor, owner: TensorOwner) -> torch.Tensor:
        return whole if owner.cut is None else owner.cut.piece(whole, self._tensor_rank)

    def _whole_slots(
        self,
        owner: TensorOwner,
        tensor: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        pending: bool,
    ) -> dict[str, Any]:
        own = self._own_slots(owner, tensor, optimizer, pending)
        pieces = [
            broadcast_slots(own if rank == dist.get_rank() else {}, rank, self._device)
            for rank in owner.ranks
        ]
        if owner.cut is None:
            return pieces[0]
        shape = tuple(pieces[0][_WEIGHT].shape)
        return {
            key: owner.cut.whole([piece[key] for piece in pieces])
            if isinstance(value, torch.Tensor) and tuple(value.shape) == shape
            else value
            for key, value in pieces[0].items()
        }

    def _own_slots(
        self,
        owner: TensorOwner,
        tensor: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        pending: bool,
    ) -> dict[str, Any]:
        """Return weight, gradient and optimizer states of a tensor that this rank has a piece
        of."""
        if not owner.is_here:
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
    """Return a value with the layout of a parameter: sharded as a DTensor, or on this device."""
    value = value.to(device, copy=True)
    if isinstance(tensor, DTensor):
        return distribute_tensor(value, tensor.device_mesh, tensor.placements)
    return value
