"""States as bytes and back, as a service stores them."""

from __future__ import annotations

from hocket.fleet.rounds import FleetState
from hocket.service.store.snapshot import put_together, take_apart


def pack(state: FleetState) -> list[bytes]:
    head, arrays = take_apart(state)
    return [head, *(array.tobytes() for array in arrays)]


def unpack(packed: list[bytes]) -> FleetState:
    return put_together(packed[0], packed[1:])
