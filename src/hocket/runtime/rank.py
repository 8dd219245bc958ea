"""The program of one rank of a placement: ``python -m hocket.runtime.rank``, started by `spawn`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hocket.processes.child import Parent, live

if TYPE_CHECKING:
    from hocket.runtime.ranks import RankRunner
    from hocket.runtime.record import StepRecord

Header = dict[str, Any]


def run(parent: Parent) -> None:
    """Run the steps that the parent asks for and report each."""
    order = parent.receive()
    if order is None:
        return
    header = order.header
    runner = _prepare(header, order.buffers, parent)
    # Its tensors are copies: without this every parameter would be there twice.
    order.buffers.clear()
    for number in range(1, header["steps"] + 1):
        record = runner.step(number)
        _report(parent, header, number, record, runner)
    if header["wants_results"]:
        _report_results(parent, runner)


def _prepare(header: Header, buffers: list[bytearray], parent: Parent) -> RankRunner:
    import torch

    from hocket.runtime.connect import join_group
    from hocket.runtime.peer import Peer
    from hocket.runtime.ranks import RankRunner
    from hocket.runtime.split import Do, Instruction
    from hocket.runtime.streams import new_stream
    from hocket.runtime.wire import decode_call, decode_spec, from_raw
    from hocket.runtime.worker import DeviceWorker

    torch.set_num_threads(header["threads"])
    device = torch.device(header["device"])
    specs = {tensor: decode_spec(data) for tensor, data in header["specs"]}
    flat = [from_raw(data) for data in buffers]
    num_storages = len(header["storages"])
    storages = dict(zip(header["storages"], flat[:num_storages], strict=True))
    constants = [
        data.view(getattr(torch, dtype)).view(shape)
        for (dtype, shape), data in zip(header["constants"], flat[num_storages:], strict=True)
    ]
    calls = {op: decode_call(data, constants) for op, data in header["calls"]}
    stream = new_stream(device)
    peers = {number: Peer(*peer) for number, peer in header["peers"]}
    sent = {peer.tensor for peer in peers.values()}
    worker = DeviceWorker(calls, specs, dict(header["draws"]), device, header["seed"], sent)
    worker.load(header["present"], storages)
    join_group(header, device)
    return RankRunner(
        worker,
        stream,
        [Instruction(Do(do), number) for do, number in header["instructions"]],
        peers,
        device_index=header["device_index"],
        slowdown=header["slowdown"],
        progress=parent.move,
    )


def _report(
    parent: Parent, header: Header, number: int, record: StepRecord, runner: RankRunner
) -> None:
    loss = header["loss"]
    if loss is not None:
        record.loss = float(runner.worker.held[loss])
    plain, arrays = record.to_arrays()
    parent.send({"what": "step", "number": number, "record": plain}, arrays)


def _report_results(parent: Parent, runner: RankRunner) -> None:
    from hocket.runtime.package import pack
    from hocket.runtime.wire import raw

    worker = runner.worker
    found = {t: value for t, value in worker.held.items() if worker.specs[t].layout is not None}
    parent.send(
        {"what": "results", "tensors": list(found)},
        [raw(pack(value, worker.specs[tensor], whole=False)) for tensor, value in found.items()],
    )


if __name__ == "__main__":
    live(run)
