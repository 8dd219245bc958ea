"""Parameters that change after every wave, as Wavelet publishes it (Wang et al., MLSys 2021).

Each lane has parameters of its own. When a wave ends, the optimizer is called with the mean of its
gradients and those of the wave before, and the parameters of its lane become those after the
change. So a wave is computed with parameters that the other lane's wave, which ends while it runs,
has changed meanwhile: one change old. There are as many updates as waves, and results are not those
of accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hocket.base.errors import UsageError
from hocket.plan.sections.lanes import NUM_LANES
from hocket.runtime.offload.optimizer_parts import versions_of
from hocket.runtime.strategy import StepOutput
from hocket.runtime.streams import DeviceStream
from hocket.runtime.train.eager_step import Given
from hocket.runtime.train.loss_weight import Weight
from hocket.runtime.train.traced_model import Programs
from hocket.runtime.train.traced_step import RecordedStep
from hocket.runtime.train.waves import GradientSums, Wave, WaveOrder, Waves

Gradients = dict[str, torch.Tensor]


class BetweenWaves(Waves):
    """Carries waves whose ends change the parameters."""

    def __init__(self, programs: Programs, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
        self._optimizer: torch.optim.Optimizer | None = None
        self._changing: _Changes | None = None
        self._has_updated = False

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """The optimizer that every wave calls."""
        if optimizer is None:
            raise UsageError(
                "parameters that change after every wave leave no gradients to add up or to clip",
                hint="plan waves whose parameters change once per step (without --changes wave)",
            )
        self._optimizer = optimizer

    @property
    def has_updated(self) -> bool:
        """True if the last waves ran in lanes: those that could not wait for their update."""
        return self._has_updated

    def train(
        self, batches: Sequence[Any], step: int, weights: Sequence[Weight]
    ) -> list[StepOutput]:
        """Forward and backward of all microbatches, each with a change of its own."""
        self._has_updated = False
        return super().train(batches, step, weights)

    def carry(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        """The same, of waves whose tensors are there; the mean loss of each counts as a step's."""
        self._has_updated = True
        whole = sum(wave.weight for wave in waves)
        return super().carry([wave._replace(weight=whole) for wave in waves], step)

    def state(self) -> dict[str, Any]:
        """Parameters of each lane and gradients of the last wave; empty before the first step."""
        return {} if self._changing is None else self._changing.state()

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from these, or with the parameters as they are where there are none."""
        self._changing = None
        if state:
            self._changing = _Changes(self._programs)
            self._changing.take(state)

    def _sums(self) -> GradientSums:
        assert self._optimizer is not None, "it was expected"
        if self._changing is None:
            self._changing = _Changes(self._programs)
        self._changing.optimizer = self._optimizer
        self._changing.forget_what_others_changed()
        return self._changing


class _Changes(GradientSums):
    """Changes the parameters wave by wave; what it keeps outlasts steps."""

    optimizer: torch.optim.Optimizer

    def __init__(self, programs: Programs) -> None:
        super().__init__(programs.tensors)
        self._programs = programs
        self._own: list[Mapping[str, torch.Tensor] | None] = [None] * NUM_LANES
        """Parameters of each lane."""
        self._made: dict[int, Gradients] = {}
        self._before: Gradients = {}
        """Gradients of the wave before."""
        self._versions: list[int] = []
        """Of the parameters, after the last change."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold; empty where others have changed parameters meanwhile."""
        self.forget_what_others_changed()
        own = [dict(each) for each in self._own if each is not None]
        return {"own": own, "before": dict(self._before)} if len(own) == NUM_LANES else {}

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, with parameters as they were then."""
        self._own = [self._here(each) for each in state["own"]]
        self._before = self._here(state["before"])
        self._versions = self._versions_now()

    def _here(self, kept: Mapping[str, torch.Tensor]) -> Gradients:
        return {n: kept[n].to(self._tensors[n].device, copy=True) for n in kept}

    def forget_what_others_changed(self) -> None:
        """Lanes begin anew after other parameters were loaded, or after a step without lanes."""
        if self._versions != self._versions_now():
            self._own, self._before = [None] * NUM_LANES, {}

    def _versions_now(self) -> list[int]:
        return versions_of(self._tensors[name] for name in self._own[0] or ())

    def read_by(self, wave: int, recorded: RecordedStep, given: Given) -> Given:
        """The parameters of the wave's own lane in place of those that change meanwhile."""
        program, which = recorded.program, wave % NUM_LANES
        if self._own[which] is None:
            names = program.parameters
            self._own[which] = {name: self._tensors[name].detach().clone() for name in names}
        own = self._own[which]
        assert own is not None
        numbers = {number: name for name, number in program.parameters.items()}
        return [
            {at: own[numbers[at]] if at in numbers else tensor for at, tensor in here.items()}
            for here in given
        ]

    def add(self, name: str, wave: int, gradient: torch.Tensor, lane: DeviceStream) -> None:
        """A gradient is there; it waits for the others of its wave."""
        self._made.setdefault(wave, {})[name] = gradient

    @torch.no_grad()
    def end(self, wave: int) -> None:
        """Change the parameters, and give them to the lane of the wave that is over."""
        made = self._made.pop(wave, {})
        for name, gradient in made.items():
            before = self._before.get(name)
            mean = gradient if before is None else (before + gradient) / 2
            self._tensors[name].grad = mean.to(self._tensors[name].device)
        self._programs.update(self.optimizer)
        own = self._own[wave % NUM_LANES]
        assert own is not None, "the wave has begun"
        for name, copied in own.items():
            copied.copy_(self._tensors[name])
            self._tensors[name].grad = None
        self._before = made
        self._versions = self._versions_now()
