"""Instructions: a plan lowered to the actions of every device, as tables of arrays.

The tables list ops on streams, places (a tensor on a device), transfers that fill places, and
routes of transfers. `hocket.simulate.lowering` makes them from a problem and a plan. The simulator
times them and the runtime executes them, so the two cannot disagree. All integers have 64 bits,
since every other width would compile the engine's kernels once more.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.kernels.containers import table

_T = TypeVar("_T")
# Declared types of columns, by which tables are allocated.
_DTYPES: dict[Any, Any] = {LongArray: np.int64, FloatArray: np.float64, BoolArray: np.bool_}
SHARED, QUEUED, PARALLEL = 0, 1, 2
"""Models of simultaneous transfers: positions in ``hocket.plan.problem.TRANSFER_MODES``."""


@cache
def _dtypes(kind: Any) -> dict[str, Any]:
    """Return the dtype of each column that a named tuple declares as an array."""
    return {name: _DTYPES.get(declared) for name, declared in get_type_hints(kind).items()}


def constants(kind: type[_T], **columns: Any) -> _T:
    """Return a named tuple of read-only arrays of the declared dtypes."""
    dtypes = _dtypes(cast(Any, kind))
    return kind(**{name: table(values, dtypes[name]) for name, values in columns.items()})


def zeroed(kind: type[_T], count: int, **others: Any) -> _T:
    """Return a named tuple of arrays of ``count`` zeros, except for the columns in ``others``."""
    dtypes = _dtypes(cast(Any, kind)).items()
    blank = {name: np.zeros(count, dtype) for name, dtype in dtypes if name not in others}
    return kind(**blank, **others)


class RunTable(NamedTuple):
    """Ops: their queues, times, allocations, inputs and transfers."""

    device: LongArray
    queue: LongArray
    """Queue ``d * num_streams + s`` is stream s of device d and runs one op at a time."""
    duration_s: FloatArray
    alloc_bytes: LongArray
    """Bytes allocated at the start of the op: the storages that it makes, and its workspace."""
    workspace_bytes: LongArray
    num_waits: LongArray
    """Number of tensors that the op reads and that do not exist yet. The engine counts it down."""
    made_ptr: LongArray
    read_ptr: LongArray
    send_ptr: LongArray
    """Transfers ``send_ptr[i]`` up to ``send_ptr[i + 1]`` become ready when op i ends; transfers
    before ``send_ptr[0]`` are ready at the start of the step."""
    priority: FloatArray
    """Priority of each op: a queue runs the ready op with the smallest value first."""
    lineup_ptr: LongArray
    """Queue q has ``lineup_ptr[q + 1] - lineup_ptr[q]`` ops."""
    lineup: LongArray
    """Ops of queue q in strict order: ``lineup[lineup_ptr[q]:lineup_ptr[q + 1]]``."""
    kernel_s: FloatArray
    """Part of the duration in which the op's kernel is on the device; see `hocket.cost.demand`."""
    issue_s: FloatArray
    """Part of the duration in which the host launches the op."""
    fill: FloatArray
    """Fraction of its device that the op's kernel fills."""
    beside: FloatArray
    """Slowdown while an op of the other stream runs and both fit on the device."""
    other_stream: LongArray
    """Per queue: the queue of the other compute stream on its device; -1 for none."""


class PlaceTable(NamedTuple):
    """Places, which are pairs (tensor, device): first each tensor on its owner device, then the
    others."""

    tensor: LongArray
    device: LongArray
    is_copy: BoolArray
    """True if a transfer copies the tensor to this place."""
    storage: LongArray
    """Place that owns the bytes of this one: itself unless the tensor is a view."""
    num_bytes: LongArray
    """Bytes that the place owns; 0 if another place owns its storage."""
    is_kept: BoolArray
    """True if the bytes are held until the end of the step."""
    num_uses: LongArray
    """Number of uses that must end before the bytes are released: producer, reads and transfers
    out. The engine counts it down."""
    reader: LongArray
    """The op of each entry of ``graph.reads``."""
    read_place: LongArray
    """The place of each entry of ``graph.reads``."""
    start_bytes: LongArray
    """Bytes on each device when the step begins."""


class TransferTable(NamedTuple):
    """Transfers in order of (tensor, destination), each from the tensor's owner device."""

    place: LongArray
    """Place that the transfer fills."""
    tensor: LongArray
    send_queue: LongArray
    receive_queue: LongArray
    latency_s: FloatArray
    work: FloatArray
    duration_s: FloatArray
    """Seconds without contention on the route."""
    route: LongArray


class RouteTable(NamedTuple):
    """Routes of transfers; routes with the same channels are one."""

    size_ptr: LongArray
    """Route r has ``size_ptr[r + 1] - size_ptr[r]`` transfers."""
    path_ptr: LongArray
    path: LongArray
    """Route r crosses channels ``path[path_ptr[r]:path_ptr[r + 1]]``."""
    hop_route: LongArray
    """Route of each hop; a hop is an entry of ``path``."""
    on_ptr: LongArray
    """``on_ptr[c + 1] - on_ptr[c]`` routes cross channel c."""
    capacity: FloatArray
    """Work per second of each channel: bytes, or seconds stated per link."""


class Instructions(NamedTuple):
    """Actions of every device in one step."""

    runs: RunTable
    places: PlaceTable
    transfers: TransferTable
    routes: RouteTable


class Given(NamedTuple):
    """Constants of a problem, which are the same for all its plans."""

    owner_op: LongArray
    """Op whose device each tensor is on first; -1 for none."""
    is_made: BoolArray
    is_input: BoolArray
    is_held: BoolArray
    alias_of: LongArray
    tensor_bytes: LongArray
    work: FloatArray
    """Work to send each tensor: its bytes, or the seconds per link that the graph's file states."""
    reads: LongArray
    user_ptr: LongArray
    user_read: LongArray
    """Reads of tensor t: ``user_read[user_ptr[t]:user_ptr[t + 1]]`` are positions in ``reads``."""
    op_stream: LongArray
    """Stream of each op."""
    op_s: FloatArray
    """[device type, op]: seconds."""
    demand: FloatArray
    """[quantity, device type, op], as in `Costs`; empty if the costs have none."""
    row: LongArray
    """Device type of each device, an index into ``op_s``."""
    memory_bytes: LongArray
    latency_s: FloatArray
    """Latency of each pair ``src * devices + dst``; the columns below use the same index."""
    hops: LongArray
    """Number of links on the route if seconds are stated per link, else 1."""
    slowest: FloatArray
    """Smallest capacity of the channels on the route."""
    route: LongArray
    send_queue: LongArray
    receive_queue: LongArray
    mode: LongArray
    """One value: the model of simultaneous transfers."""
    num_streams: LongArray
    """One value: the number of streams of each device."""


class Scratch(NamedTuple):
    """Intermediate results of one lowering."""

    away_ptr: LongArray
    """Places of tensor t outside its owner device are ``away_ptr[t]`` up to ``away_ptr[t + 1]``."""
    transfer_ptr: LongArray
    """Transfers of tensor t are ``transfer_ptr[t]`` up to ``transfer_ptr[t + 1]``."""
    place_on: LongArray
    """Per device: the place of the current tensor there; -1 for none."""
    num_found: LongArray
    """Two values: the number of places and the number of transfers."""
