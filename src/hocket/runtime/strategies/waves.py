"""Wavelet: runs microbatches in waves on two streams, with their ops in planned order.

Every wave is a traced step with slots of its own; parameters and buffers are shared. Calls are
launched in the order in which the simulator started them: eagerly on one stream, so that no more
memory is held than planned, or captured on two streams of one CUDA graph, which then overlap.
Gradients are summed as soon as they are computed, in the order of the waves, and random numbers are
drawn in that order: the result equals gradient accumulation bit for bit. With updates after every
wave, as Wavelet publishes it, results differ from accumulation.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from hocket.base.errors import UsageError
from hocket.graph.graph import Graph, Phase
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Waves
from hocket.plan.sections.waves import NUM_STREAMS, Changes
from hocket.planners.waves.wave_candidate import wave_sequence
from hocket.runtime.device_instructions import Setup
from hocket.runtime.eager_step import EagerStep, Given, StaticInputs
from hocket.runtime.optimizer_parts import versions_of
from hocket.runtime.placed_step import CudaStream, DeviceStream
from hocket.runtime.replay import GraphReplay, cloned, eager, never_replayed
from hocket.runtime.strategies.traced import TracedModel
from hocket.runtime.strategy import StepOutput
from hocket.runtime.trace_options import Weight
from hocket.runtime.traced_step import TracedStep
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.parallel.wave_streams import WaveOp, pass_order, stream_memory


@lru_cache(maxsize=64)
def counted_ops(graph: Graph) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the ops of forward and backward that are no views, each with the calls to run for it.

    Views depend on the memory layout of parameters: cuDNN's layers view all their weights as one
    buffer if they share a storage, as they do on the device. So a traced step is matched with a
    plan's graph by ops that are no views, and a view runs with the op before it. O(ops).
    """
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


Gradients = dict[str, torch.Tensor]


class WaveWarning(UserWarning):
    """Waves run one after the other instead of interleaved."""


class WaveOrder(NamedTuple):
    """Order in which the ops of all waves are called."""

    sequence: tuple[WaveOp, ...]
    waits: Mapping[WaveOp, WaveOp]
    """For an op, the op of the other stream that it waits for, so that results equal
    accumulation."""
    ops: tuple[int, ...]
    """Ops of a wave that are no views, in their order."""
    changes: Changes = "step"
    """When parameters change: after a step, or after every wave."""
    stream_bytes: tuple[int, ...] = (0,) * NUM_STREAMS
    """Predicted peak memory of each stream."""


def wave_order(problem: Problem, parallel: Parallel, waves: Waves, replica: int = 0) -> WaveOrder:
    """Return the planned order of the waves of one replica; views follow the op before them."""
    step, timeline = simulate_parallel(problem, parallel, None, waves)
    found = wave_sequence(problem.graph, step.passes[replica], timeline)
    ops = tuple(op for op, _ in counted_ops(problem.graph))
    memory = stream_memory(step, timeline)
    stream_bytes = tuple(map(memory.peak_bytes, range(NUM_STREAMS)))
    return WaveOrder(found.ops, found.waits, ops, waves.changes, stream_bytes)


class Wave(NamedTuple):
    """A microbatch to run, with its traced step."""

    recorded: TracedStep
    given: Given
    """Tensors that exist before the wave."""
    weight: Weight


class WaveStep(EagerStep):
    """One wave: a traced step that is called op by op in the order of a plan."""

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        calls_of: Mapping[int, Sequence[int]],
        *,
        keep: frozenset[int],
    ) -> None:
        """``calls_of`` maps ops of the plan to calls of the traced step."""
        super().__init__(setup, device, seed=None, keep=keep)
        bound = {each.op: each for part in self._parts for each in part}
        self._bound_of = {op: [bound[call] for call in calls] for op, calls in calls_of.items()}
        op_of = {call: op for op, calls in calls_of.items() for call in calls}
        self.made_at: dict[int, list[tuple[int, int]]] = {}
        """For each op, parameters and gradients that only an update needs after the op."""
        for parameter, gradient in setup.program.gradients.items():
            users = setup.graph.users_of(gradient).tolist()
            calls = setup.program.calls
            last = max(
                (op for op in users if calls[op].phase != Phase.OPTIMIZER),
                default=setup.program.tensors[gradient].producer,
            )
            self.made_at.setdefault(op_of[last], []).append((parameter, gradient))

    def begin(self, given: Given, step: int, weight: Weight) -> None:
        """Start a wave from tensors that exist before it, with the weight of its loss."""
        self.fill(given, step)
        self.weight = weight

    def run_op(self, op: int) -> None:
        """Run an op of the plan, then clear slots; the caller has entered `as_traced`."""
        for do, call, drops in self._bound_of[op]:
            self.perform(do, call, drops, self.draw)

    def take(self, gradient: int) -> torch.Tensor:
        """Return a gradient, and remove it from the wave."""
        found, self.slots[gradient] = self.value(gradient), None
        return found


class WaveRunner:
    """Runs the microbatches of a step in waves, call by call on one stream."""

    def __init__(self, programs: TracedModel, order: WaveOrder, device: torch.device) -> None:
        self._programs, self._order, self._device = programs, order, device
        self._streams: Sequence[DeviceStream] = [DeviceStream(device) for _ in range(NUM_STREAMS)]
        self._awaited = set(order.waits.values())
        self._first = {wave: op for wave, op in reversed(order.sequence)}
        self._last = {wave: op for wave, op in order.sequence}
        self._steps: dict[tuple[int, int], WaveStep] = {}
        self._has_warned = False

    def train(
        self, batches: Sequence[Any], step: int, weights: Sequence[Weight]
    ) -> list[StepOutput]:
        """Run forward and backward of all microbatches; add up their gradients."""
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
        return self.run(waves, step)

    def run(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        """Run waves, whose tensors are ready, in planned order."""
        sums = self._sums()
        events: dict[WaveOp, Any] = {}
        outputs: dict[int, StepOutput] = {}
        with self._step(waves[0].recorded, 0).as_traced():
            for at in self._order.sequence:
                wave, op = at
                recorded, given, weight = waves[wave]
                stream = self._streams[wave % NUM_STREAMS]
                stream.make_current()
                own = self._step(recorded, wave)
                if self._first[wave] == op:
                    own.begin(sums.read_by(wave, recorded, given), step, weight)
                if at in self._order.waits:
                    stream.wait(events[self._order.waits[at]])
                own.run_op(op)
                for parameter, gradient in own.made_at.get(op, ()):
                    name = recorded.program.names[parameter]
                    sums.add(name, wave, own.take(gradient), stream)
                if at in self._awaited:
                    # After the sums, so that ops that wait for this one may add to them.
                    events[at] = stream.event()
                if self._last[wave] == op:
                    outputs[wave] = _output(recorded, own)
                    sums.end(wave)
        return [outputs[wave] for wave in range(len(waves))]

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Ignore the optimizer: updates run after all waves."""

    @property
    def replays(self) -> str:
        """Describe how waves are launched; see `ReportsReplay`."""
        if self._order.changes == "wave":
            return eager("parameters change after every wave")
        return never_replayed(self._device)

    @property
    def has_updated(self) -> bool:
        """True if the optimizer has already used the gradients of the waves."""
        return False

    def state(self) -> dict[str, Any]:
        """Return the state to save between steps: none, because parameters change once per step."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""

    def _sums(self) -> GradientSums:
        return GradientSums(self._programs.tensors)

    def _step(self, recorded: TracedStep, wave: int) -> WaveStep:
        key = id(recorded), wave % NUM_STREAMS
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
    """Adds gradients to ``parameter.grad`` in the order of the waves."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._early: dict[tuple[str, int], tuple[torch.Tensor, DeviceStream]] = {}
        """Gradients that wait for an earlier wave, by parameter and wave."""
        self._num_added: dict[str, int] = {}
        self._added: dict[str, Any] = {}

    @torch.no_grad()
    def add(self, name: str, wave: int, gradient: torch.Tensor, stream: DeviceStream) -> None:
        """Add a gradient, and gradients of later waves that waited for it.

        Each is added on the stream that computed it: its memory can be reused only on that stream,
        and so not before the sum has read it.
        """
        self._early[name, wave] = gradient, stream
        parameter = self._tensors[name]
        while (found := self._early.pop((name, self._num_added.get(name, 0)), None)) is not None:
            gradient, own = found
            own.make_current()
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.device)
            else:
                own.wait(self._added.get(name))
                parameter.grad.add_(gradient.to(parameter.device))
            self._added[name] = own.event()
            self._num_added[name] = self._num_added.get(name, 0) + 1
        stream.make_current()

    def read_by(self, wave: int, recorded: TracedStep, given: Given) -> Given:
        """Return the tensors that a wave reads: the parameters themselves, in this class."""
        return given

    def end(self, wave: int) -> None:
        """Handle the end of a wave."""


def _output(recorded: TracedStep, own: WaveStep) -> StepOutput:
    """Return loss and outputs of a finished wave, and drop its tensors."""
    loss = own.value(recorded.program.outputs[0]).detach()
    returned = recorded.returned(own)
    own.forget()
    return StepOutput(loss, returned)


# ── two streams of one CUDA graph ────────────────────────────────────────────────────────────────
#
# Two streams of small kernels leave a device idle while the host issues them one by one; a graph
# has both before it starts. Libraries keep their workspaces per stream, so streams share none.


class _Event(NamedTuple):
    """A CUDA event, numbered on its stream."""

    stream: _WaveStream
    number: int
    recorded: torch.cuda.Event


class _WaveStream(CudaStream):
    """A CUDA stream that omits waits implied by an earlier wait.

    Each wait is an edge of the captured graph and adds about 8 us to a replay.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._num_events, self._passed = 0, 0

    def restart(self) -> None:
        """Forget earlier waits, which are in the graph of another step."""
        self._passed = 0

    def event(self) -> Any:
        """Record an event after all work queued so far."""
        self._num_events += 1
        return _Event(self, self._num_events, super().event())

    def wait(self, event: Any) -> None:
        """Wait for an event of the other stream, unless the stream waited for a later one."""
        if event is None or event.stream is self or event.number <= self._passed:
            return
        self._passed = event.number
        super().wait(event.recorded)


class _CapturedWaves(NamedTuple):
    """A CUDA graph of all waves, with its inputs and results."""

    graph: torch.cuda.CUDAGraph
    inputs: list[StaticInputs]
    scales: list[torch.Tensor]
    outputs: list[StepOutput]
    gradients: dict[str, torch.Tensor]


class CapturedWaveRunner(WaveRunner):
    """Waves on two streams of one CUDA device, replayed as one graph."""

    def __init__(self, programs: TracedModel, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
        self._pair = [_WaveStream(device) for _ in range(NUM_STREAMS)]
        self._streams = self._pair
        self.replay: GraphReplay[_CapturedWaves] = GraphReplay()

    def run(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        """Run forward and backward of all waves, by replay unless gradients exist before the
        step."""
        tensors = self._programs.tensors.values()
        found = None
        if all(tensor.grad is None for tensor in tensors):
            origin = (*(w.recorded for w in waves), *(tensor.data_ptr() for tensor in tensors))
            found = self.replay.find(origin, lambda: self._capture(waves, step))
        if found is None:
            with self._forked(torch.cuda.current_stream(self._device)):
                return super().run(waves, step)
        for inputs, scale, wave in zip(found.inputs, found.scales, waves, strict=True):
            inputs.refill(wave.given)
            scale.fill_(wave.weight)
        found.graph.replay()
        for name, gradient in found.gradients.items():
            self._programs.tensors[name].grad = gradient
        return [StepOutput(each.loss.clone(), cloned(each.outputs)) for each in found.outputs]

    @property
    def replays(self) -> str:
        """Describe how waves are launched; see `ReportsReplay`."""
        return self.replay.message

    @contextmanager
    def _forked(self, here: torch.cuda.Stream) -> Iterator[None]:
        """Fork both streams from one, and join them at the end."""
        for each in self._pair:
            each.restart()
            each.stream.wait_stream(here)
        try:
            with torch.cuda.stream(here):
                yield
        finally:
            torch.cuda.set_stream(here)
            for each in self._pair:
                here.wait_stream(each.stream)

    def _capture(self, waves: Sequence[Wave], step: int) -> _CapturedWaves:
        inputs = [StaticInputs(wave.recorded.program, wave.given) for wave in waves]
        scales = [torch.ones((), device=self._device) for _ in waves]
        static = [
            Wave(wave.recorded, read.within(wave.given), scale)
            for wave, read, scale in zip(waves, inputs, scales, strict=True)
        ]
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        tensors = self._programs.tensors
        try:
            with (
                torch.cuda.graph(graph),
                self._forked(torch.cuda.current_stream(self._device)),
            ):
                for each, size in zip(self._pair, self._order.stream_bytes, strict=True):
                    # Freed at once: later blocks are cut from one segment, so that rounding of
                    # segments (20 MiB for blocks of 1 to 10 MiB) is lost once and not each time.
                    each.make_current()
                    torch.empty(size, dtype=torch.uint8, device=self._device)
                outputs = super().run(static, step)
            gradients = {name: t.grad for name, t in tensors.items() if t.grad is not None}
            return _CapturedWaves(graph, inputs, scales, outputs, gradients)
        finally:
            for tensor in tensors.values():
                tensor.grad = None


# ── parameters that change after every wave ──────────────────────────────────────────────────────
#
# As Wavelet publishes it: when a wave ends, the optimizer is called with the mean of its gradients
# and those of the wave before, and the parameters of its stream become those after the update. So a
# wave is computed with parameters that the other stream's wave has changed meanwhile.


class UpdatingWaveRunner(WaveRunner):
    """Runs waves that each end with an update of the parameters."""

    def __init__(self, programs: TracedModel, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
        self._optimizer: torch.optim.Optimizer | None = None
        self._updates: _WaveUpdates | None = None
        self._has_updated = False

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Set the optimizer that runs at the end of every wave."""
        if optimizer is None:
            raise UsageError(
                "parameters that change after every wave leave no gradients to add up or to clip",
                hint="plan waves whose parameters change once per step (without --changes wave)",
            )
        self._optimizer = optimizer

    @property
    def has_updated(self) -> bool:
        """True if each of the last waves has updated; False if the update has yet to run."""
        return self._has_updated

    def train(
        self, batches: Sequence[Any], step: int, weights: Sequence[Weight]
    ) -> list[StepOutput]:
        """Run forward and backward of all microbatches, each followed by an update."""
        self._has_updated = False
        return super().train(batches, step, weights)

    def run(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        """Run waves, whose tensors are ready; each wave's loss gets the weight of an entire
        step."""
        self._has_updated = True
        whole = sum(wave.weight for wave in waves)
        return super().run([wave._replace(weight=whole) for wave in waves], step)

    def state(self) -> dict[str, Any]:
        """Return each stream's parameters and the last wave's gradients; empty before the first
        step."""
        return {} if self._updates is None else self._updates.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, or with the current parameters if it is empty."""
        self._updates = None
        if state:
            self._updates = _WaveUpdates(self._programs)
            self._updates.load_state(state)

    def _sums(self) -> GradientSums:
        assert self._optimizer is not None, "it was expected"
        if self._updates is None:
            self._updates = _WaveUpdates(self._programs)
        self._updates.optimizer = self._optimizer
        self._updates.drop_if_changed()
        return self._updates


class _WaveUpdates(GradientSums):
    """Updates the parameters after every wave; its state is kept between steps."""

    optimizer: torch.optim.Optimizer

    def __init__(self, programs: TracedModel) -> None:
        super().__init__(programs.tensors)
        self._programs = programs
        self._own: list[Mapping[str, torch.Tensor] | None] = [None] * NUM_STREAMS
        """Copy of the parameters for each stream."""
        self._made: dict[int, Gradients] = {}
        self._before: Gradients = {}
        """Gradients of the previous wave."""
        self._versions: list[int] = []
        """Version counters of the parameters after the last update."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty if other code has changed the parameters."""
        self.drop_if_changed()
        own = [dict(each) for each in self._own if each is not None]
        return {"own": own, "before": dict(self._before)} if len(own) == NUM_STREAMS else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; the parameters must be the ones saved with it."""
        self._own = [self._on_device(each) for each in state["own"]]
        self._before = self._on_device(state["before"])
        self._versions = self._versions_now()

    def _on_device(self, saved: Mapping[str, torch.Tensor]) -> Gradients:
        return {n: saved[n].to(self._tensors[n].device, copy=True) for n in saved}

    def drop_if_changed(self) -> None:
        """Drop the state if parameters were loaded, or changed by a step without waves."""
        if self._versions != self._versions_now():
            self._own, self._before = [None] * NUM_STREAMS, {}

    def _versions_now(self) -> list[int]:
        return versions_of(self._tensors[name] for name in self._own[0] or ())

    def read_by(self, wave: int, recorded: TracedStep, given: Given) -> Given:
        """Return the tensors of a wave, with the parameters of its stream in place of the
        model's."""
        program, which = recorded.program, wave % NUM_STREAMS
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

    def add(self, name: str, wave: int, gradient: torch.Tensor, stream: DeviceStream) -> None:
        """Hold a gradient until its wave has ended."""
        self._made.setdefault(wave, {})[name] = gradient

    @torch.no_grad()
    def end(self, wave: int) -> None:
        """Update the parameters by the mean gradients of this wave and the previous one.

        The stream of the wave then gets a copy of the updated parameters.
        """
        made = self._made.pop(wave, {})
        for name, gradient in made.items():
            before = self._before.get(name)
            mean = gradient if before is None else (before + gradient) / 2
            self._tensors[name].grad = mean.to(self._tensors[name].device)
        self._programs.update(self.optimizer)
        own = self._own[wave % NUM_STREAMS]
        assert own is not None, "the wave has begun"
        for name, copied in own.items():
            copied.copy_(self._tensors[name])
            self._tensors[name].grad = None
        self._before = made
        self._versions = self._versions_now()


def make_waves(programs: TracedModel, order: WaveOrder, device: torch.device) -> WaveRunner:
    """Return the runner of waves on a device, with CUDA graph replay if steps are to be
    replayed."""
    if order.changes == "wave":
        return UpdatingWaveRunner(programs, order, device)
    replayed = programs.replay and device.type == "cuda"
    return (CapturedWaveRunner if replayed else WaveRunner)(programs, order, device)
