"""Carry out the part of one device in a process of its own, exchanging tensors with the others.

Sends and receives never block: a device stands still only where it needs what has not arrived.
With gloo, transfers are matched by their number; with NCCL by their sequence, which is the same on
both sides of every pair.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hocket.base.errors import RunError
from hocket.capture.program import TensorSpec
from hocket.processes.root_cause import CONSEQUENCE
from hocket.runtime.package import pack, package_bytes, unpack
from hocket.runtime.peer import Peer
from hocket.runtime.record import StepRecord
from hocket.runtime.split import Do, Instruction
from hocket.runtime.streams import DeviceStream
from hocket.runtime.worker import DeviceWorker

# Tensors on their way to other ranks: held until they have left, and no longer.
#
# Gloo finds out that a send is over only when it is waited for, so a thread waits; the memory of a
# tensor that was dropped is free again as soon as it has left, not at the end of the step.


class Outbox:
    """Sends under way, in order."""

    def __init__(self) -> None:
        self._sends: queue.Queue[tuple[Any, torch.Tensor]] = queue.Queue()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait_for_all, daemon=True).start()

    def put(self, work: Any, data: torch.Tensor) -> None:
        """Hold ``data`` until ``work``, which sends it, is done."""
        self._sends.put((work, data))

    def flush(self) -> None:
        """Wait until everything has left; raises what a send has raised."""
        self._sends.join()
        if self._error is not None:
            raise self._error

    def _wait_for_all(self) -> None:
        while True:
            work, data = self._sends.get()
            try:
                _wait_for(work, data)
            except RuntimeError as error:
                self._error = error
            del work, data
            self._sends.task_done()


def _wait_for(work: Any, data: torch.Tensor) -> None:
    if not data.is_cuda:
        work.wait()
        return
    # With NCCL only the current stream waits, so the host waits for that stream.
    with torch.cuda.device(data.device):
        work.wait()
        torch.cuda.current_stream().synchronize()


_SPIN_S = 2e-4
"""Sleeping is not more precise than this."""


class CommunicationError(RunError):
    """Another rank went away."""

    code = CONSEQUENCE


class RankRunner:
    """Runs the instructions of one device, step after step."""

    def __init__(
        self,
        worker: DeviceWorker,
        stream: DeviceStream,
        instructions: Sequence[Instruction],
        peers: dict[int, Peer],
        *,
        device_index: int,
        slowdown: float = 1.0,
        progress: Callable[[int, int], None] = lambda step, position: None,
    ) -> None:
        self.worker, self.stream, self.peers = worker, stream, peers
        self.instructions, self.device_index = instructions, device_index
        self.slowdown, self.progress = slowdown, progress
        self._outbox = Outbox()
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}
        self._marks: dict[str, dict[int, Any]] = {}
        self._memory: list[tuple[Any, int]] = []

    def step(self, number: int) -> StepRecord:
        """Carry out one step together with all other ranks; they count from 1."""
        self.worker.drop_results()
        held = self.worker.held
        held.peak_bytes = held.num_bytes
        self._marks = {key: {} for key in ("start", "end", "sent", "posted", "arrived")}
        self._memory = []
        self.stream.settle()
        self._meet()
        self.stream.begin()
        self.stream.make_current()
        record = StepRecord(start_s=time.perf_counter())
        with torch.enable_grad():
            for position, instruction in enumerate(self.instructions):
                self.progress(number, position)
                self._obey(instruction, number)
        _talk(self._outbox.flush)
        self.stream.finish()
        record.end_s = time.perf_counter()
        self.stream.release_current()
        self._fill(record)
        return record

    def _meet(self) -> None:
        """All ranks begin a step together."""
        if dist.get_world_size() == 1:
            return
        if self.stream.is_cuda:
            _talk(lambda: dist.barrier(device_ids=[self.stream.device.index]))
            torch.cuda.synchronize(self.stream.device)
        else:
            _talk(dist.barrier)

    def _obey(self, instruction: Instruction, step: int) -> None:
        do, number = instruction
        if do == Do.RUN:
            self._run(number, step)
        elif do == Do.SEND:
            self._send(number)
        elif do == Do.POST:
            self._post(number)
        elif do == Do.WAIT:
            self._wait(number)
        else:
            self.worker.drop(number)

    def _run(self, op: int, step: int) -> None:
        began_s = time.perf_counter()
        self._marks["start"][op] = start = self.stream.mark()
        self._memory.append((start, self.worker.held.num_bytes))
        self.worker.run(op, step)
        if self.slowdown > 1.0:
            _stand_still((time.perf_counter() - began_s) * (self.slowdown - 1.0))
        self._marks["end"][op] = end = self.stream.mark()
        self._memory.append((end, self.worker.held.num_bytes))

    def _send(self, number: int) -> None:
        peer = self.peers[number]
        spec = self._spec(peer)
        self._marks["sent"][number] = self.stream.mark()
        if package_bytes(spec, peer.whole):
            data = pack(self.worker.held[peer.tensor], spec, peer.whole).to(self.stream.device)
        else:
            data = self._nothing()
        self._outbox.put(_talk(lambda: dist.isend(data, peer.rank, tag=number)), data)

    def _post(self, number: int) -> None:
        peer = self.peers[number]
        size = package_bytes(self._spec(peer), peer.whole)
        data = self._nothing() if not size else torch.empty(
            size, dtype=torch.uint8, device=self.stream.device
        )  # fmt: skip
        self._marks["posted"][number] = self.stream.mark()
        work = _talk(lambda: dist.irecv(data, peer.rank, tag=number))
        self._posted[number] = work, data

    def _wait(self, number: int) -> None:
        work, data = self._posted.pop(number)
        _talk(work.wait)
        self._marks["arrived"][number] = self.stream.mark()
        peer = self.peers[number]
        spec = self._spec(peer)
        if spec.layout is None:
            return
        if not package_bytes(spec, peer.whole):
            data = data[:0]
        arrived = unpack(data, spec, peer.whole)
        self.worker.held[peer.tensor] = arrived.cpu() if peer.is_host else arrived

    def _nothing(self) -> torch.Tensor:
        """One byte, where there is nothing to send but that something has happened."""
        return torch.zeros(1, dtype=torch.uint8, device=self.stream.device)

    def _spec(self, peer: Peer) -> TensorSpec:
        return self.worker.specs[peer.tensor]

    def _fill(self, record: StepRecord) -> None:
        seconds = self.stream.seconds
        for name, target in (
            ("start", record.op_start_s),
            ("end", record.op_end_s),
            ("sent", record.sent_s),
            ("posted", record.posted_s),
            ("arrived", record.arrived_s),
        ):
            target.update({number: seconds(mark) for number, mark in self._marks[name].items()})
        device = self.device_index
        record.memory[device] = [(seconds(mark), size) for mark, size in self._memory]
        record.peak_bytes[device] = (
            torch.cuda.max_memory_allocated(self.stream.device)
            if self.stream.is_cuda
            else self.worker.held.peak_bytes
        )


def _talk(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except RuntimeError as error:
        raise CommunicationError(f"lost another rank: {error}") from error


def _stand_still(duration_s: float) -> None:
    until_s = time.perf_counter() + duration_s
    if duration_s > 2 * _SPIN_S:
        time.sleep(duration_s - _SPIN_S)
    while time.perf_counter() < until_s:
        pass
