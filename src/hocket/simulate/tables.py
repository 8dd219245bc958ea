"""What the compiled engine reads and returns, as tuples of arrays.

They stand apart from the kernel so that preparing them needs no compiler. All whole numbers are
64 bits wide: each further width would compile the engine's functions once more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray

SHARED, QUEUED, PARALLEL = 0, 1, 2
"""How transfers affect each other; positions in ``hocket.plan.problem.TRANSFER_MODES``."""


class OpTable(NamedTuple):
    """Ops: what they take, wait for and send."""

    device: ByteArray
    duration_s: FloatArray
    alloc_bytes: ByteArray
    """Bytes taken at the start: made storages and workspace."""
    workspace_bytes: ByteArray
    num_waits: ByteArray
    """How many of the tensors that it reads are not there when the step begins."""
    made_ptr: ByteArray
    read_ptr: ByteArray
    send_ptr: ByteArray
    """See `hocket.simulate.places.Places`."""
    priority: FloatArray
    lineup_ptr: ByteArray
    """Device d has ``lineup_ptr[d + 1] - lineup_ptr[d]`` ops."""
    lineup: ByteArray
    """With a strict order, device d runs ``lineup[lineup_ptr[d]:lineup_ptr[d + 1]]``."""


class PlaceTable(NamedTuple):
    """Places; see `hocket.simulate.places.Places`."""

    device: ByteArray
    storage: ByteArray
    num_bytes: ByteArray
    is_kept: NDArray[np.bool_]
    num_uses: ByteArray
    reader: ByteArray
    read_place: ByteArray
    start_bytes: ByteArray
    """Bytes on each device when the step begins."""


class TransferTable(NamedTuple):
    """Transfers in order of (tensor, destination)."""

    place: ByteArray
    tensor: ByteArray
    send_queue: ByteArray
    receive_queue: ByteArray
    latency_s: FloatArray
    work: FloatArray
    duration_s: FloatArray
    """With nothing else on the way."""
    route: ByteArray


class RouteTable(NamedTuple):
    """Routes that transfers take, told apart by their channels."""

    size_ptr: ByteArray
    """Route r carries ``size_ptr[r + 1] - size_ptr[r]`` transfers."""
    path_ptr: ByteArray
    path: ByteArray
    """Route r crosses channels ``path[path_ptr[r]:path_ptr[r + 1]]``."""
    hop_route: ByteArray
    """The route of each hop, that is of each entry of ``path``."""
    on_ptr: ByteArray
    """Channel c is crossed by ``on_ptr[c + 1] - on_ptr[c]`` routes."""
    capacity: FloatArray
    """Work per second of each channel."""
