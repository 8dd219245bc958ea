"""Stamp out identical blocks: a recording with five blocks of a run becomes one with all of them.

Of the recorded blocks 0 to 4 the inner ones 1, 2 and 3 must be alike, call by call: same op, same
signature, and every tensor they use found at the same place in the same block, the previous, the
next, or outside. Then copies of block 2 are put between 2 and 3, forward and backward; whatever
does not fit raises `NotRepeatable`, and the caller records the whole model. O(calls).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hocket.capture.blocks import NUM_FIRST, NUM_LAST, TEMPLATE, BlockRun, NotRepeatable
from hocket.capture.recording import (
    RawCall,
    Recording,
    Ref,
    Source,
    Span,
    map_tree,
    moved,
    same_leaves,
)
from hocket.graph import Phase

_NUM_KEPT = NUM_FIRST + NUM_LAST
_OUTSIDE = -1
_FIXED = (_OUTSIDE, 0, _NUM_KEPT - 1)
"""Where the copies find the same things as the block that they are made from."""

Place = tuple[int, Any]
"""(block, position inside it); for values outside all blocks (-1, number)."""


@dataclass
class _RunLayout:
    """Where the blocks of a run lie in a recording."""

    recording: Recording
    run: BlockRun
    forward: list[range]
    backward: list[range]

    def __post_init__(self) -> None:
        self.block_of_call = [_OUTSIDE] * len(self.recording.calls)
        for block in range(_NUM_KEPT):
            for call in (*self.forward[block], *self.backward[block]):
                self.block_of_call[call] = block
        names = {source.value: source.name for source in self.recording.sources}
        first_of_storage: dict[int, int] = {}
        for number, value in enumerate(self.recording.values):
            first_of_storage.setdefault(value.storage, number)
        self.owner = [first_of_storage[value.storage] for value in self.recording.values]
        self.place = [self._place(number, names.get(number)) for number in range(len(self.owner))]

    def _place(self, number: int, name: str | None) -> Place:
        if name is not None:
            for block, path in enumerate(self.run.kept):
                if name.startswith(f"{path}."):
                    return block, name[len(path) :]
            return _OUTSIDE, number
        call = self.recording.producer[number]
        block = self.block_of_call[call] if call >= 0 else _OUTSIDE
        if block == _OUTSIDE:
            return _OUTSIDE, number
        outputs = self.recording.calls[call].outputs
        return block, (*self.position(call, block), outputs.index(number))

    def position(self, call: int, block: int) -> tuple[Phase, int]:
        """A call by its distance from the start of its block's segment."""
        if call in self.forward[block]:
            return Phase.FORWARD, call - self.forward[block].start
        return Phase.BACKWARD, call - self.backward[block].start


def expand(recording: Recording, run: BlockRun, all_sources: Sequence[str]) -> Recording:
    """The recording with all blocks of ``run``; ``all_sources`` names sources in final order."""
    layout = _locate(recording, run)
    _check_outside(layout)
    for block in (TEMPLATE - 1, TEMPLATE):
        _check_alike(layout, block)
    return _Stamp(layout, all_sources).expanded()


# ── where the blocks are ─────────────────────────────────────────────────────────────────────────


def _locate(recording: Recording, run: BlockRun) -> _RunLayout:
    spans = [span for span in recording.spans if span.module in set(run.kept)]
    if any(span.start == span.stop for span in recording.spans):
        raise NotRepeatable("a block runs nothing")
    if tuple(span.module for span in spans) != run.kept:
        raise NotRepeatable("blocks do not run once each and in order")
    starts = [span.start for span in spans]
    if any(a.stop > b.start for a, b in pairwise(spans)):
        raise NotRepeatable("blocks run inside each other")
    forward = [range(a, b) for a, b in zip(starts, [*starts[1:], spans[-1].stop], strict=True)]
    backward: list[list[int]] = [[] for _ in run.kept]
    for index, call in enumerate(recording.calls):
        if call.phase == Phase.BACKWARD and starts[0] <= call.partner < spans[-1].stop:
            backward[bisect_right(starts, call.partner) - 1].append(index)
    segments = [range(calls[0], calls[-1] + 1) if calls else range(0) for calls in backward]
    for segment, calls in zip(segments, backward, strict=True):
        if len(segment) != len(calls):
            raise NotRepeatable("backward calls of blocks are interleaved")
    inner = [segment for segment in segments if len(segment)]
    if inner and (len(inner) < _NUM_KEPT or any(a.start != b.stop for a, b in pairwise(inner))):
        raise NotRepeatable("backward calls of blocks do not follow each other")
    return _RunLayout(recording, run, forward, segments)


# ── what must hold ───────────────────────────────────────────────────────────────────────────────


def _check_outside(layout: _RunLayout) -> None:
    """Inner blocks are used by themselves and their neighbours only."""
    inner = range(1, _NUM_KEPT - 1)
    recording = layout.recording
    for index, call in enumerate(recording.calls):
        user = layout.block_of_call[index]
        for value in (*call.reads, *(n for n in call.outputs if n is not None)):
            block = layout.place[value][0]
            if block in inner and (user == _OUTSIDE or abs(user - block) > 1):
                raise NotRepeatable("an inner block is used from far away")
    kept = list(recording.outputs)
    for parameter, gradient in recording.gradients.items():
        block = layout.place[parameter][0]
        if block == _OUTSIDE:
            kept.append(gradient)
        elif layout.place[gradient][0] != block:
            raise NotRepeatable("the gradient of a block is made outside it")
    if any(layout.place[value][0] in inner for value in kept):
        raise NotRepeatable("an inner block makes what is kept")


def _check_alike(layout: _RunLayout, block: int) -> None:
    """Blocks ``block`` and ``block + 1`` are the same, up to their position."""
    for segments in (layout.forward, layout.backward):
        first, second = segments[block], segments[block + 1]
        if len(first) != len(second):
            raise NotRepeatable("blocks have different numbers of calls")
        for a, b in zip(first, second, strict=True):
            calls = layout.recording.calls
            if not _same_call(layout, calls[a], calls[b], block):
                raise NotRepeatable(f"blocks differ at {calls[a].cost.signature!r}")
    if _gradient_places(layout, block) != _gradient_places(layout, block + 1):
        raise NotRepeatable("blocks have different gradients")


def _gradient_places(layout: _RunLayout, block: int) -> dict[Any, Any]:
    return {
        layout.place[parameter][1]: layout.place[gradient][1]
        for parameter, gradient in layout.recording.gradients.items()
        if layout.place[parameter][0] == block
    }


def _same_call(layout: _RunLayout, a: RawCall, b: RawCall, block: int) -> bool:
    paths = layout.run.kept
    if (a.function, a.cost, a.phase, a.draws, a.is_view) != (
        b.function, b.cost, b.phase, b.draws, b.is_view,
    ):  # fmt: skip
        return False
    if moved(a.module, paths[block], paths[block + 1]) != b.module:
        return False
    if (a.partner < 0) != (b.partner < 0):
        return False
    if a.partner >= 0 and layout.position(a.partner, block) != layout.position(
        b.partner, block + 1
    ):
        return False
    mine = [*a.reads, *a.writes, *(-1 if n is None else n for n in a.outputs)]
    others = [*b.reads, *b.writes, *(-1 if n is None else n for n in b.outputs)]
    if len(mine) != len(others):
        return False
    if not all(_same_value(layout, x, y, block) for x, y in zip(mine, others, strict=True)):
        return False
    return same_leaves(
        (a.args, a.kwargs), (b.args, b.kwargs), lambda x, y: _same_value(layout, x, y, block)
    )


def _same_value(layout: _RunLayout, a: int, b: int, block: int) -> bool:
    if a < 0 or b < 0:
        return a == b
    if layout.recording.values[a].layout != layout.recording.values[b].layout:
        return False
    return all(
        _same_place(layout.place[x], layout.place[y], block)
        for x, y in ((a, b), (layout.owner[a], layout.owner[b]))
    )


def _same_place(a: Place, b: Place, block: int) -> bool:
    """True if the place that ``block`` uses is, seen from there, the one that its next uses."""
    if a == b:
        return a[0] in _FIXED
    if a[0] - block == b[0] - block - 1 and a[1] == b[1]:
        return True
    # What stands before the first inner block and behind the last one may be built differently;
    # the other pair of blocks proves how inner neighbours use each other.
    before = block == TEMPLATE - 1 and b[0] == TEMPLATE - 1 and a[0] in _FIXED
    behind = block == TEMPLATE and a[0] == TEMPLATE + 1 and b[0] in _FIXED
    return before or behind


# ── copies ───────────────────────────────────────────────────────────────────────────────────────


class _Stamp:
    """Builds the expanded recording; blocks are numbered by their position in the whole run."""

    def __init__(self, layout: _RunLayout, all_sources: Sequence[str]) -> None:
        self.layout = layout
        self.all_sources = all_sources
        old = layout.recording
        self.new = replace(old, storage_bytes=list(old.storage_bytes), values=list(old.values),
                           gradients=dict(old.gradients))  # fmt: skip
        self.num_copies = len(layout.run.left_out)
        self.last = NUM_FIRST + self.num_copies
        """Position of the first recorded block behind the copies."""
        self.at: dict[tuple[int, Any], int] = {}
        self.numbers = {
            block: [n for n, place in enumerate(layout.place) if place[0] == block]
            for block in range(_NUM_KEPT)
        }

    def expanded(self) -> Recording:
        self._make_values()
        self._make_storages()
        self._make_sources()
        self._make_gradients()
        self._make_calls()
        return self.new

    def _position(self, block: int) -> int:
        """Position in the whole run of a recorded block."""
        return block if block < NUM_FIRST else block + self.num_copies

    def _make_values(self) -> None:
        old = self.layout
        for block, numbers in self.numbers.items():
            for number in numbers:
                self.at[self._position(block), old.place[number][1]] = number
        for copy in range(NUM_FIRST, self.last):
            for number in self.numbers[TEMPLATE]:
                self.at[copy, old.place[number][1]] = len(self.new.values)
                self.new.values.append(self.new.values[number])

    def _seen_from(self, position: int, block: int, value: int) -> int:
        """What stands for ``value`` when recorded ``block``, which uses it, is at ``position``."""
        home, inside = self.layout.place[value]
        if home == _OUTSIDE or abs(home - block) > 1:
            return value
        return self.at[position + home - block, inside]

    def _make_storages(self) -> None:
        """New storages for what the copies own; views follow the owner of what they look at."""
        old, new = self.layout, self.new
        copies = range(NUM_FIRST, self.last)
        owners = [number for number in self.numbers[TEMPLATE] if old.owner[number] == number]
        for copy in copies:
            for number in owners:
                storage = old.recording.values[number].storage
                new.storage_bytes.append(old.recording.storage_bytes[storage])
                self._set_storage(copy, number, len(new.storage_bytes) - 1)
        moved = [(TEMPLATE, position) for position in (TEMPLATE, *copies)]
        for block, position in (*moved, (TEMPLATE + 1, self.last)):
            for number in self.numbers[block]:
                if old.owner[number] != number:
                    owner = self._seen_from(position, block, old.owner[number])
                    self._set_storage(position, number, new.values[owner].storage)

    def _set_storage(self, position: int, number: int, storage: int) -> None:
        target = self.at[position, self.layout.place[number][1]]
        self.new.values[target] = self.new.values[target]._replace(storage=storage)

    def _make_sources(self) -> None:
        known = {source.name: source for source in self.new.sources}
        template = self.layout.run.kept[TEMPLATE]
        sources = []
        left_out = {path: NUM_FIRST + i for i, path in enumerate(self.layout.run.left_out)}
        for name in self.all_sources:
            if name in known:
                sources.append(known[name])
                continue
            for path, position in left_out.items():
                if name.startswith(f"{path}."):
                    rest = name[len(path) :]
                    if template + rest not in known:
                        raise NotRepeatable(f"no tensor like {name!r} was recorded")
                    role = known[template + rest].role
                    sources.append(Source(name, role, self.at[position, rest]))
                    break
        self.new.sources = sources

    def _make_gradients(self) -> None:
        place = self.layout.place
        for parameter, gradient in self.layout.recording.gradients.items():
            if place[parameter][0] == TEMPLATE:
                for copy in range(NUM_FIRST, self.last):
                    at = self.at[copy, place[parameter][1]], self.at[copy, place[gradient][1]]
                    self.new.gradients[at[0]] = at[1]

    def _make_calls(self) -> None:
        old = self.layout.recording.calls
        forward, backward = self.layout.forward, self.layout.backward
        split = forward[TEMPLATE].stop
        back = backward[TEMPLATE].start if len(backward[TEMPLATE]) else len(old)
        order: list[tuple[int, int]] = [(call, -1) for call in range(split)]
        copies = range(NUM_FIRST, self.last)
        order += [(call, copy) for copy in copies for call in forward[TEMPLATE]]
        order += [(call, -1) for call in range(split, back)]
        order += [(call, copy) for copy in reversed(copies) for call in backward[TEMPLATE]]
        order += [(call, -1) for call in range(back, len(old))]
        index_of = {key: index for index, key in enumerate(order)}
        self.new.calls = [self._call(old[call], call, copy, index_of) for call, copy in order]
        self.new.spans = [
            Span(span.module, index_of[span.start, -1], index_of[span.stop - 1, -1] + 1)
            for span in self.layout.recording.spans
        ]
        self._make_producers()

    def _make_producers(self) -> None:
        known = {source.value for source in self.new.sources}
        self.new.producer = [-1] * len(self.new.values)
        for index, call in enumerate(self.new.calls):
            for output in call.outputs:
                if output is not None and output not in known:
                    known.add(output)
                    self.new.producer[output] = index

    def _call(
        self, call: RawCall, index: int, copy: int, index_of: dict[tuple[int, int], int]
    ) -> RawCall:
        block = self.layout.block_of_call[index]
        position = copy if copy >= 0 else self._position(block) if block >= 0 else -1
        partner = call.partner
        if partner >= 0:
            partner = index_of[partner, copy]
        if block not in (TEMPLATE, TEMPLATE + 1):
            return call._replace(partner=partner)

        def seen(value: int) -> int:
            return self._seen_from(position, block, value)

        def change(leaf: Any) -> Any:
            return Ref(seen(leaf.number)) if isinstance(leaf, Ref) else leaf

        module = call.module
        if copy >= 0:
            paths = self.layout.run.paths
            module = moved(module, paths[TEMPLATE], paths[copy])
        return call._replace(
            args=map_tree(call.args, change),
            kwargs=map_tree(call.kwargs, change),
            reads=tuple(seen(value) for value in call.reads),
            outputs=tuple(None if value is None else seen(value) for value in call.outputs),
            writes=tuple(seen(value) for value in call.writes),
            module=module,
            partner=partner,
        )
