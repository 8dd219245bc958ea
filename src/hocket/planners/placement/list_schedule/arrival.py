"""When data could be on a device, and sending it there. O(reads of an op · copies of a tensor)."""

from __future__ import annotations

from hocket.kernels import kernel
from hocket.planners.placement.list_schedule.state import Net


@kernel
def copy_on(net: Net, tensor: int, device: int) -> int:
    """The copy of a tensor on a device; -1 for none."""
    row = net.tensors[tensor]
    copy: int = row.last_copy
    if copy >= 0 and row.directory >= 0:
        copy = net.directory[row.directory, device]
        return copy
    while copy >= 0 and net.copies[copy].device != device:
        copy = net.copies[copy].older
    return copy


@kernel
def home_of(net: Net, tensor: int) -> int:
    """The device on which a tensor first is; -1 while none is known."""
    row = net.tensors[tensor]
    home: int = row.home if row.producer >= 0 else net.tensors[row.family].home
    return home


@kernel
def is_missing(net: Net, tensor: int, device: int) -> bool:
    """Whether a tensor has a home, and neither that nor a copy is on the device."""
    home = home_of(net, tensor)
    return home >= 0 and home != device and copy_on(net, tensor, device) < 0


@kernel
def _free_s(net: Net, ready_s: float, src: int, dst: int) -> float:
    """From when on a transfer could run."""
    route = net.routes[src, dst]
    if route.send_queue < 0:
        return ready_s
    send_s: float = net.queue_free_s[route.send_queue]
    receive_s: float = net.queue_free_s[route.receive_queue]
    return max(ready_s, max(send_s, receive_s))


@kernel
def data_s(net: Net, op: int, device: int) -> float:
    """When all that an op reads could be on a device; its predecessors must be placed."""
    latest_s, sent_s, sender = 0.0, 0.0, -1
    row = net.ops[op]
    for index in range(row.read_start, row.read_stop):
        tensor = net.reads[index]
        src = home_of(net, tensor)
        if src < 0 or net.tensors[tensor].is_everywhere:
            continue
        if src == device:
            latest_s = max(latest_s, net.tensors[tensor].made_s)
            continue
        copy = copy_on(net, tensor, device)
        if copy >= 0:
            latest_s = max(latest_s, net.copies[copy].arrival_s)
            continue
        route, producer = net.routes[src, device], net.tensors[tensor].producer
        transfer_s = route.latency_s + net.tensors[tensor].work * route.unit_s
        # Tensors of one producer stand together and follow each other through the queues.
        follows = producer == sender and producer >= 0 and route.send_queue >= 0
        sent_s = sent_s + transfer_s if follows else transfer_s
        sender = producer
        arrival_s = _free_s(net, net.tensors[tensor].made_s, src, device) + sent_s
        latest_s = max(latest_s, arrival_s)
    return latest_s


@kernel
def remote_s(net: Net, op: int) -> tuple[int, float]:
    """A tensor that an op reads, and when it could be where it is not: the latest over its reads.

    The tensor is -1 where the op reads nothing that has to be sent.
    """
    latest, latest_s = -1, 0.0
    row = net.ops[op]
    for index in range(row.read_start, row.read_stop):
        tensor = net.reads[index]
        src = home_of(net, tensor)
        if src < 0 or net.tensors[tensor].is_everywhere:
            continue
        route = net.routes[src, src]
        transfer_s = route.least_latency_s + net.tensors[tensor].work * route.least_unit_s
        free_s = net.tensors[tensor].made_s
        if route.send_queue >= 0:
            free_s = max(free_s, net.queue_free_s[route.send_queue])
        if latest < 0 or free_s + transfer_s > latest_s:
            latest, latest_s = tensor, free_s + transfer_s
    return latest, latest_s


@kernel
def send(net: Net, copy: int, tensor: int, device: int) -> None:
    """Bring a tensor to a device, as the copy of the given number."""
    arrival_s, src = 0.0, home_of(net, tensor)
    if not net.tensors[tensor].is_everywhere:
        route = net.routes[src, device]
        transfer_s = route.latency_s + net.tensors[tensor].work * route.unit_s
        arrival_s = _free_s(net, net.tensors[tensor].made_s, src, device) + transfer_s
        if route.send_queue >= 0:
            net.queue_free_s[route.send_queue] = arrival_s
            net.queue_free_s[route.receive_queue] = arrival_s
    row = net.copies[copy]
    row.device = device
    row.arrival_s = arrival_s
    row.older = net.tensors[tensor].last_copy
    net.tensors[tensor].last_copy = copy
    if net.tensors[tensor].directory >= 0:
        net.directory[net.tensors[tensor].directory, device] = copy
