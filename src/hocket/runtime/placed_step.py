"""Run a traced step on several devices of this process, with streams, transfers and timestamps.

A logical device is a device of the plan; several logical devices may share a real one. The host
launches all instructions in their global order. On a CPU each instruction runs at once. On CUDA
devices the launches fill one compute stream per logical device and one transfer stream per pair of
devices; events make one stream wait for another. The source tensor of a copy is held until it has
been sent. Timestamps of every op and transfer give a measured timeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from hocket.base.errors import RunError, one_line
from hocket.capture.program import Program
from hocket.graph.graph import Phase
from hocket.runtime.device_instructions import Do, Instruction, Setup
from hocket.runtime.eager_step import OpCalls
from hocket.runtime.step_record import TIMES, StepRecord
from hocket.runtime.tensor_bytes import pack, unpack
from hocket.runtime.trace_options import Weight
from hocket.runtime.traced_recompute import RecomputedDraws


class HeldTensors(dict[int, torch.Tensor]):
    """Tensors by number, with the total bytes of their storages, each counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        """Bytes of all storages held now."""
        self.peak_bytes = 0
        self._num_tensors: dict[int, int] = {}

    def __setitem__(self, number: int, tensor: torch.Tensor) -> None:
        if number in self:
            del self[number]
        storage = tensor.untyped_storage()
        count = self._num_tensors.get(storage._cdata, 0)
        self._num_tensors[storage._cdata] = count + 1
        if not count:
            self.num_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        super().__setitem__(number, tensor)

    def clear(self) -> None:
        """Drop all tensors."""
        super().clear()
        self._num_tensors.clear()
        self.num_bytes = self.peak_bytes = 0

    def __delitem__(self, number: int) -> None:
        storage = self[number].untyped_storage()
        count = self._num_tensors.pop(storage._cdata) - 1
        if count:
            self._num_tensors[storage._cdata] = count
        else:
            self.num_bytes -= storage.nbytes()
        super().__delitem__(number)


class PlacedStep:
    """Forward and backward of a step on several logical devices, each mapped to a real one."""

    def __init__(
        self, setup: Setup, devices: Mapping[int, torch.device], *, seed: int | None,
        keep: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """``devices`` maps devices of the plan to real ones; tensors with numbers in ``keep``, loss
        and gradients are not dropped.

        Without a ``seed``, draws continue from the state of PyTorch's generators.
        """
        self.setup, self._seed = setup, seed
        self.record: StepRecord | None = None
        """Times of the last step."""
        program = setup.program
        self._keep = keep | {*program.outputs}
        self.streams = {index: new_stream(device) for index, device in devices.items()}
        self.held = {index: HeldTensors() for index in devices}
        self._instructions: Sequence[tuple[int, Instruction]] = [
            each for each in setup.split.sequence if each[0] in devices
        ]
        self._calls = {
            index: OpCalls(setup.graph, program, device, seed, self.held[index])
            for index, device in devices.items()
        }
        self._bound = {
            op: self._calls[index].bound(op, setup.sent)
            for op, index in enumerate(setup.device_of)
            if index in devices and program.calls[op].phase != Phase.OPTIMIZER
        }
        self._redraws = {
            device: RecomputedDraws(program, device) for device in set(devices.values())
        }
        real = list(devices.values())
        self._alone = {i: d.type == "cuda" and real.count(d) == 1 for i, d in devices.items()}
        """True for logical devices that do not share their CUDA device, so that its peak is
        theirs."""
        self._marks: dict[str, dict[int, tuple[DeviceStream, Any]]] = {}
        """Timestamps by field of `StepRecord` and number of the op or transfer, with their
        streams."""
        self._memory: dict[int, list[tuple[Any, int]]] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        """Gradients by number of the parameter."""
        self._channels: dict[tuple[int, int], Channel] = {}
        self._arriving: dict[int, Arrival | None] = {}
        self._produced: dict[int, Any] = {}
        """Event after which a transfer's tensor exists, by transfer."""
        self._events: dict[int, Any] = {}
        self._begun: dict[int, Any] = {}

    @property
    def program(self) -> Program:
        """The traced program."""
        return self.setup.program

    def run(
        self, given: Sequence[Mapping[int, torch.Tensor]], step: int, weight: Weight = 1.0
    ) -> StepRecord:
        """Run the step from tensors that exist before it, per device; return its measured times."""
        self.forget()
        for index, held in self.held.items():
            for number, tensor in given[index].items():
                held[number] = tensor
            held.peak_bytes = held.num_bytes
        for calls in self._calls.values():
            calls.weight, calls.draw = weight, step
        self._marks = {name: {} for name in TIMES}
        self._memory = {index: [] for index in self.streams}
        for stream in self.streams.values():
            stream.settle()
        self._meet()
        for stream in self.streams.values():
            stream.begin()
        self._begun = {index: stream.event() for index, stream in self.streams.items()}
        record = StepRecord(start_s=time.perf_counter())
        with ExitStack() as stack:
            for calls in self._calls.values():
                stack.enter_context(calls.as_traced())
            self._run_all(step)
        self._flush()
        for stream in self.streams.values():
            stream.finish()
        record.end_s = time.perf_counter()
        self._fill(record)
        self._produced.clear()
        self._events.clear()
        self._take_gradients()
        self.record = record
        return record

    def value(self, tensor: int) -> torch.Tensor:
        """Return a kept tensor of the last step."""
        return next(held[tensor] for held in self.held.values() if tensor in held)

    def forget(self) -> None:
        """Drop all tensors of the step."""
        for held in self.held.values():
            held.clear()
        self.gradients = {}

    # ── where ranks differ ───────────────────────────────────────────────────────────────────

    def _meet(self) -> None:
        """Synchronize the start of a step with other ranks; does nothing in one process."""

    def _flush(self) -> None:
        """Wait until all tensors have been sent to other ranks; nothing to do in one process."""

    def _take_gradients(self) -> None:
        """Collect gradients of parameters that no update of the plan has used."""
        for parameter, gradient in self.program.gradients.items():
            if parameter not in self.gradients:
                self.gradients[parameter] = self.value(gradient)

    def _send(self, device: int, number: int) -> None:
        """Start to copy a tensor to another device."""
        tensor, src, dst = self.setup.split.transfers[number]
        spec, receiver = self.program.tensors[tensor], self.streams[dst]
        produced = self._produced[number] = self._events.get(spec.producer, self._begun[src])
        self._arriving[number] = None
        start = end = receiver.mark()
        if spec.layout is not None:
            value = self.held[device][tensor]
            packed = partial(pack, spec=spec, whole=self.setup.is_whole[number])
            channel = self._channels.get((src, dst))
            if channel is None:
                channel = self._channels[src, dst] = Channel(self.streams[src], receiver)
            arrival = channel.copy(value, packed, produced)
            self._arriving[number], start, end = arrival, arrival.start, arrival.end
        for name, mark in (("sent_s", start), ("posted_s", start), ("arrived_s", end)):
            self._marks[name][number] = receiver, mark

    def _post(self, number: int) -> None:
        """Prepare to receive; copies within a process need no receiver."""

    def _wait(self, device: int, number: int) -> None:
        """Make a device wait for a transfer, and hold the tensor that arrives."""
        stream, arrival = self.streams[device], self._arriving.pop(number)
        if arrival is None:
            stream.wait(self._produced[number])
            return
        stream.wait(arrival.event)
        if arrival.data.is_cuda:
            # The memory belongs to the transfer stream, but the compute stream reads it.
            arrival.data.record_stream(torch.cuda.current_stream(stream.device))
        tensor = self.setup.split.transfers[number].tensor
        spec = self.program.tensors[tensor]
        self.held[device][tensor] = unpack(arrival.data, spec, self.setup.is_whole[number])

    # ── one step ─────────────────────────────────────────────────────────────────────────────

    def _run_all(self, step: int) -> None:
        before = -1
        try:
            for device, instruction in self._instructions:
                if device != before:
                    self.streams[device].make_current()
                    before = device
                self._obey(device, instruction, step)
        finally:
            for stream in reversed(self.streams.values()):
                stream.release_current()

    def _obey(self, device: int, instruction: Instruction, step: int) -> None:
        do, number = instruction
        if do == Do.RUN:
            self._run_op(device, number, step)
        elif do == Do.SEND:
            self._send(device, number)
        elif do == Do.POST:
            self._post(number)
        elif do == Do.WAIT:
            self._wait(device, number)
        elif number in self.held[device] and number not in self._keep:
            # A tensor that only orders ops has no data, and was never held.
            del self.held[device][number]

    def _run_op(self, device: int, op: int, step: int) -> None:
        held, stream = self.held[device], self.streams[device]
        start = stream.mark()
        self._memory[device].append((start, held.num_bytes))
        try:
            self._perform(device, op)
        # Whatever an op of a user's model raises is a failed run, not a bug of hocket.
        except Exception as error:
            name = self.setup.graph.op_names[op]
            raise RunError(
                f"op {name!r} failed on {stream.device} in step {step}: {one_line(error)}"
            ) from error
        end = stream.mark()
        self._marks["op_start_s"][op] = stream, start
        self._marks["op_end_s"][op] = stream, end
        self._memory[device].append((end, held.num_bytes))
        if op in self.setup.senders:
            self._events[op] = stream.event()

    def _perform(self, device: int, op: int) -> None:
        call = self.program.calls[op]
        if call.phase == Phase.OPTIMIZER:
            # The user's own optimizer updates the parameter.
            self.gradients[call.args[0].number] = self.held[device][call.args[1].number]
        elif self._seed is None:
            self._redraws[self.streams[device].device].run(op, self._bound[op])
        else:
            self._bound[op]()

    def _fill(self, record: StepRecord) -> None:
        """Convert timestamps to seconds, once all work is complete."""

        for name, marks in self._marks.items():
            times_s = {number: stream.seconds(mark) for number, (stream, mark) in marks.items()}
            setattr(record, name, times_s)
        for device, stream in self.streams.items():
            record.memory[device] = [(stream.seconds(m), size) for m, size in self._memory[device]]
            record.peak_bytes[device] = (
                torch.cuda.max_memory_allocated(stream.device)
                if self._alone[device]
                else self.held[device].peak_bytes
            )


Packing = Callable[[torch.Tensor], torch.Tensor]


class DeviceStream:
    """Stream of a logical device on the CPU, where every call blocks until it is done.

    A mark is a timestamp: a time of the host's clock on CPUs, a timed event on CUDA streams. Marks
    are converted to seconds when the step is over.
    """

    is_cuda = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def settle(self) -> None:
        """Wait for everything that was launched before the step, on any stream."""

    def begin(self) -> None:
        """Start a step."""

    def mark(self) -> Any:
        """Return a mark at this point of the device's work."""
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """Convert a mark to seconds of the host's clock; only after `finish`."""
        return float(mark)

    def make_current(self) -> None:
        """Run the next calls on this device."""

    def release_current(self) -> None:
        """Undo `make_current`."""

    def wait(self, event: Any) -> None:
        """Let later work wait for ``event``, which may be None."""
        if event is not None:
            event.synchronize()

    def event(self) -> Any:
        """Return an event after everything launched so far."""
        return None

    def finish(self) -> None:
        """Wait until everything is done."""


class CudaStream(DeviceStream):
    """A logical device on a CUDA device, with a compute stream of its own."""

    is_cuda = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._base = _timed_event()
        self._base_s = 0.0

    def settle(self) -> None:
        """Wait for everything that was launched before the step, on any stream."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def begin(self) -> None:
        """Start a step."""
        # CUDA events give differences only; the base event ties them to the host's clock.
        self._base.record(self.stream)
        self.stream.synchronize()
        self._base_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Return a timed event after everything launched so far."""
        event = _timed_event()
        event.record(self.stream)
        return event

    def seconds(self, mark: Any) -> float:
        """Convert a mark to seconds of the host's clock; only after `finish`."""
        if isinstance(mark, float):
            return mark
        return self._base_s + float(self._base.elapsed_time(mark)) / 1e3

    def make_current(self) -> None:
        """Launch the next calls on the compute stream."""
        torch.cuda.set_stream(self.stream)

    def release_current(self) -> None:
        """Return to the default stream."""
        torch.cuda.set_stream(torch.cuda.default_stream(self.device))

    def wait(self, event: Any) -> None:
        """Let the compute stream wait for ``event``."""
        if event is not None:
            self.stream.wait_event(event)

    def event(self) -> torch.cuda.Event:
        """Return an event without a time, after everything launched so far."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def finish(self) -> None:
        """Wait until the compute stream is empty."""
        self.stream.synchronize()


def _timed_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def new_stream(device: torch.device) -> DeviceStream:
    """Return a stream for a logical device on a real device."""
    return CudaStream(device) if device.type == "cuda" else DeviceStream(device)


class Channel:
    """Connection of two logical devices; between CUDA devices it has a copy stream on each."""

    def __init__(self, src: DeviceStream, dst: DeviceStream) -> None:
        self.src, self.dst = src, dst
        if src.is_cuda and dst.is_cuda:
            self._send = torch.cuda.Stream(src.device)  # type: ignore[no-untyped-call]
            self._receive = self._send
            if src.device != dst.device:
                self._receive = torch.cuda.Stream(dst.device)  # type: ignore[no-untyped-call]

    def copy(self, value: torch.Tensor, packed: Packing, produced: Any) -> Arrival:
        """Copy ``packed(value)`` once the event ``produced`` is reached."""
        # Some kernels of CUDA leave small tensors, such as the generator state of fused attention,
        # on the host.
        is_host = self.src.is_cuda and not value.is_cuda
        if self.src.is_cuda and self.dst.is_cuda and not is_host:
            return self._copy_on_streams(value, packed, produced)
        if produced is not None:
            produced.synchronize()
        began_s = time.perf_counter()
        arrived = packed(value).to(value.device if is_host else self.dst.device, copy=True)
        return Arrival(arrived, None, began_s, time.perf_counter())

    def _copy_on_streams(self, value: torch.Tensor, packed: Packing, produced: Any) -> Arrival:
        start, end = _timed_event(), _timed_event()
        with torch.cuda.stream(self._send):
            self._send.wait_event(produced)
            # This stream reads the tensor, which may be dropped before the stream has read it.
            value.record_stream(self._send)
            sent = packed(value)
            # Both streams are current, each on its device: PyTorch copies on one and makes the
            # other wait. Memory is allocated on the receiving stream, because kernels of the
            # compute stream may be far behind.
            with torch.cuda.stream(self._receive):
                self._receive.wait_stream(self._send)
                start.record(self._receive)
                arrived = torch.empty(sent.shape, dtype=sent.dtype, device=self.dst.device)
                arrived.copy_(sent, non_blocking=True)
                end.record(self._receive)
        return Arrival(arrived, end, start, end)


class Arrival(NamedTuple):
    """A copy in flight."""

    data: torch.Tensor
    event: Any
    """Event after the copy; None if the copy is complete."""
    start: Any
    """Marks before and after the copy, on the clock of the receiving device."""
    end: Any
