"""Wavelet: runs microbatches in waves on two streams, with their ops in planned order.

A wave is the run of one microbatch through the traced step. Waves have separate activations, and
share parameters and buffers. Ops are launched in the order in which the simulator started them:
eagerly on one stream, so that no more memory is held than planned, or captured on two streams of
one CUDA graph, where they overlap. Gradients are summed as soon as they are computed, in the order
of the waves, and random numbers are drawn in that order. The result therefore equals gradient
accumulation bit for bit.

With an update after every wave, as Wavelet publishes it, results differ from accumulation. With
several replicas, gradients are summed over replicas: bucket by bucket once the last wave has added
to them, or after every wave that ends with an update. Torch has no engine that interleaves two
microbatches op by op on one device.
"""

from __future__ import annotations

import warnings
from collections import Counter
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
from hocket.runtime.collectives.gradient_reducer import GradientReducer
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

Gradients = dict[str, torch.Tensor]


@lru_cache(maxsize=64)
def counted_ops(graph: Graph) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the non-view ops of forward and backward, each with the calls to run for it.

    A traced step is matched with a plan's graph by non-view ops, because the views in a step depend
    on the memory layout of parameters: cuDNN's recurrent layers view all their weights as one
    buffer if the weights share a storage. A view is run together with the op before it. O(ops).
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


class WaveWarning(UserWarning):
    """Waves run one after the other instead of interleaved."""


class WaveOrder(NamedTuple):
    """Order in which the ops of all waves are launched."""

    sequence: tuple[WaveOp, ...]
    waits: Mapping[WaveOp, WaveOp]
    """For some ops, the op of the other stream to wait for, so that results equal accumulation."""
    ops: tuple[int, ...]
    """Non-view ops of a wave, in execution order."""
    changes: Changes = "step"
    """When parameters change: after a step, or after every wave."""
    stream_bytes: tuple[int, ...] = (0,) * NUM_STREAMS
    """Predicted peak memory of each stream."""


def wave_order(problem: Problem, parallel: Parallel, waves: Waves, replica: int = 0) -> WaveOrder:
    """Return the planned order of the waves of one replica."""
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
    """A traced step that is run op by op in the order of a plan."""

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
        """By op: parameters whose gradients are final after the op, with these gradients."""
        for parameter, gradient in setup.program.gradients.items():
            users = setup.graph.users_of(gradient).tolist()
            calls = setup.program.calls
            last = max(
                (op for op in users if calls[op].phase != Phase.OPTIMIZER),
                default=setup.program.tensors[gradient].producer,
            )
            self.made_at.setdefault(op_of[last], []).append((parameter, gradient))

    def run_op(self, op: int) -> None:
        """Run an op of the plan, then clear slots; the caller has entered `as_traced`."""
        for do, call, drops in self._bound_of[op]:
            self.perform(do, call, drops, self.draw)

    def take(self, gradient: int) -> torch.Tensor:
        """Return a gradient, and remove it from the wave."""
        found, self.slots[gradient] = self.value(gradient), None
        return found


class WaveRunner:
    """Runs the microbatches of a step in waves, op by op on one stream."""

    has_updated = False
    """True if the optimizer has already stepped with the gradients of the last step."""

    def __init__(self, programs: TracedModel, order: WaveOrder, device: torch.device) -> None:
        self._programs, self._order, self._device = programs, order, device
        self.reducer: GradientReducer | None = None
        """Sums gradients over replicas, if there are several."""
        self._streams: Sequence[DeviceStream] = [DeviceStream(device) for _ in range(NUM_STREAMS)]
        self._awaited = set(order.waits.values())
        # Pairs of (wave, op): the last pair of a key wins, hence the reversal for the first op.
        self._first = dict(reversed(order.sequence))
        self._last = dict(order.sequence)
        self._steps: dict[tuple[int, int], WaveStep] = {}
        self._early: dict[tuple[str, int], tuple[torch.Tensor, DeviceStream]] = {}
        """Gradients that wait for an earlier wave, by parameter and wave."""
        self._num_added: Counter[str] = Counter()
        self._added: dict[str, Any] = {}
        """Event after the last sum of each parameter's gradient."""
        self._has_warned = False

    def train(
        self, batches: Sequence[Any], step: int, weights: Sequence[Weight]
    ) -> list[StepOutput]:
        """Run forward and backward of all microbatches; add up their gradients."""
        found = [self._programs.find("train", batch) for batch in batches]
        counts = {len(counted_ops(recorded.setup.graph)) for recorded, _ in found}
        # The planned order names ops by position, so it fits only steps with as many ops.
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
        """Run waves in planned order."""
        events: dict[WaveOp, Any] = {}
        outputs: dict[int, StepOutput] = {}
        for table in (self._early, self._num_added, self._added):
            table.clear()
        with self._step(waves[0].recorded, 0).as_traced():
            for at in self._order.sequence:
                wave, op = at
                recorded, given, weight = waves[wave]
                own, stream = self._step(recorded, wave), self._streams[wave % NUM_STREAMS]
                stream.make_current()
                if self._first[wave] == op:
                    # Filled only now: an earlier wave of this stream uses the same slots.
                    own.fill(self._read_by(wave, recorded, given), step)
                    own.weight = weight
                if at in self._order.waits:
                    stream.wait(events[self._order.waits[at]])
                own.run_op(op)
                for parameter, gradient in own.made_at.get(op, ()):
                    name = recorded.program.names[parameter]
                    self._add(name, wave, own.take(gradient), stream)
                if at in self._awaited:
                    # After the sums, so that ops that wait for this one may add to them.
                    events[at] = stream.event()
                if self._last[wave] == op:
                    outputs[wave] = _output(recorded, own)
                    self._end(wave)
        return [outputs[wave] for wave in range(len(waves))]

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Ignore the optimizer: updates run after all waves."""

    @property
    def replays(self) -> str:
        """Description of how waves are launched."""
        return never_replayed(self._device)

    @torch.no_grad()
    def _add(self, name: str, wave: int, gradient: torch.Tensor, stream: DeviceStream) -> None:
        """Add a gradient to ``parameter.grad`` in wave order; early gradients wait for it."""
        self._early[name, wave] = gradient, stream
        parameter: Any = self._programs.tensors[name]
        while (found := self._early.pop((name, self._num_added[name]), None)) is not None:
            # On the stream that computed the gradient: the allocator reuses its memory only on that
            # stream, so not before the sum has read it.
            gradient, own = found
            own.make_current()
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.device)
            else:
                own.wait(self._added.get(name))
                parameter.grad.add_(gradient.to(parameter.device))
            self._added[name] = own.event()
            self._num_added[name] += 1
        if self._num_added[name] == len(self._last) and self._overlaps:
            assert self.reducer is not None
            self.reducer.take(parameter)
        stream.make_current()

    @property
    def _overlaps(self) -> bool:
        """True if complete gradients are reduced while waves run."""
        reducer = self.reducer
        return reducer is not None and reducer.is_enabled and reducer.overlaps

    def _read_by(self, wave: int, recorded: TracedStep, given: Given) -> Given:
        """Return the tensors that a wave reads."""
        return given

    def _end(self, wave: int) -> None:
        """Handle the end of a wave."""

    def _step(self, recorded: TracedStep, wave: int) -> WaveStep:
        # One set of slots per stream, on which waves run one after the other.
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


def _output(recorded: TracedStep, own: WaveStep) -> StepOutput:
    """Return loss and outputs of a finished wave, and drop its tensors."""
    loss = own.value(recorded.program.outputs[0]).detach()
    returned = recorded.returned(own)
    own.forget()
    return StepOutput(loss, returned)


class _Event(NamedTuple):
    """A CUDA event, numbered on its stream."""

    stream: _WaveStream
    number: int
    recorded: torch.cuda.Event


class _WaveStream(CudaStream):
    """A CUDA stream that omits redundant waits, which an earlier wait implies.

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
    gradients: Gradients


class CapturedWaveRunner(WaveRunner):
    """Waves on two streams of one CUDA device, replayed as one graph.

    In eager mode the host issues small kernels one by one and the device idles between them. In a
    graph the kernels of both streams are known before it starts.
    """

    def __init__(self, programs: TracedModel, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
        # Two new streams: libraries keep a workspace per stream, so concurrent ops share none.
        self._pair = [_WaveStream(device) for _ in range(NUM_STREAMS)]
        self._streams = self._pair
        self.replay: GraphReplay[_CapturedWaves] = GraphReplay()

    def run(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        """Run all waves, by replay unless gradients exist before the step."""
        tensors = self._programs.tensors.values()
        found = None
        # A replay overwrites gradient tensors, so it cannot add to existing gradients.
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
        """Description of how waves are launched."""
        return self.replay.message

    @property
    def _overlaps(self) -> bool:
        # Collectives of gloo cannot be captured, so gradients are reduced after the replay.
        return False

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
                    # Reserves one segment per stream and frees it at once. Later blocks are cut
                    # from it, so that rounding (20 MiB for blocks of 1 to 10 MiB) is lost once.
                    each.make_current()
                    torch.empty(size, dtype=torch.uint8, device=self._device)
                outputs = super().run(static, step)
            # Tensors in the graph's memory, which each replay writes.
            gradients = {name: t.grad for name, t in tensors.items() if t.grad is not None}
            return _CapturedWaves(graph, inputs, scales, outputs, gradients)
        finally:
            for tensor in tensors.values():
                tensor.grad = None


class UpdatingWaveRunner(WaveRunner):
    """Runs waves that each end with an update of the parameters, as Wavelet publishes it.

    When a wave ends, its gradients are summed over replicas, and the optimizer is called with the
    mean of these gradients and those of the previous wave. The updated parameters are then copied
    to the parameters of the wave's stream. While a wave runs, the wave of the other stream may thus
    update the model, but not the parameters with which the running wave computes.
    """

    def __init__(self, programs: TracedModel, order: WaveOrder, device: torch.device) -> None:
        super().__init__(programs, order, device)
        self._optimizer: torch.optim.Optimizer | None = None
        self._own: list[Gradients | None] = [None] * NUM_STREAMS
        """Copy of the parameters for each stream."""
        self._made: dict[int, Gradients] = {}
        self._before: Gradients = {}
        """Gradients of the previous wave."""
        self._versions: list[int] = []
        """Version counters of the parameters after the last update."""

    @property
    def replays(self) -> str:
        """Description of how waves are launched."""
        return eager("parameters change after every wave")

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Set the optimizer that runs at the end of every wave."""
        if optimizer is None:
            raise UsageError(
                "parameters that change after every wave leave no gradients to accumulate or clip",
                hint="plan waves whose parameters change once per step (without --changes wave)",
            )
        self._optimizer = optimizer

    def train(
        self, batches: Sequence[Any], step: int, weights: Sequence[Weight]
    ) -> list[StepOutput]:
        """Run forward and backward of all microbatches, each followed by an update."""
        self.has_updated = False
        return super().train(batches, step, weights)

    def run(self, waves: Sequence[Wave], step: int) -> list[StepOutput]:
        """Run waves; each loss gets the weight of an entire step, as each wave is an update."""
        if self._versions != self._versions_now():
            # Parameters were loaded, or changed by a step without waves: discard all copies.
            self._own, self._before = [None] * NUM_STREAMS, {}
        self.has_updated = True
        whole = sum(wave.weight for wave in waves)
        return super().run([wave._replace(weight=whole) for wave in waves], step)

    def _versions_now(self) -> list[int]:
        return versions_of(self._programs.tensors[name] for name in self._own[0] or ())

    def _read_by(self, wave: int, recorded: TracedStep, given: Given) -> Given:
        """Return the tensors of a wave, with its stream's copies in place of the parameters."""
        program, which = recorded.program, wave % NUM_STREAMS
        if self._own[which] is None:
            names, tensors = program.parameters, self._programs.tensors
            self._own[which] = {name: tensors[name].detach().clone() for name in names}
        own = self._own[which] or {}
        numbers = {number: name for name, number in program.parameters.items()}
        return [
            {at: own[numbers[at]] if at in numbers else tensor for at, tensor in here.items()}
            for here in given
        ]

    def _add(self, name: str, wave: int, gradient: torch.Tensor, stream: DeviceStream) -> None:
        """Hold a gradient until its wave has ended."""
        self._made.setdefault(wave, {})[name] = gradient

    @torch.no_grad()
    def _end(self, wave: int) -> None:
        """Update the parameters, and copy them to the stream of the wave."""
        assert self._optimizer is not None, "`expect` was called"
        tensors, made = self._programs.tensors, self._summed(self._made.pop(wave, {}))
        for name, gradient in made.items():
            before = self._before.get(name)
            mean = gradient if before is None else (before + gradient) / 2
            tensors[name].grad = mean.to(tensors[name].device)
        self._programs.update(self._optimizer)
        for name, copied in (self._own[wave % NUM_STREAMS] or {}).items():
            copied.copy_(tensors[name])
            tensors[name].grad = None
        self._before = made
        self._versions = self._versions_now()

    def _summed(self, made: Gradients) -> Gradients:
        """Return the gradients of a wave, summed over replicas."""
        if self.reducer is None:
            return made
        tensors: Mapping[str, Any] = self._programs.tensors
        for name, gradient in made.items():
            tensors[name].grad = gradient
        self.reducer.begin()
        self.reducer.finish()
        # The next wave overwrites the buckets.
        return {name: tensors[name].grad.clone() for name in made}


def make_waves(programs: TracedModel, order: WaveOrder, device: torch.device) -> WaveRunner:
    """Return the runner of waves on a device, with CUDA graph replay if steps are replayed."""
    if order.changes == "wave":
        return UpdatingWaveRunner(programs, order, device)
    replayed = programs.replay and device.type == "cuda"
    return (CapturedWaveRunner if replayed else WaveRunner)(programs, order, device)
