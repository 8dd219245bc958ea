"""Instructions: a plan lowered to the actions of every device, as tables of arrays.

Runs of ops on streams, places where tensors are, transfers that fill them, routes that transfers
take. `hocket.simulate.lowering` makes them from a problem and a plan; the simulator times them and
the runtime executes them, so that the two cannot disagree. All whole numbers are 64 bits wide:
each further width would compile the engine's functions once more.
"""

from __future__ import annotations

from typing import NamedTuple

from hocket.base.arrays import BoolArray, FloatArray, LongArray

SHARED, QUEUED, PARALLEL = 0, 1, 2
"""Contention of transfers: positions in ``hocket.plan.problem.TRANSFER_MODES``."""


class RunTable(NamedTuple):
    """Ops: where they run, what they take, wait for and send."""

    device: LongArray
    queue: LongArray
    """Stream s of device d is queue ``d * num_streams + s``, which runs one op at a time."""
    duration_s: FloatArray
    alloc_bytes: LongArray
    """Bytes taken at the start: made storages and workspace."""
    workspace_bytes: LongArray
    num_waits: LongArray
    """Number of tensors that it reads and that are not there when the step begins."""
    made_ptr: LongArray
    read_ptr: LongArray
    send_ptr: LongArray
    """The end of op i makes transfers ``send_ptr[i]`` up to ``send_ptr[i + 1]`` ready; those before
    ``send_ptr[0]`` are ready when the step begins."""
    priority: FloatArray
    """Of the ops that are ready, a queue runs the one with the smallest value first."""
    lineup_ptr: LongArray
    """Queue q has ``lineup_ptr[q + 1] - lineup_ptr[q]`` ops."""
    lineup: LongArray
    """With a strict order, queue q runs ``lineup[lineup_ptr[q]:lineup_ptr[q + 1]]``."""
    kernel_s: FloatArray
    """Of the duration: what the op is on its device; see `hocket.cost.demand`."""
    issue_s: FloatArray
    """Of the duration: what the host takes to issue it."""
    fill: FloatArray
    """Share of its device that the op fills."""
    beside: FloatArray
    """Slowdown while an op of the other stream runs that fits on the device with it."""
    other_stream: LongArray
    """Per queue: the queue of the other compute stream on its device; -1 for none."""


class PlaceTable(NamedTuple):
    """Pairs (tensor, device): tensors on their owner devices, then the others in order."""

    tensor: LongArray
    device: LongArray
    is_copy: BoolArray
    """True if a transfer brings the tensor there."""
    storage: LongArray
    """The place whose bytes this one lives in: itself unless it is an alias."""
    num_bytes: LongArray
    """Bytes that come with the place: 0 where it lives in another's."""
    is_kept: BoolArray
    """True if the bytes stay until the end of the step."""
    num_uses: LongArray
    """Number of ends that release the bytes: of the producer, each read and each transfer out."""
    reader: LongArray
    """The op of each entry of ``graph.reads``."""
    read_place: LongArray
    """The place of each entry of ``graph.reads``."""
    start_bytes: LongArray
    """Bytes on each device when the step begins."""


class TransferTable(NamedTuple):
    """Transfers in order of (tensor, destination); a tensor leaves from its owner device."""

    place: LongArray
    """The place that it fills."""
    tensor: LongArray
    send_queue: LongArray
    receive_queue: LongArray
    latency_s: FloatArray
    work: FloatArray
    duration_s: FloatArray
    """Without contention on the route."""
    route: LongArray


class RouteTable(NamedTuple):
    """Routes that transfers take, distinct by their channels."""

    size_ptr: LongArray
    """Route r has ``size_ptr[r + 1] - size_ptr[r]`` transfers."""
    path_ptr: LongArray
    path: LongArray
    """Route r crosses channels ``path[path_ptr[r]:path_ptr[r + 1]]``."""
    hop_route: LongArray
    """The route of each hop, that is of each entry of ``path``."""
    on_ptr: LongArray
    """Channel c is crossed by ``on_ptr[c + 1] - on_ptr[c]`` routes."""
    capacity: FloatArray
    """Work per second of each channel."""


class Instructions(NamedTuple):
    """Actions of every device in one step."""

    runs: RunTable
    places: PlaceTable
    transfers: TransferTable
    routes: RouteTable


class Given(NamedTuple):
    """Constants of a problem, the same for all plans."""

    owner_op: LongArray
    """Per tensor: the op at whose device it first is; -1 for none."""
    is_made: BoolArray
    is_input: BoolArray
    is_held: BoolArray
    alias_of: LongArray
    tensor_bytes: LongArray
    work: FloatArray
    """Per tensor: bytes, or stated seconds per link."""
    reads: LongArray
    user_ptr: LongArray
    user_read: LongArray
    """Reads of tensor t: ``user_read[user_ptr[t]:user_ptr[t + 1]]`` are positions in ``reads``."""
    op_stream: LongArray
    """Per op: the stream of its device that it runs on."""
    op_s: FloatArray
    """[kind, op]."""
    demand: FloatArray
    """[share, kind, op], as in `Costs`; without rows where there is one stream."""
    row: LongArray
    """Row of ``op_s`` for each device."""
    memory_bytes: LongArray
    latency_s: FloatArray
    """Per pair ``src * devices + dst``, as the following."""
    hops: LongArray
    """Links of the route where seconds are stated per link, else 1."""
    slowest: FloatArray
    """Least capacity on the route."""
    route: LongArray
    send_queue: LongArray
    receive_queue: LongArray
    mode: LongArray
    """One number: how transfers affect each other."""
    num_streams: LongArray
    """One number: streams of each device."""


class Scratch(NamedTuple):
    """Passing results of one lowering."""

    away_ptr: LongArray
    """Places of tensor t on other devices: ``away_ptr[t]`` up to ``away_ptr[t + 1]``."""
    transfer_ptr: LongArray
    """Transfers of tensor t, likewise."""
    place_on: LongArray
    """Per device: the place there of the tensor at hand."""
    num_found: LongArray
    """Two numbers: how many places and how many transfers there are."""
