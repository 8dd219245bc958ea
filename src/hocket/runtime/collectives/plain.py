"""`carry.c` in Python: for machines without a C compiler, and to hold the two against each other.

Every rule is the same, so are the bytes on the wire and the order of every sum; ranks that run the
one may talk to ranks that run the other.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.runtime.collectives.layout import KINDS

if TYPE_CHECKING:
    from hocket.runtime.collectives.carry import Carry

_DONE, _GOES_ON, _CLOSED, _GARBLED = range(4)
_HEADER = 8
_TURNS = 64
_ENDS = select.POLLHUP | select.POLLERR


def go_on(carry: Carry, slice_s: float) -> int:
    """Work until all is done, or for a slice of time."""
    if carry._held is None:
        carry._held = _Plain(carry)
    state: int = carry._held.go_on(slice_s)
    return state


class _Plain:
    def __init__(self, carry: Carry) -> None:
        self.carry = carry
        self.heaps: list[list[int]] = [[] for _ in carry.connections.fd]
        self.sockets: dict[int, socket.socket] = {}

    def go_on(self, slice_s: float) -> int:
        carry, end_s = self.carry, time.monotonic() + slice_s
        seen = carry.connections
        peers = [peer for peer, fd in enumerate(seen.fd.tolist()) if fd >= 0]
        self.sockets = {peer: socket.socket(fileno=int(seen.fd[peer])) for peer in peers}
        try:
            for peer in peers:
                if seen.has_left[peer] and carry.left_in[peer] > 0:
                    carry.who[0] = peer
                    return _CLOSED
                if seen.in_header_done[peer] == _HEADER and (state := self._receive(peer)):
                    carry.who[0] = peer
                    return state
            while True:
                self._take_ready()
                if (
                    carry.num_finals[0] == carry.wanted_finals
                    and carry.num_sends[0] == carry.wanted_sends
                ):
                    return _DONE
                before_s = time.monotonic()
                if before_s >= end_s:
                    return _GOES_ON
                state = self._turn(peers, end_s - before_s)
                if state != _DONE:
                    return state
        finally:
            for used in self.sockets.values():
                used.detach()

    def _turn(self, peers: list[int], rest_s: float) -> int:
        carry, seen = self.carry, self.carry.connections
        wanting = [p for p in peers if self.heaps[p] or carry.out_item[p] >= 0]
        hearing = [p for p in peers if not self._is_paused(p) and not seen.has_left[p]]
        waited_s = time.monotonic()
        poll = select.poll()
        events = dict.fromkeys(hearing, select.POLLIN)
        for peer in wanting:
            events[peer] = events.get(peer, 0) | select.POLLOUT
        number = {int(seen.fd[peer]): peer for peer in events}
        for peer, wanted in events.items():
            poll.register(int(seen.fd[peer]), wanted)
        poll.register(seen.wake_fd, select.POLLIN)
        found = poll.poll(1e3 * rest_s + 1)
        waited_s = time.monotonic() - waited_s
        for peer in wanting:
            seen.busy_s[peer] += waited_s
        for descriptor, happened in found:
            if descriptor == seen.wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(descriptor)
                continue
            peer, state = number[descriptor], _DONE
            if happened & (select.POLLIN | _ENDS) and not seen.has_left[peer]:
                state = self._receive(peer)
            if state == _DONE and happened & (select.POLLOUT | _ENDS):
                state = self._send(peer)
            if state != _DONE:
                carry.who[0] = peer
                return state
        return _DONE

    def _is_paused(self, peer: int) -> bool:
        seen = self.carry.connections
        early = int(seen.in_header[peer, 0]) >> 16 != self.carry.sequence >> 16
        return bool(seen.in_header_done[peer] == _HEADER and early)

    def _take_ready(self) -> None:
        carry = self.carry
        while carry.num_taken[0] < carry.num_ready[0]:
            chunk = int(carry.ready_queue[carry.num_taken[0]])
            carry.num_taken[0] += 1
            carry.own[chunk] = 1
            self._advance(chunk)

    def _finish(self, chunk: int) -> None:
        carry, layout = self.carry, self.carry.layout
        tree = int(layout.chunk_tree[chunk])
        carry.final[chunk] = 1
        carry.num_finals[0] += 1
        for peer in layout.down_child[layout.down_ptr[tree] : layout.down_ptr[tree + 1]].tolist():
            heapq.heappush(self.heaps[peer], 2 * chunk + 1)
        if carry.note_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(carry.note_fd, 1)
        last = layout.last_chunk
        if last >= 0 and chunk != last and carry.num_finals[0] == last:
            carry.own[last] = 1
            self._advance(last)

    def _advance(self, chunk: int) -> None:
        carry, layout = self.carry, self.carry.layout
        tree = int(layout.chunk_tree[chunk])
        first, stop = layout.up_ptr[tree : tree + 2].tolist()
        if not carry.own[chunk]:
            return
        while carry.added[chunk] < stop - first:
            number = int(carry.added[chunk])
            if not int(carry.arrived[chunk]) >> number & 1:
                return
            carry.added[chunk] += 1
            self._add(chunk, int(layout.scratch_at[first + number]))
        carry.added[chunk] += 1
        if layout.up_parent[tree] >= 0:
            heapq.heappush(self.heaps[int(layout.up_parent[tree])], 2 * chunk)
        elif layout.down_parent[tree] < 0:
            self._finish(chunk)

    def _add(self, chunk: int, scratch_at: int) -> None:
        carry, layout = self.carry, self.carry.layout
        start, size = int(layout.chunk_start[chunk]), int(layout.chunk_size[chunk])
        at = scratch_at + int(layout.chunk_at[chunk])
        into, found = carry.data[start : start + size], carry.scratch[at : at + size]
        if KINDS[carry.kind] == "bfloat16":
            into.view(np.uint16)[:] = _added_bfloat16(into.view(np.uint16), found.view(np.uint16))
        else:
            dtype = np.dtype(KINDS[carry.kind])
            into.view(dtype)[:] += found.view(dtype)

    def _send(self, peer: int) -> int:
        carry, layout = self.carry, self.carry.layout
        while self.heaps[peer] or carry.out_item[peer] >= 0:
            if carry.out_item[peer] < 0:
                carry.out_item[peer], carry.out_done[peer] = heapq.heappop(self.heaps[peer]), 0
            item, done = int(carry.out_item[peer]), int(carry.out_done[peer])
            start, size = int(layout.chunk_start[item >> 1]), int(layout.chunk_size[item >> 1])
            header = np.array([carry.sequence, item], dtype=np.uint32).tobytes()
            body: Any = carry.data[start : start + size]
            parts: list[Any] = [header[done:], body] if done < _HEADER else [body[done - _HEADER :]]
            try:
                sent = self.sockets[peer].sendmsg(parts, [], socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return _DONE
            except OSError:
                return _CLOSED
            carry.connections.bytes_out[peer] += sent
            carry.out_done[peer] += sent
            if carry.out_done[peer] == _HEADER + size:
                carry.out_item[peer] = -1
                carry.num_sends[0] += 1
        return _DONE

    def _receive(self, peer: int) -> int:
        carry, seen = self.carry, self.carry.connections
        for _ in range(_TURNS):
            done = int(seen.in_header_done[peer])
            if done < _HEADER:
                got = self._take(peer, memoryview(seen.in_header[peer].view(np.uint8))[done:])
                if got <= 0:
                    return self._ended(peer) if got == 0 else _DONE
                seen.in_header_done[peer] += got
                seen.bytes_in[peer] += got
                if done + got < _HEADER:
                    continue
                seen.in_body_done[peer] = 0
            if self._is_paused(peer):
                return _DONE
            if int(seen.in_header[peer, 0]) != carry.sequence:
                return _GARBLED
            item = int(seen.in_header[peer, 1])
            body = self._body(peer, item)
            if body is None:
                return _GARBLED
            into, child = body
            rest = into[int(seen.in_body_done[peer]) :]
            if len(rest):
                got = self._take(peer, memoryview(rest))
                if got <= 0:
                    return _CLOSED if got == 0 else _DONE
                seen.in_body_done[peer] += got
                seen.bytes_in[peer] += got
                if got < len(rest):
                    continue
            seen.in_header_done[peer] = 0
            carry.left_in[peer] -= 1
            if child < 0:
                self._finish(item >> 1)
            else:
                carry.arrived[item >> 1] |= np.uint64(1 << child)
                self._advance(item >> 1)
        return _DONE

    def _ended(self, peer: int) -> int:
        """A peer that has done its part may leave before the others have done theirs."""
        seen = self.carry.connections
        seen.has_left[peer] = 1
        is_missed = self.carry.left_in[peer] > 0 or seen.in_header_done[peer] > 0
        return _CLOSED if is_missed else _DONE

    def _take(self, peer: int, into: Any) -> int:
        """Bytes read; 0 where the peer has closed, -1 where nothing is there."""
        try:
            return self.sockets[peer].recv_into(into, len(into), socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError:
            return 0

    def _body(self, peer: int, item: int) -> tuple[Any, int] | None:
        """Where the bytes of a message belong, and which child sends it (-1: the parent)."""
        carry, layout = self.carry, self.carry.layout
        chunk = item >> 1
        if chunk >= layout.num_chunks:
            return None
        tree, size = int(layout.chunk_tree[chunk]), int(layout.chunk_size[chunk])
        if item & 1:
            start = int(layout.chunk_start[chunk])
            return (
                (carry.data[start : start + size], -1) if layout.down_parent[tree] == peer else None
            )
        first, stop = layout.up_ptr[tree : tree + 2].tolist()
        for number, child in enumerate(layout.up_child[first:stop].tolist()):
            if child == peer:
                at = int(layout.scratch_at[first + number] + layout.chunk_at[chunk])
                return carry.scratch[at : at + size], number
        return None


def _added_bfloat16(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sums of the upper halves of floats, rounded to the nearest, ties to even."""
    wide = [(each.astype(np.uint32) << 16).view(np.float32) for each in (a, b)]
    total = wide[0] + wide[1]
    bits = total.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(total), 0x7FC0, rounded).astype(np.uint16)
