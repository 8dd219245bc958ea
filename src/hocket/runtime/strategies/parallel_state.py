"""Collect and load the training state of a model whose ranks hold parts of it.

Every tensor is owned by one rank, or by one rank per piece if it is tensor-parallel. The owners are
the ranks of the tensor's pipeline stage in one replica, or the rank of the device on which op
placement has put the tensor. `parts` returns the tensors and pieces that this rank owns, for files;
`gathered` exchanges and joins the parts into the state that one process would have. To load such a
state, each rank slices its pieces out of the full tensors. Torch's ``get_state_dict`` is not used:
it joins shards of FSDP2, but has no notion of stages, split matrices or owners of ZeRO 1 and 2.
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
"""Keys of a parameter and its gradient in the dict of its optimizer states."""


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
        """Without ``has_whole_gradients``, gradients are local to a rank and not in the state."""
        self._has_whole_gradients = has_whole_gradients
        self._model, self._owner_of = model, owner_of
        self._device, self._tensor_rank = device, tensor_rank

    def parts(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """Return the entries of ``model``, ``optimizer`` and ``gradients`` that this rank owns.

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
            # `full_tensor` is a collective, so all ranks call it before owners are selected.
            whole = {key: v.full_tensor() if isinstance(v, DTensor) else v
                     for key, v in slots.items()}  # fmt: skip
            if rank not in owner.ranks:
                continue
            if owner.cut is not None:
                # States of the weight's shape are split as the weight is; step counters are not.
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
        """Load this rank's part of a full state; ``optimizer`` must match the saved one."""
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
        """Return this rank's piece of a full tensor, as a DTensor if ``like`` is one."""
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
