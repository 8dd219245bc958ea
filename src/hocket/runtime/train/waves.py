"""Microbatches in two lanes: the calls of recorded steps in turns, in the order of a plan.

Every wave is a recorded step with slots of its own; parameters and buffers are the same. Calls are
asked for one by one in the order in which the simulator saw them start, so that no more is held
than planned; a CUDA graph makes two lanes of them (`replayed_waves`). Gradients are added as soon
as they are there, in the order of the waves, and numbers are drawn in that order: the result is
that of accumulation, to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from hocket.graph.graph import Graph, Phase
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes, Parallel
from hocket.plan.sections.lanes import NUM_LANES, Changes
from hocket.planners.waves.waiting import by_start
from hocket.runtime.setup import Setup
from hocket.runtime.strategy import StepOutput
from hocket.runtime.streams import DeviceStream
from hocket.runtime.train.cuda_graphs import called, never_replayed
from hocket.runtime.train.eager_step import EagerStep, Given
from hocket.runtime.train.loss_weight import Weight
from hocket.runtime.train.traced_model import Programs
from hocket.runtime.train.traced_step import RecordedStep
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.parallel.lanes import lane_waits, pass_order

# Ops of a wave that count where a recording is matched with the graph of a plan.
#
# Views do not: which of them there are depends on how parameters lie in memory. cuDNN's layers look
# at all their weights as one buffer where these lie in one storage, as they do on the device, and
# not where they are separate. A view does nothing and makes nothing, so it is carried out with the
# op before it, or those before all with the first. O(ops).


@lru_cache(maxsize=64)
def counted_ops(graph: Graph) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Ops of a forward and backward pass that are no views, in order, each with all that is carried
    out in its place."""
    found: list[tuple[int, list[int]]] = []
    early: list[int] = []
    for op in pass_order(graph).tolist():
        if not graph.only_looks[op]:
            found.append((op, [*early, op]))
            early = []
        elif found:
            found[-1][1].append(op)
        else:
            early.append(op)
    return tuple((op, tuple(calls)) for op, calls in found)


WaveOp = tuple[int, int]
"""A microbatch and an op of its graph."""


class WaveWarning(UserWarning):
    """Waves are not carried out in two lanes."""


class WaveOrder(NamedTuple):
    """In which order the ops of all waves are asked for."""

    sequence: tuple[WaveOp, ...]
    waits: Mapping[WaveOp, tuple[WaveOp, ...]]
    """What an op waits for in the other lane so that results are those of accumulation."""
    ops: tuple[int, ...]
    """Those of a wave that are no views, in its order."""
    slabs: tuple[int, ...] = (0,)
    """Bytes of the memory of both lanes, or of each lane's own and of parts; 0 where none is
    planned."""
    changes: Changes = "step"
    """After what parameters change."""
    places: tuple[Mapping[int, int], ...] = ()
    """Per lane, the slab of what an op makes; the first where it is not told."""

    def slab_of(self, lane: int, op: int) -> int:
        """Where what an op makes lies."""
        return self.places[lane][op] if self.places else 0


def wave_order(problem: Problem, shares: Parallel, lanes: Lanes, replica: int = 0) -> WaveOrder:
    """The order of a plan, of the waves of one replica; views come with the op before them."""
    unfolded, timeline = simulate_parallel(problem, shares, None, lanes)
    passes = unfolded.passes[replica]
    looks = problem.graph.only_looks
    waits: dict[WaveOp, tuple[WaveOp, ...]] = {}
    # Waits for room are kept by the order: memory is given out in it, whatever runs beside what.
    needed = replace(lanes, lead=0, waits=())
    for wait in lane_waits(problem.graph, needed, len(passes)):
        key = wait.wave, wait.op
        waits[key] = (*waits.get(key, ()), (wait.on_wave, wait.on_op))
    sequence = (at for at in by_start(passes, timeline) if not looks[at[1]])
    ops = tuple(op for op, _ in counted_ops(problem.graph))
    return WaveOrder(
        tuple(sequence), waits, ops, lanes.slabs, lanes.changes, _places(problem, lanes)
    )


def _places(problem: Problem, lanes: Lanes) -> tuple[Mapping[int, int], ...]:
    if not lanes.own_bytes:
        return ()
    order = pass_order(problem.graph).tolist()
    own = [[lane] * len(order) for lane in range(NUM_LANES)]
    return tuple(dict(zip(order, row, strict=True)) for row in lanes.places or own)


class Wave(NamedTuple):
    """A microbatch that is to be carried."""

    recorded: RecordedStep
    given: Given
    """What is there before it."""
    weight: Weight


class WaveStep(EagerStep):
    """One wave: a recorded step whose calls are asked for op by op of a plan."""

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        calls_of: Mapping[int, Sequence[int]],
        *,
        keep: frozenset[int],
    ) -> None:
        """``calls_of`` has the calls of the recording that an op of the plan stands for."""
        super().__init__(setup, device, seed=None, keep=keep)
        act_of = {act.op: act for part in self._parts for act in part}
        self._acts_of = {op: [act_of[call] for call in calls] for op, calls in calls_of.items()}
        op_of = {call: op for op, calls in calls_of.items() for call in calls}
        self.made_at: dict[int, list[tuple[int, int]]] = {}
        """By op: parameters and their gradients that nothing but an update needs after it."""
        for parameter, gradient in setup.program.gradients.items():
            users = setup.graph.users_of(gradient).tolist()
            calls = setup.program.calls
            last = max(
                (op for op in users if calls[op].phase != Phase.OPTIMIZER),
                default=setup.program.tensors[gradient].producer,
            )
            self.made_at.setdefault(op_of[last], []).append((parameter, gradient))

    def begin(self, given: Given, step: int, weight: Weight) -> None:
        """Start a wave from the tensors that are there before, with what its loss counts."""
        self.fill(given, step)
        self._weight = weight

    def run_op(self, op: int) -> None:
        """An op of the plan and what it makes free; under `as_recorded`."""
        for act in self._acts_of[op]:
            self._perform(act)

    def take(self, gradient: int) -> torch.Tensor:
        """A gradient, which the wave forgets."""
        found = self.value(gradient)
        for slots in self._slots:
            slots[gradient] = None
        return found


class Waves:
    """Carries the microbatches of a step in two lanes of a device."""

    def __init__(self, programs: Programs, order: WaveOrder, device: torch.device) -> None:
        self._programs, self._order, self._device = programs, order, device
        self._lanes = [DeviceStream(device) for _ in range(NUM_LANES)]
        self._awaited = {awaited for waits in order.waits.values() for awaited in waits}
        self._first = {wave: op for wave, op in reversed(order.sequence)}
        self._last = dict(order.sequence)
        self._steps: dict[tuple[int, int], WaveStep] = {}
        self._has_warned = False

    def train(
        self, batches: Sequence[Any], step: int, weights: Sequence[Weight]
    ) -> list[StepOutput]:
        """Forward and backward of all microbatches; their gradients are added to the parameters."""
        found = [self._programs.find("train", batch) for batch in batches]
        counts = {len(counted_ops(recorded.setup.graph)) for recorded, _ in found}
        if counts != {len(self._order.ops)}:
            self._warn(max(counts))
            return [
                self._programs.train(batch, step, weight)
                for batch, weight in zip(batches, weights, strict=True)
            ]
        waves = [
            Wave(recorded, [dict(here) for here in self._programs.given(recorded, batch)], weight)
            for (recorded, batch), weight in zip(found, weights, strict=True)
        ]
        return self.carry(waves, step)

    def carry(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        """The same, of waves whose tensors are there."""
        sums = self._sums()
        events: dict[WaveOp, Any] = {}
        outcomes: dict[int, StepOutput] = {}
        with self._step(waves[0].recorded, 0).as_recorded():
            for at in self._order.sequence:
                wave, op = at
                recorded, given, weight = waves[wave]
                lane = self._lanes[wave % NUM_LANES]
                self._begin(wave % NUM_LANES, op)
                own = self._step(recorded, wave)
                if self._first[wave] == op:
                    own.begin(sums.read_by(wave, recorded, given), step, weight)
                for awaited in self._order.waits.get(at, ()):
                    lane.wait(events[awaited])
                self._run(own, op, wave % NUM_LANES)
                if at in self._awaited:
                    events[at] = lane.event()
                for parameter, gradient in own.made_at.get(op, ()):
                    name = recorded.program.names[parameter]
                    sums.add(name, wave, own.take(gradient), lane)
                if self._last[wave] == op:
                    outcomes[wave] = _outcome(recorded, own)
                    sums.end(wave)
        return [outcomes[wave] for wave in range(len(waves))]

    def _begin(self, lane: int, op: int) -> None:
        self._lanes[lane].make_current()

    def _run(self, own: WaveStep, op: int, lane: int) -> None:
        own.run_op(op)

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Updates wait for all waves."""

    @property
    def replays(self) -> str:
        """How waves are launched; see `TellsReplay`."""
        if self._order.changes == "wave":
            return called("parameters change after every wave")
        return never_replayed(self._device)

    @property
    def has_updated(self) -> bool:
        """True if the optimizer has used the gradients of the waves that were carried."""
        return False

    def state(self) -> dict[str, Any]:
        """What lanes keep from step to step: nothing, where parameters change once per step."""
        return {}

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from what lanes kept."""

    def _sums(self) -> GradientSums:
        return GradientSums(self._programs.tensors)

    def _step(self, recorded: RecordedStep, wave: int) -> WaveStep:
        key = id(recorded), wave % NUM_LANES
        if key not in self._steps:
            calls = (calls for _, calls in counted_ops(recorded.setup.graph))
            calls_of = dict(zip(self._order.ops, calls, strict=True))
            self._steps[key] = WaveStep(recorded.setup, self._device, calls_of, keep=recorded.keep)
        return self._steps[key]

    def _warn(self, num_ops: int) -> None:
        if not self._has_warned:
            warnings.warn(
                f"a microbatch has {num_ops} ops without views where the plan's graph has "
                f"{len(self._order.ops)}: its waves run one after the other, with the same numbers",
                WaveWarning,
                5,
            )
        self._has_warned = True


class GradientSums:
    """Adds gradients to those of the parameters in the order of the waves."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._early: dict[tuple[str, int], tuple[torch.Tensor, Any]] = {}
        """By parameter and wave: gradients that wait for those of an earlier wave."""
        self._num_added: dict[str, int] = {}
        self._added: dict[str, Any] = {}

    @torch.no_grad()
    def add(self, name: str, wave: int, gradient: torch.Tensor, lane: DeviceStream) -> None:
        """A gradient is there; what can be added by now is added in this lane."""
        self._early[name, wave] = gradient, lane.event()
        parameter = self._tensors[name]
        while (found := self._early.pop((name, self._num_added.get(name, 0)), None)) is not None:
            gradient, made = found
            lane.wait(made)
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.device)
            else:
                lane.wait(self._added.get(name))
                parameter.grad.add_(gradient.to(parameter.device))
            self._added[name] = lane.event()
            self._num_added[name] = self._num_added.get(name, 0) + 1

    def read_by(self, wave: int, recorded: RecordedStep, given: Given) -> Given:
        """What a wave that begins reads: parameters as they are."""
        return given

    def end(self, wave: int) -> None:
        """A wave is over."""


def _outcome(recorded: RecordedStep, own: WaveStep) -> StepOutput:
    """Loss and outputs of a wave that is over; nothing stays behind."""
    loss = own.value(recorded.program.outputs[0]).detach()
    returned = recorded.returned(own)
    own.forget()
    return StepOutput(loss, returned)
