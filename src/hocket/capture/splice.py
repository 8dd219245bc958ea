"""Take stand-ins out of a recording, after proof that nobody noticed them.

What the recording shows of each left-out block must be what it shows of the template: the same
arguments, seen from there, and the same calls between it and the next one; and what the stand-ins
made is used by nobody else. Then the block behind them is joined to the template; whatever does not
fit raises `NotRepeatable`. O(calls).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hocket.capture.blocks import NUM_FIRST, NUM_LAST, TEMPLATE, BlockRun, NotRepeatable
from hocket.capture.recording import (
    BlockVisit,
    RawCall,
    Recording,
    Ref,
    Span,
    Value,
    map_tree,
    moved,
    same_leaves,
)
from hocket.capture.standin import PLAIN, same_plain


def without_stand_ins(recording: Recording, run: BlockRun) -> Recording:
    """The recording as if the blocks behind the left-out ones followed the template."""
    return _Removal(recording, run).removed()


class _Removal:
    """Compares left-out blocks with the template and takes them out; blocks go by position."""

    def __init__(self, recording: Recording, run: BlockRun) -> None:
        self.recording, self.run = recording, run
        of_run = set(run.paths)
        self.spans = [span for span in recording.spans if span.module in of_run]
        if tuple(span.module for span in self.spans) != run.paths:
            raise NotRepeatable("blocks do not run once each and in order")
        self.last = len(run.paths) - NUM_LAST
        """Position of the first recorded block behind the stand-ins."""
        self.left_out = range(NUM_FIRST, self.last)
        inner = tuple(f"{path}." for path in run.paths[1:-1])
        self.inner_sources = {s.value for s in recording.sources if s.name.startswith(inner)}
        self.place: dict[int, tuple[int, Any]] = {}
        for block in (TEMPLATE - 1, TEMPLATE, *self.left_out):
            self._find_places(block)
        self.partners: dict[int, list[int]] = {}
        for index, call in enumerate(recording.calls):
            if call.partner >= 0:
                self.partners.setdefault(call.partner, []).append(index)

    def _visit(self, block: int) -> BlockVisit:
        visit = self.recording.visits.get(self.run.paths[block])
        if visit is None:
            raise NotRepeatable("a block was not seen")
        return visit

    def _between(self, block: int) -> range:
        """Calls behind a block and before the next one."""
        return range(self.spans[block].stop, self.spans[block + 1].start)

    def _find_places(self, block: int) -> None:
        """Name what others may use of a block: what it returns, and what is made of that."""
        for number, value in enumerate(self._visit(block).made):
            self.place.setdefault(value, (block, number))
        for position, index in enumerate(self._between(block)):
            for number, output in enumerate(self.recording.calls[index].outputs):
                if output is not None and self.recording.producer[output] == index:
                    self.place.setdefault(output, (block, (position, number)))

    # ── what must hold ───────────────────────────────────────────────────────────────────────

    def _check(self, block: int) -> None:
        template, visit = self._visit(TEMPLATE), self._visit(block)
        span = self.spans[block]
        if span.stop - span.start != len(visit.made):
            raise NotRepeatable("a stand-in runs more than it should")
        pairs = zip(template.inputs, visit.inputs, strict=True)
        if not all(self._same_input(a, b, block) for a, b in pairs):
            raise NotRepeatable("blocks are called with different things")
        mine, others = self._between(TEMPLATE), self._between(block)
        if not self._same_calls(mine, others, block):
            raise NotRepeatable("different things happen between blocks")
        for a, b in zip(mine, others, strict=True):
            if not self._same_backward(self.partners.get(a, []), self.partners.get(b, [])):
                raise NotRepeatable("different things happen between blocks in backward")
        if any(index in self.partners for index in range(span.start, span.stop)):
            raise NotRepeatable("a stand-in runs something in backward")

    def _same_input(self, a: Any, b: Any, block: int) -> bool:
        if a is b:
            return True
        if type(a) is tuple and type(b) is tuple:
            return a[1] == b[1] and self._same_value(a[0], b[0], block)
        return isinstance(a, PLAIN) and same_plain(a, b)

    def _same_value(self, a: int, b: int, block: int) -> bool:
        """True if what the template uses is, seen from there, what ``block`` uses."""
        values = self.recording.values
        if values[a].layout != values[b].layout:
            return False
        mine, other = self.place.get(a), self.place.get(b)
        if mine is None or other is None:
            is_before_all = self.recording.producer[a] < self.spans[1].start
            return a == b and is_before_all and a not in self.inner_sources
        distance = mine[0] - TEMPLATE
        return mine[1] == other[1] and distance == other[0] - block and distance in (0, -1)

    def _same_calls(self, mine: range, others: range, block: int) -> bool:
        calls = self.recording.calls
        return len(mine) == len(others) and all(
            self._same_call(calls[a], calls[b], block) for a, b in zip(mine, others, strict=True)
        )

    def _same_call(self, a: RawCall, b: RawCall, block: int) -> bool:
        def same(x: int, y: int) -> bool:
            return self._same_value(x, y, block)

        return (
            _kind(a) == _kind(b)
            and moved(a.module, self.run.paths[TEMPLATE], self.run.paths[block]) == b.module
            and same_leaves(_touched(a), _touched(b), same)
            and same_leaves((a.args, a.kwargs), (b.args, b.kwargs), same)
        )

    def _same_backward(self, mine: list[int], others: list[int]) -> bool:
        """What is compared is dropped, so that only the kinds of calls count."""
        calls = self.recording.calls
        return [_kind(calls[a]) for a in mine] == [_kind(calls[b]) for b in others]

    # ── taking them out ──────────────────────────────────────────────────────────────────────

    def removed(self) -> Recording:
        for block in self.left_out:
            self._check(block)
        old = self.recording
        forward = range(self.spans[NUM_FIRST].start, self.spans[self.last].start)
        dropped = {*forward, *(b for a in forward for b in self.partners.get(a, []))}
        gone = {
            value for index in dropped for value in old.calls[index].outputs
            if value is not None and old.producer[value] in dropped
        }  # fmt: skip
        if gone & {*old.outputs, *old.gradients.values()}:
            raise NotRepeatable("a left-out block makes what is kept")
        stands_for = self._joined(gone)
        passed_on = self._passed_on(gone)
        user = range(self.spans[self.last].start, self.spans[self.last + 1].start)
        template = self._between(TEMPLATE)
        index_of: dict[int, int] = {}
        calls: list[RawCall] = []
        for index, call in enumerate(old.calls):
            if index in dropped:
                continue
            index_of[index] = len(calls)
            at = index if call.partner < 0 else call.partner
            known = stands_for if at in user else passed_on if at in template else {}
            calls.append(_with_values(call, gone, known))
        calls = [c._replace(partner=index_of.get(c.partner, -1)) for c in calls]
        spans = [
            Span(span.module, index_of[span.start], index_of[span.stop - 1] + 1)
            for span in old.spans if span.module not in set(self.run.left_out)
        ]  # fmt: skip
        producer = [index_of.get(index, -1) for index in old.producer]
        return replace(
            old, calls=calls, spans=spans, producer=producer, values=self._values(gone, stands_for)
        )

    def _joined(self, gone: set[int]) -> dict[int, int]:
        """What the template made, by what the last stand-in shows in its place."""
        mine = {place: value for value, place in self.place.items()}
        return {
            value: mine[TEMPLATE, what] for value, (block, what) in self.place.items()
            if block == self.last - 1 and value in gone
        }  # fmt: skip

    def _passed_on(self, gone: set[int]) -> dict[int, int]:
        """What backward behind the last stand-in reads, by what it reads behind the template."""
        calls = self.recording.calls
        found: dict[int, int] = {}
        for a, b in zip(self._between(TEMPLATE), self._between(self.last - 1), strict=True):
            pairs = zip(self.partners.get(a, []), self.partners.get(b, []), strict=True)
            for mine, other in pairs:
                for x, y in zip(calls[mine].reads, calls[other].reads, strict=True):
                    if x in gone and y not in gone and found.setdefault(x, y) != y:
                        raise NotRepeatable("gradients pass in different ways")
        return found

    def _values(self, gone: set[int], stands_for: dict[int, int]) -> list[Value]:
        """Values with views of what the last stand-in made turned into views of the template's."""
        values = list(self.recording.values)
        storages: dict[int, int] = {}
        for value, other in stands_for.items():
            target = values[other].storage
            if storages.setdefault(values[value].storage, target) != target:
                raise NotRepeatable("left-out blocks share memory in other ways")
        owner: dict[int, int] = {}
        for number, old in enumerate(values):
            owner.setdefault(old.storage, number)
        lost = {storage for storage, number in owner.items() if number in gone} - storages.keys()
        known = {old for number, old in enumerate(values) if number not in gone}
        for number, old in enumerate(self.recording.values):
            if number in gone:
                continue
            if old.storage in lost:
                raise NotRepeatable("a view of a left-out block is used elsewhere")
            values[number] = old._replace(storage=storages.get(old.storage, old.storage))
            if values[number] != old and values[number] in known:
                raise NotRepeatable("a view is made twice")
        return values


def _kind(call: RawCall) -> tuple[Any, ...]:
    outputs = [output is None for output in call.outputs]
    return call.function, call.cost, call.phase, call.draws, call.is_view, outputs


def _touched(call: RawCall) -> list[Ref]:
    return [Ref(value) for value in (*call.reads, *call.writes)]


def _with_values(call: RawCall, gone: set[int], known: dict[int, int]) -> RawCall:
    """A call that reads ``known`` values for the ones that are ``gone``."""
    used = {*call.reads, *call.writes, *(value for value in call.outputs if value is not None)}
    if not used & gone:
        return call
    if not used & gone <= known.keys():
        raise NotRepeatable("a left-out block is used from far away")

    def change(leaf: Any) -> Any:
        return Ref(known.get(leaf.number, leaf.number)) if isinstance(leaf, Ref) else leaf

    return call._replace(
        args=map_tree(call.args, change),
        kwargs=map_tree(call.kwargs, change),
        reads=tuple(known.get(value, value) for value in call.reads),
        writes=tuple(known.get(value, value) for value in call.writes),
        outputs=tuple(None if value is None else known.get(value, value) for value in call.outputs),
    )
