"""The first run of a traced step, which is undone where one of its ops fails.

Fake tensors may have other strides than what a kernel makes, so that a recorded view does not hold
for the real tensor. The model itself then computes the step, from the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hocket.capture.perform import generator_of
from hocket.capture.program import Program


class StateBefore:
    """What a step may change before it fails: the generator, and tensors that it writes."""

    def __init__(
        self, program: Program, given: Sequence[Mapping[int, torch.Tensor]], device: torch.device
    ) -> None:
        self._device = device
        self._drawn = generator_of(device).get_state()
        written = {program.tensors[t].storage for call in program.calls for t in call.targets}
        self._tensors = [
            (tensor, tensor.clone())
            for tensors in given
            for number, tensor in tensors.items()
            if program.tensors[number].storage in written
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Have all of it be as it was."""
        generator_of(self._device).set_state(self._drawn)
        for tensor, before in self._tensors:
            tensor.copy_(before)
