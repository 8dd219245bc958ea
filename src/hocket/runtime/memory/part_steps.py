"""Steps of an optimizer for some of its parameters: on the host, on the device, or rehearsed."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hocket.base.errors import UsageError
from hocket.runtime.memory.blocks import Block
from hocket.runtime.memory.ledger import on_host
from hocket.runtime.memory.updates import (
    counters_beside,
    group_of,
    has_fused_kernels,
    part_of,
    updates_in_parts,
)


class PartSteps:
    """Parts of an optimizer, by fused kernels where ``is_real``, and their steps."""

    def __init__(self, device: torch.device, *, is_real: bool, is_rehearsal: bool) -> None:
        self._device, self._is_real, self._is_rehearsal = device, is_real, is_rehearsal
        self._looked: list[tuple[int, int]] = []
        """Lists of parameters that blocks were last found for, and how many each had."""

    def settle(self, optimizer: torch.optim.Optimizer | None, blocks: Sequence[Block]) -> None:
        """Have the states of an optimizer that was used before where the blocks are updated; refuse
        parameters that the model got after it was prepared, which no block would update."""
        groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        lists = [(id(parameters), len(parameters)) for parameters in groups]
        if not lists or lists == self._looked:
            return
        known = {parameter for block in blocks for parameter in block.parameters}
        for parameter in (p for parameters in groups for p in parameters):
            if parameter not in known:
                raise UsageError(
                    f"the optimizer has a parameter {list(parameter.shape)} that the model did not "
                    "have when it was prepared",
                    hint="call hocket.prepare again after the model was changed",
                )
        self._looked = lists
        assert optimizer is not None
        for block in blocks:
            place = self._device if block.home is None else torch.device("cpu")
            for parameter in block.parameters:
                _bring(optimizer.state.get(parameter, {}), place)

    def forget(self) -> None:
        """Another training may have moved states: look again where they are."""
        self._looked = []

    def at_home(self, optimizer: torch.optim.Optimizer, block: Block) -> torch.optim.Optimizer:
        """The part that updates a block on the host."""
        return part_of(optimizer, block.twins, fused=self._is_real)

    def here(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Of parameters on the device; fused kernels hold nothing beside what they change."""
        if self._is_real and has_fused_kernels(optimizer):
            counters_beside(optimizer, parameters)
        part = part_of(optimizer, {p: p for p in parameters}, fused=self._is_real)
        if self._is_real and torch.cuda.is_current_stream_capturing():
            for group in part.param_groups:
                # Optimizers want to be told.
                group |= {"capturable": True} if "capturable" in group else {}
        return part

    def step_here(self, part: torch.optim.Optimizer) -> None:
        """An update on the device, of which a rehearsal sees what it holds."""
        is_fused = self._device.type == "cuda" and has_fused_kernels(part)
        if not (self._is_rehearsal and is_fused):
            self._step(part)

    def step_whole(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer itself; a dry run has gradients on the device only."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._is_rehearsal or any(p.grad is not None for p in trained):
            self._step(optimizer)

    def _step(self, part: torch.optim.Optimizer) -> None:
        # Counters of steps are read by the host, so that they are real in a rehearsal, too.
        with unset_fake_temporarily() if self._is_rehearsal else nullcontext():
            part.step()

    def make_states(self, optimizer: torch.optim.Optimizer, blocks: Sequence[Block]) -> None:
        """Have the states that come to or stay on the device, as after a first step."""
        if not updates_in_parts(optimizer):
            self._make_whole_state(optimizer, [b for b in blocks if b.home is None])
            return
        self._make_states(optimizer, {p: p for b in blocks if b.home is None for p in b.parameters})
        with on_host():
            visiting = [block.twins for block in blocks if block.is_updated_here]
            self._make_states(
                optimizer, {p: twin for twins in visiting for p, twin in twins.items()}
            )

    def _make_whole_state(self, optimizer: torch.optim.Optimizer, blocks: Sequence[Block]) -> None:
        trained = [p for block in blocks for p in block.parameters if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        self.step_whole(optimizer)
        for parameter in trained:
            parameter.grad = None

    def _make_states(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        """The update of a parameter looks at it alone: of those that look alike one is updated, and
        the states of the others are like its own."""
        alike: dict[Any, list[nn.Parameter]] = {}
        groups = group_of(optimizer, parameters)
        for parameter, updated in parameters.items():
            if parameter.requires_grad:
                look = (updated.shape, updated.stride(), updated.dtype, updated.device)
                alike.setdefault((groups.get(parameter), *look), []).append(parameter)
        firsts = {p: parameters[p] for p, *_ in alike.values()}
        for updated in firsts.values():
            updated.grad = torch.zeros_like(updated)
        self._step(part_of(optimizer, firsts))
        for updated in firsts.values():
            updated.grad = None
        for first, *others in alike.values():
            for parameter in others if first in optimizer.state else ():
                optimizer.state[parameter] = {
                    key: self._like(value) for key, value in optimizer.state[first].items()
                }

    def _like(self, state: Any) -> Any:
        if not isinstance(state, torch.Tensor):
            return state
        if state.dim():
            return torch.empty_like(state)
        # Counters of steps are the host's.
        with on_host(), unset_fake_temporarily() if self._is_rehearsal else nullcontext():
            return state.clone()


def _bring(states: MutableMapping[str, Any], place: torch.device) -> None:
    """The states of one parameter, to where it is updated."""
    for key, value in states.items():
        # Counters of steps are the host's, until fused kernels of the device want them.
        is_counter = isinstance(value, torch.Tensor) and not value.dim()
        if isinstance(value, torch.Tensor) and not (is_counter and place.type == "cuda"):
            with on_host() if place.type == "cpu" else nullcontext():
                states[key] = value.to(place)
