"""State of a training whose ranks hold parts of the model: collect it, and load it again.

Every tensor is owned by some ranks: its pipeline stage of one replica, with one tensor-parallel
rank per piece, or the device that op placement gives it. A rank's part consists of the tensors and
pieces that it owns. The parts are written to files, or exchanged and joined into the state that one
process would have. To load such a state, each rank slices its pieces out of the full tensors.

Not torch's ``get_state_dict``: it joins shards of FSDP2, but knows no stages, split matrices or
owners of ZeRO 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hocket.runtime.checkpoint import (
    StatePart,
    TensorCut,
    TensorPiece,
    joined_parts,
    packed_part,
    require_same_model,
)

_WEIGHT, _GRADIENT = "$weight", "$gradient"
"""Keys of a parameter and its gradient among the states of its optimizer."""


class TensorOwner(NamedTuple):
    """The ranks that own a tensor of the model."""

    ranks: tuple[int, ...]
    """Ranks that own the pieces, in order; one rank if the tensor is not split."""
    cut: TensorCut | None
    is_here: bool
    """True if this rank holds the tensor, or a piece of it."""
    is_updated: bool
    """True if this rank's optimizer updates it."""


class ParallelState:
    """Collects and loads the state of a model whose tensors are owned by several ranks."""

    def __init__(
        self,
        model: nn.Module,
        owner_of: Callable[[torch.Tensor], TensorOwner],
        device: torch.device,
        tensor_rank: int = 0,
        *,
        has_whole_gradients: bool = True,
    ) -> None:
        """Without ``has_whole_gradients``, those of a rank are its own and never in a state."""
        self._has_whole_gradients = has_whole_gradients
        self._model, self._owner_of = model, owner_of
        self._device, self._tensor_rank = device, tensor_rank

    def parts(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """Return ``model``, ``optimizer`` and ``gradients`` as far as this rank owns them.

        All ranks must call it. Split tensors are `TensorPiece`s; gradients are included only if
        they are ``pending``.
        """
        weights: dict[str, Any] = {}
        gradients: dict[str, Any] = {}
        states: dict[int, dict[str, Any]] = {}
        names, indices = _parameter_names(self._model), _indices(optimizer)
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            owner, rank = self._owner_of(tensor), dist.get_rank()
            if not owner.is_here:
                continue
            slots = {_WEIGHT: tensor.detach(), **optimizer.state.get(tensor, {})}
            if pending and self._has_whole_gradients and tensor.grad is not None:
                slots[_GRADIENT] = tensor.grad
            # Ranks that share a tensor of FSDP2 put it together at the same time.
            whole = {key: v.full_tensor() if isinstance(v, DTensor) else v
                     for key, v in slots.items()}  # fmt: skip
            if rank not in owner.ranks:
                continue
            if owner.cut is not None:
                index, shape = owner.ranks.index(rank), whole[_WEIGHT].shape
                whole = {
                    key: TensorPiece(value, owner.cut, index)
                    if isinstance(value, torch.Tensor) and value.shape == shape
                    else value
                    for key, value in whole.items()
                }
            weights[name] = whole.pop(_WEIGHT)
            if _GRADIENT in whole:
                gradients[names[id(tensor)]] = whole.pop(_GRADIENT)
            if whole and id(tensor) in indices:
                states[indices[id(tensor)]] = whole
        groups = optimizer.state_dict()["param_groups"]
        optimizer_state = {"state": states, "param_groups": groups}
        return {"model": weights, "optimizer": optimizer_state, "gradients": gradients}

    def gathered(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """Return the state as one process would have it, on every rank. All ranks must call it."""
        own = self.parts(optimizer, pending=pending)
        groups = own["optimizer"].pop("param_groups")
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, tuple(packed_part(own)))
        state = joined_parts([StatePart(*part) for part in everyone])
        numbered = {int(index): slots for index, slots in state["optimizer"]["state"].items()}
        weights = {name: state["model"][name] for name in self._model.state_dict(keep_vars=True)}
        optimizer_state = {"state": numbered, "param_groups": groups}
        return {**state, "model": weights, "optimizer": optimizer_state}

    def take(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of a state; its ``optimizer`` entry must fit the optimizer."""
        require_same_model(state["model"], self._whole_shapes())
        kept: dict[int, dict[str, Any]] = {}
        names, indices = _parameter_names(self._model), _indices(optimizer)
        with torch.no_grad():
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                owner = self._owner_of(tensor)
                if not owner.is_here:
                    continue
                whole = state["model"][name]
                tensor.copy_(self._piece(whole, owner, tensor))
                if not owner.is_updated:
                    continue
                own_name = names.get(id(tensor))
                if own_name in state["gradients"]:
                    gradient = state["gradients"][own_name].to(tensor.dtype)
                    tensor.grad = self._piece(gradient, owner, tensor)
                index = indices.get(id(tensor), -1)
                slots = state["optimizer"]["state"].get(index)
                if slots is not None:
                    kept[index] = {
                        key: self._piece(value, owner, tensor)
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

    def _piece(self, whole: torch.Tensor, owner: TensorOwner, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a full tensor, sharded or placed like a parameter."""
        own = whole if owner.cut is None else owner.cut.piece(whole, self._tensor_rank)
        own = own.to(self._device, copy=True)
        if isinstance(like, DTensor):
            return distribute_tensor(own, like.device_mesh, like.placements)
        return own


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _indices(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(parameter): index for index, parameter in enumerate(parameters)}
