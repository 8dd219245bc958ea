"""Op placement across ranks: each rank runs the ops of one device of a traced step.

All ranks run the same script and trace the same program. Every rank gets losses and outputs.
Gradients stay on the rank whose device has the parameter, where the user's optimizer applies them;
on other ranks the parameter has no gradient, and the optimizer skips it.

Torch's engines have no op placement: its pipelining cuts a model between modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from hocket.runtime.ranked_step import RankedStep
from hocket.runtime.step_record import StepRecord
from hocket.runtime.strategies.parallel_state import ParallelState, TensorOwner
from hocket.runtime.strategies.traced import TracedModel
from hocket.runtime.strategy import TrainingTask
from hocket.runtime.traced_step import PlacedProgram


class RankedModel(TracedModel):
    """Strategy of one rank that runs the ops of one device; see `HoldsParts`."""

    is_ranked = True
    computed_s: float | None = None

    def __init__(self, task: TrainingTask, placed: PlacedProgram) -> None:
        super().__init__(task, placed)
        runner = self.first.runner
        assert isinstance(runner, RankedStep)
        self._runner = runner
        numbers = {name: number for number, name in placed.program.names.items()}
        self._owner_of = {
            id(tensor): runner.owner(numbers[name])
            for name, tensor in self.tensors.items() if name in numbers
        }  # fmt: skip
        self._state = ParallelState(task.model, self._owner, task.device)

    @property
    def record(self) -> StepRecord | None:
        """Times of the last step on this rank's device."""
        return self._runner.record

    def clip(self, max_norm: float) -> None:
        """Clip gradients by their norm over all ranks, with the same bits as in one process.

        Each rank contributes the norms of its gradients; the common norm is computed from all of
        them in the order of the parameters.
        """
        parameters = self._parameters
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
        norms = torch.zeros(2, len(parameters), device=self._runner.device, dtype=dtype)
        own = []
        for at, parameter in enumerate(parameters):
            if parameter.grad is not None:
                own.append(parameter)
                norms[0, at], norms[1, at] = 1, torch.linalg.vector_norm(parameter.grad)
        dist.all_reduce(norms)
        total = torch.linalg.vector_norm(norms[1][norms[0] > 0])
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, total)

    def gathered(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """Return the state as one process would have it, on every rank."""
        return self._state.gathered(optimizer, pending=pending)

    def parts(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """Return the part of the state that this rank writes to a sharded checkpoint."""
        return self._state.parts(optimizer, pending=pending)

    def take(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load a state."""
        self._state.take(state, optimizer)

    def _owner(self, tensor: torch.Tensor) -> TensorOwner:
        # A tensor that the traced step does not use is the same on all ranks.
        owner = self._owner_of.get(id(tensor), 0)
        return TensorOwner((owner,), None, is_here=True, is_updated=owner == dist.get_rank())
