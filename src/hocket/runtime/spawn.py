"""Carry out a placement with one process per used device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from hocket.capture.storage import given_storages
from hocket.processes.heartbeat import Position, how_far
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import Timeouts, WorkerGroup
from hocket.runtime.connect import MeetingStore
from hocket.runtime.options import SILENCE_S, Backend, OnProgress, OnStart, OnStep
from hocket.runtime.package import unpack
from hocket.runtime.peer import Peer
from hocket.runtime.record import StepParts, StepRecord
from hocket.runtime.setup import Setup
from hocket.runtime.split import Do, Instruction
from hocket.runtime.wire import encode_call, encode_spec, from_raw, raw


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How ranks run."""

    backend: Backend = "gloo"
    steps: int = 1
    seed: int = 0
    threads: int = 1
    """Threads of each rank on processors."""
    slowdown: Mapping[int, float] | None = None
    """By device: how many times as long its ops take, to try a plan on unequal devices."""
    silence_s: float = SILENCE_S
    wants_results: bool = False


def run_ranks(
    setup: Setup,
    values: Mapping[str, torch.Tensor],
    device_names: Sequence[str],
    options: RankOptions,
    *,
    on_start: OnStart = lambda process_ids: None,
    on_step: OnStep = lambda number, record: None,
    on_progress: OnProgress = lambda what: None,
) -> dict[int, torch.Tensor]:
    """Run all steps; the tensors that are held at the end, where they are wanted.

    ``on_start`` is told the process ids of the ranks, ``on_step`` each step when it is done, and
    ``on_progress`` now and then how far the ranks are.
    """
    with closing(MeetingStore()) as store:
        specs = [
            _rank_spec(setup, device_names, options, device) for device in setup.split.used_devices
        ]
        results: dict[int, torch.Tensor] = {}
        parts = StepParts(len(specs))
        on_progress(f"starting {len(specs)} processes")
        counts = [len(setup.split.of_device(device)) for device in setup.split.used_devices]

        def tell(positions: Sequence[Position]) -> None:
            on_progress(how_far(positions, counts, options.steps))

        timeouts = Timeouts(silence_s=options.silence_s)
        with WorkerGroup(specs, timeouts=timeouts, on_wait=tell) as group:
            on_start(group.process_ids)
            for rank, device in enumerate(setup.split.used_devices):
                group.send(rank, *_order(setup, values, options, device, store.port))
            for _, header, buffers in group.messages():
                if header["what"] == "results":
                    results |= _unpacked(setup, header["tensors"], buffers)
                    continue
                own = StepRecord.from_arrays(header["record"], buffers)
                record = parts.add(header["number"], own)
                if record is not None:
                    on_step(header["number"], record)
        return results


def _rank_spec(
    setup: Setup, device_names: Sequence[str], options: RankOptions, device: int
) -> WorkerSpec:
    rank = setup.split.used_devices.index(device)
    return WorkerSpec(
        name=f"rank {rank} ({device_names[device]})",
        module="hocket.runtime.rank",
        describe=_describer(setup, setup.split.of_device(device), device_names),
        environment={"OMP_NUM_THREADS": str(options.threads)},
    )


def _order(
    setup: Setup,
    values: Mapping[str, torch.Tensor],
    options: RankOptions,
    device: int,
    port: int,
) -> tuple[dict[str, Any], list[Any]]:
    """What a rank is told at first: its part of the program, and the values that it starts from."""
    program, used = setup.program, setup.split.used_devices
    instructions = setup.split.of_device(device)
    calls = setup.calls_of(device)
    present = list(setup.split.present[device])
    given = given_storages(present, dict(enumerate(program.tensors)), program.names, values)
    constants: list[torch.Tensor] = []
    encoded = [(op, encode_call(call, constants)) for op, call in calls.items()]
    header = {
        "rank": used.index(device),
        "num_ranks": len(used),
        "backend": options.backend,
        "port": port,
        "device": f"cuda:{used.index(device)}" if options.backend == "nccl" else "cpu",
        "device_index": device,
        "steps": options.steps,
        "seed": options.seed,
        "threads": options.threads,
        "slowdown": (options.slowdown or {}).get(device, 1.0),
        "wants_results": options.wants_results,
        "loss": setup.loss[0] if setup.loss is not None and setup.loss[1] == device else None,
        "calls": encoded,
        "constants": [(str(c.dtype).removeprefix("torch."), list(c.shape)) for c in constants],
        "draws": [(op, draw) for op, draw in program.draws.items() if op in calls],
        "specs": [(t, encode_spec(program.tensors[t])) for t in _tensors_of(setup, device)],
        "present": present,
        "storages": list(given),
        "instructions": [(int(do), number) for do, number in instructions],
        "peers": peers_of(setup, instructions, device),
    }
    return header, [raw(data) for data in (*given.values(), *constants)]


def peers_of(
    setup: Setup, instructions: Sequence[Instruction], device: int
) -> list[tuple[int, Peer]]:
    """Transfers of a device by number."""
    used = setup.split.used_devices
    found = []
    for do, number in instructions:
        if do in (Do.SEND, Do.POST):
            tensor, src, dst = setup.split.transfers[number]
            other = used.index(dst if src == device else src)
            is_host = tensor in setup.host_tensors
            found.append((number, Peer(tensor, other, setup.is_whole[number], is_host)))
    return found


def _tensors_of(setup: Setup, device: int) -> list[int]:
    """Tensors that are ever on a device."""
    found = set(setup.split.present[device])
    for op in setup.calls_of(device):
        call = setup.program.calls[op]
        found |= {t for t in call.outputs if t is not None}
        found |= {*call.reads, *call.written, *setup.graph.made_by(op)}
    found |= {t.tensor for t in setup.split.transfers if device in (t.src, t.dst)}
    return sorted(found)


def _describer(
    setup: Setup, instructions: Sequence[Instruction], device_names: Sequence[str]
) -> Callable[[Position], str]:
    """What a rank does at a position, for people."""

    def describe(position: Position) -> str:
        if not position.step or position.instruction >= len(instructions):
            return "starting"
        do, number = instructions[position.instruction]
        place = f"in step {position.step}"
        if do == Do.RUN:
            return f"running op {setup.graph.op_names[number]!r} {place}"
        if do == Do.DROP:
            return f"freeing {setup.graph.tensor_names[number]!r} {place}"
        tensor, src, dst = setup.split.transfers[number]
        name = setup.graph.tensor_names[tensor]
        if do == Do.SEND:
            return f"sending {name!r} to {device_names[dst]} {place}"
        return f"waiting for {name!r} from {device_names[src]} {place}"

    return describe


def _unpacked(
    setup: Setup, tensors: Sequence[int], buffers: Sequence[Any]
) -> dict[int, torch.Tensor]:
    specs = setup.program.tensors
    return {
        tensor: unpack(from_raw(data), specs[tensor], whole=False)
        for tensor, data in zip(tensors, buffers, strict=True)
    }
