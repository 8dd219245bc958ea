"""The tensors of a person's model, each where the plan wants it, and still theirs.

Nothing is copied that is in the right place already: what a step writes is what the person's model
holds. A tensor that has to move takes all that look at its storage along, tied weights included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hocket.capture.fake import all_tensors
from hocket.capture.program import Program
from hocket.capture.record import layout_of
from hocket.capture.storage import look_at
from hocket.graph.graph import Role

_HELD_BY_MODEL = (Role.PARAMETER, Role.BUFFER)


class Homes:
    """Parameters, buffers and plain tensors of a model by name."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = {name: tensor for name, _, tensor in all_tensors(model, ())}

    def settle(
        self, program: Program, present: Sequence[Sequence[int]], devices: Sequence[torch.device]
    ) -> list[dict[int, torch.Tensor]]:
        """Per device of the plan, its tensors of the model; they share the model's memory."""
        homes: list[dict[int, torch.Tensor]] = []
        for device, numbers in zip(devices, present, strict=True):
            here: dict[int, torch.Tensor] = {}
            for number in numbers:
                if program.tensors[number].role in _HELD_BY_MODEL:
                    tensor = self.tensors[program.names[number]]
                    if tensor.device != device:
                        self._move(tensor, device)
                    here[number] = tensor.detach()
            homes.append(here)
        return homes

    def bring(self, device: torch.device) -> None:
        """Take everything to one device."""
        for tensor in self.tensors.values():
            if tensor.device != device:
                self._move(tensor, device)

    def _move(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Take a whole storage to another device, with everything that looks at it."""
        storage = tensor.untyped_storage()
        everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        arrived = everything.to(device)
        for other in self.tensors.values():
            if other.untyped_storage()._cdata == storage._cdata:
                other.data = look_at(arrived, layout_of(other))

    def addresses(self) -> list[int]:
        """Where every tensor is now; a step recorded with others has to be settled again."""
        return [tensor.data_ptr() for tensor in self.tensors.values()]
