"""Run a placement inside one process, on one or several real devices.

The host launches everything in the global order of the split. On CUDA devices that only fills
streams: a compute stream per logical device, a transfer stream per pair, and events where one has
to wait for another. Copies are kept until they have left. On a CPU the order is the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hocket.base.errors import RunError, one_line
from hocket.capture.program import Program
from hocket.capture.storage import given_storages
from hocket.runtime.device_instructions import Do, Instruction
from hocket.runtime.device_streams import Arrival, Channel, new_stream
from hocket.runtime.device_worker import DeviceWorker
from hocket.runtime.placed_program import Setup
from hocket.runtime.step_record import StepRecord
from hocket.runtime.tensor_bytes import pack, unpack


class SingleProcess:
    """A program split over logical devices, each on a real one."""

    def __init__(
        self, setup: Setup, values: Mapping[str, torch.Tensor] | None,
        devices: Sequence[torch.device], *, seed: int | None = 0,
    ) -> None:  # fmt: skip
        """Without ``values`` the caller puts tensors into the workers."""
        self.setup = setup
        program = setup.program
        specs = dict(enumerate(program.tensors))
        self.streams = [new_stream(device) for device in devices]
        self.workers = []
        for index, stream in enumerate(self.streams):
            worker = DeviceWorker(
                setup.calls_of(index), specs, program.draws, stream.device, seed, setup.sent
            )
            present = setup.split.present[index]
            if values is not None:
                worker.load(present, given_storages(present, specs, program.names, values))
            self.workers.append(worker)
        real = [stream.device for stream in self.streams]
        self._alone = [stream.is_cuda and real.count(stream.device) == 1 for stream in self.streams]
        """True for logical devices that have a CUDA device, and its memory, to themselves."""
        self._channels: dict[tuple[int, int], Channel] = {}
        self._produced: dict[int, Any] = {}
        self._arriving: dict[int, Arrival | None] = {}
        self._events: dict[int, Any] = {}
        self._begun: list[Any] = []

    @property
    def program(self) -> Program:
        """The program."""
        return self.setup.program

    def step(self, number: int) -> StepRecord:
        """Run one step; they count from 1."""
        marks: dict[str, dict[int, Any]] = {"start": {}, "end": {}, "sent": {}, "arrived": {}}
        memory: dict[int, list[tuple[Any, int]]] = {d: [] for d in range(len(self.streams))}
        for worker, stream in zip(self.workers, self.streams, strict=True):
            worker.drop_results()
            worker.held.peak_bytes = worker.held.num_bytes
            stream.settle()
        for stream in self.streams:
            stream.begin()
        self._begun = [stream.event() for stream in self.streams]
        record = StepRecord(start_s=time.perf_counter())
        # As in a plain training step: some kernels save less where gradients are switched off.
        with torch.enable_grad():
            self._run_all(number, marks, memory)
        for stream in self.streams:
            stream.finish()
        record.end_s = time.perf_counter()
        self._fill(record, marks, memory)
        record.loss = self._loss()
        self._produced.clear()
        self._events.clear()
        return record

    def results(self) -> dict[int, torch.Tensor]:
        """Return all tensors that are held after a step, each from the device that owns it."""
        found: dict[int, torch.Tensor] = {}
        for worker in reversed(self.workers):
            found |= worker.held
        for device, present in enumerate(self.setup.split.present):
            found |= {t: self.workers[device].held[t] for t in present
                      if t in self.workers[device].held}  # fmt: skip
        return found

    # ── one step ─────────────────────────────────────────────────────────────────────────────

    def _run_all(self, step: int, marks: dict[str, dict[int, Any]], memory: Any) -> None:
        before = -1
        try:
            for device, instruction in self.setup.split.sequence:
                if device != before:
                    self.streams[device].make_current()
                    before = device
                self._obey(device, instruction, step, marks, memory[device])
        finally:
            for stream in reversed(self.streams):
                stream.release_current()

    def _obey(
        self, device: int, instruction: Instruction, step: int,
        marks: dict[str, dict[int, Any]], memory: list[tuple[Any, int]],
    ) -> None:  # fmt: skip
        do, number = instruction
        worker, stream = self.workers[device], self.streams[device]
        if do == Do.RUN:
            marks["start"][number] = start = stream.mark()
            memory.append((start, worker.held.num_bytes))
            self._run(worker, number, step)
            marks["end"][number] = end = stream.mark()
            memory.append((end, worker.held.num_bytes))
            if number in self.setup.senders:
                self._events[number] = stream.event()
        elif do == Do.SEND:
            self._send(device, number, marks)
        elif do == Do.WAIT:
            self._receive(device, number)
        elif do == Do.DROP:
            worker.drop(number)

    def _run(self, worker: DeviceWorker, op: int, step: int) -> None:
        try:
            worker.run(op, step)
        # Whatever an op of a user's model raises is a failed run, not a bug of ours.
        except Exception as error:
            name = self.setup.graph.op_names[op]
            raise RunError(
                f"op {name!r} failed on {worker.device} in step {step}: {one_line(error)}"
            ) from error

    def _send(self, device: int, number: int, marks: dict[str, dict[int, Any]]) -> None:
        tensor, src, dst = self.setup.split.transfers[number]
        spec = self.program.tensors[tensor]
        produced = self._events.get(spec.producer, self._begun[src])
        self._produced[number] = produced
        if spec.layout is None:
            marks["sent"][number] = marks["arrived"][number] = self.streams[dst].mark()
            self._arriving[number] = None
            return
        value = self.workers[device].held[tensor]
        packed = partial(pack, spec=spec, whole=self.setup.is_whole[number])
        channel = self._channels.get((src, dst))
        if channel is None:
            channel = self._channels[src, dst] = Channel(self.streams[src], self.streams[dst])
        if self.streams[src].is_cuda and not value.is_cuda:
            # Some kernels hand small things, such as the state of a generator, to the host.
            arrival = channel.copy_on_host(packed(value))
        else:
            arrival = channel.copy(value, packed, produced)
        marks["sent"][number], marks["arrived"][number] = arrival.start, arrival.end
        self._arriving[number] = arrival

    def _receive(self, device: int, number: int) -> None:
        stream, arrival = self.streams[device], self._arriving.pop(number)
        if arrival is None:
            stream.wait(self._produced[number])
            return
        stream.wait(arrival.event)
        if arrival.data.is_cuda:
            arrival.data.record_stream(torch.cuda.current_stream(stream.device))
        tensor = self.setup.split.transfers[number].tensor
        spec = self.program.tensors[tensor]
        self.workers[device].held[tensor] = unpack(arrival.data, spec, self.setup.is_whole[number])

    # ── measured ────────────────────────────────────────────────────────────────────────

    def _fill(self, record: StepRecord, marks: dict[str, dict[int, Any]], memory: Any) -> None:
        stream_of = [self.streams[device] for device in self.setup.device_of]
        record.op_start_s = {op: stream_of[op].seconds(m) for op, m in marks["start"].items()}
        record.op_end_s = {op: stream_of[op].seconds(m) for op, m in marks["end"].items()}
        for number, transfer in enumerate(self.setup.split.transfers):
            receiver = self.streams[transfer.dst]
            record.sent_s[number] = receiver.seconds(marks["sent"][number])
            record.arrived_s[number] = receiver.seconds(marks["arrived"][number])
            record.posted_s[number] = record.sent_s[number]
        for device, points in memory.items():
            stream = self.streams[device]
            record.memory[device] = [(stream.seconds(mark), size) for mark, size in points]
            held = self.workers[device].held
            record.peak_bytes[device] = (
                torch.cuda.max_memory_allocated(stream.device)
                if self._alone[device]
                else held.peak_bytes
            )

    def _loss(self) -> float | None:
        if self.setup.loss is None:
            return None
        tensor, device = self.setup.loss
        return float(self.workers[device].held[tensor])
