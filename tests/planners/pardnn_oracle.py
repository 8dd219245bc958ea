"""Slicing and mapping of ParDNN in plain Python: slow, without trees, equal to the last bit.

Sums in spans are taken directly, so tests give them times that add up without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hocket.graph import Graph


@dataclass
class Cut:
    path: list[int]
    trunks: list[list[int]] = field(default_factory=list)
    num_primary: int = 0
    top_s: list[float] = field(default_factory=list)


class Weights:
    """The tuple of arrays of `hocket.planners.placement.pardnn.unit_work` as lists."""

    def __init__(self, work) -> None:
        self.op_s = work.op_s.tolist()
        self.num_ops = len(self.op_s)
        self.children = _rows(work.child_ptr, work.child, work.child_s)
        self.parents: list[list[tuple[int, float]]] = [[] for _ in range(self.num_ops)]
        for parent, row in enumerate(self.children):
            for child, seconds in row:
                self.parents[child].append((parent, seconds))
        unit = work.units.of.tolist()
        self.mates = [[o for o in range(self.num_ops) if unit[o] == u] for u in unit]
        self.tensor_s = work.tensor_s.tolist()


def _rows(ptr, item, seconds) -> list[list[tuple[int, float]]]:
    return [
        [(int(item[i]), float(seconds[i])) for i in range(ptr[op], ptr[op + 1])]
        for op in range(len(ptr) - 1)
    ]


def slice_paths(work, num_primary: int) -> Cut:
    weights = Weights(work)
    cut = Cut(path=[-1] * weights.num_ops)
    for _ in range(num_primary):
        free = {op for op in range(weights.num_ops) if cut.path[op] < 0}
        if not free:
            break
        bottom = bottom_levels(weights, free, [-1] * weights.num_ops)
        head = min(free, key=lambda op: (-bottom[op], op))
        follow(weights, cut, head, bottom)
    cut.num_primary = len(cut.trunks)
    everything, primary = set(range(weights.num_ops)), list(cut.path)
    bottom = bottom_levels(weights, everything, primary)
    cut.top_s = top_levels(weights, primary)
    depth = depths(weights)
    by_length = sorted(everything, key=lambda op: (-(cut.top_s[op] + bottom[op]), -depth[op], op))
    for op in by_length:
        if cut.path[op] < 0:
            follow(weights, cut, op, bottom)
    return cut


def follow(weights: Weights, cut: Cut, head: int, bottom: list[float]) -> None:
    number = len(cut.trunks)
    trunk = [head]
    while True:
        for mate in weights.mates[trunk[-1]]:
            cut.path[mate] = number
        open_to = [
            (-(seconds + bottom[child]), child)
            for child, seconds in weights.children[trunk[-1]]
            if cut.path[child] in (-1, number)
        ]
        if not open_to:
            break
        trunk.append(min(open_to)[1])
    cut.trunks.append(trunk)


def bottom_levels(weights: Weights, among: set[int], place: list[int]) -> list[float]:
    bottom = [0.0] * weights.num_ops
    for op in sorted(among, reverse=True):
        rest = [
            bottom[child] + (0.0 if place[op] == place[child] >= 0 else seconds)
            for child, seconds in weights.children[op]
            if child in among
        ]
        bottom[op] = weights.op_s[op] + max(rest, default=0.0)
    return bottom


def top_levels(weights: Weights, place: list[int]) -> list[float]:
    top: list[float] = []
    for op in range(weights.num_ops):
        before = [
            top[parent]
            + weights.op_s[parent]
            + (0.0 if place[op] == place[parent] >= 0 else seconds)
            for parent, seconds in weights.parents[op]
        ]
        top.append(max(before, default=0.0))
    return top


def depths(weights: Weights) -> list[int]:
    depth = [0] * weights.num_ops
    for op in reversed(range(weights.num_ops)):
        depth[op] = max((depth[child] + 1 for child, _ in weights.children[op]), default=0)
    return depth


class Books:
    """Devices of ops, and what can be asked of them."""

    def __init__(self, graph: Graph, weights: Weights, devices, top_s: list[float]) -> None:
        self.graph, self.weights, self.top_s = graph, weights, top_s
        self.op_s, self.speed = devices.op_s.tolist(), devices.speed.tolist()
        self.device = [-1] * graph.num_ops
        self.touches = [
            {*graph.reads_of(op).tolist(), *graph.made_by(op)} for op in range(graph.num_ops)
        ]

    def own_s(self, ops: list[int], device: int) -> float:
        return sum(self.op_s[device][op] for op in ops)

    def saved_s(self, ops: list[int], device: int) -> float:
        touched = set().union(*(self.touches[op] for op in ops))
        there = [op for op in range(len(self.device)) if self.device[op] == device]
        present = set().union(*(self.touches[op] for op in there))
        return sum(self.weights.tensor_s[tensor] for tensor in touched & present)

    def within(self, spans: list[tuple[float, float]]) -> list[int]:
        """Ops that begin in some span; spans are half-open and do not overlap."""
        return [o for o, t in enumerate(self.top_s) if any(a <= t < b for a, b in spans)]

    def cheapest(self, ops: list[int], spans: list[tuple[float, float]]) -> int:
        inside = self.within(spans)
        share_s = sum(self.weights.op_s[op] for op in inside) / sum(self.speed)
        ranked = []
        for device in range(len(self.op_s)):
            own_s, saved_s = self.own_s(ops, device), self.saved_s(ops, device)
            if own_s == math.inf:
                continue
            cost = -saved_s
            if share_s > 0:
                load_s = sum(self.op_s[device][o] for o in inside if self.device[o] == device)
                cost += self.speed[device] * own_s * (load_s + 0.5 * own_s) / share_s
            ranked.append((cost, -saved_s, device))
        return min(ranked)[2] if ranked else -1

    def put(self, ops: list[int], device: int) -> None:
        for op in ops:
            if self.op_s[device][op] < math.inf:
                self.device[op] = device


def map_paths(graph: Graph, work, devices, cut: Cut) -> tuple[list[int], int]:
    """Devices of all ops and the number of merged paths."""
    weights = Weights(work)
    books = Books(graph, weights, devices, cut.top_s)
    num_paths = len(cut.trunks)
    members = [[o for o in range(graph.num_ops) if cut.path[o] == p] for p in range(num_paths)]
    weight_s = [sum(weights.op_s[op] for op in ops) for ops in members]
    spans = [spans_of(weights, cut, members[path], cut.trunks[path]) for path in range(num_paths)]

    heavy = sorted(range(cut.num_primary), key=lambda path: (-weight_s[path], path))
    fast = sorted(range(len(devices.speed)), key=lambda d: (-devices.speed[d], d))
    for path, device in zip(heavy, fast, strict=False):
        books.put(members[path], device)

    num_merged = 0
    secondary = range(cut.num_primary, num_paths)
    for path in secondary:
        inside_s = sum(weights.op_s[op] for op in books.within(spans[path]))
        if crossing_s(graph, weights, members[path]) < inside_s - weight_s[path]:
            continue
        able = [d for d in range(len(fast)) if books.own_s(members[path], d) < math.inf]
        saved = {d: books.saved_s(members[path], d) for d in able}
        best = min(able, key=lambda d: (-saved[d], d), default=-1)
        if best >= 0 and saved[best] > 0:
            books.put(members[path], best)
            num_merged += 1

    for path in falling(secondary, members, weight_s):
        if books.device[members[path][0]] < 0:
            device = books.cheapest(members[path], spans[path])
            if device >= 0:
                books.put(members[path], device)
    place_alone(books, weights)
    return books.device, num_merged


def place_alone(books: Books, weights: Weights) -> None:
    """Units that could not stay with their path, each from its first op to its last."""
    for op in range(weights.num_ops):
        if books.device[op] < 0:
            ops = weights.mates[op]
            begin = min(books.top_s[o] for o in ops)
            last = max(books.top_s[o] for o in ops)
            books.put(ops, books.cheapest(ops, [(begin, math.nextafter(last, math.inf))]))


def falling(secondary: range, members: list[list[int]], weight_s: list[float]) -> list[int]:
    heaviest = max((weight_s[path] for path in secondary), default=0.0)
    longest = max((len(members[path]) for path in secondary), default=1)

    def rank(path: int) -> float:
        length = len(members[path]) / longest
        return length + weight_s[path] / heaviest if heaviest > 0 else length

    return sorted(secondary, key=lambda path: (-rank(path), path))


def spans_of(
    weights: Weights, cut: Cut, members: list[int], trunk: list[int]
) -> list[tuple[float, float]]:
    head, tail, top_s = trunk[0], trunk[-1], cut.top_s
    start = max((top_s[p] + weights.op_s[p] for p, _ in weights.parents[head]), default=0.0)
    stop = min((top_s[c] for c, _ in weights.children[tail]), default=math.inf)
    spans = [(min(start, top_s[head]), max(stop, math.nextafter(top_s[tail], math.inf)))]
    beside = [top_s[op] for op in members if op not in trunk]
    if beside:
        other = (min(beside), math.nextafter(max(beside), math.inf))
        # Positions count, not times: spans that share no top level do not overlap.
        shared = [t for t in top_s if spans[0][0] <= t < spans[0][1] and other[0] <= t < other[1]]
        between = [t for t in top_s if max(spans[0][0], other[0]) <= t < min(spans[0][1], other[1])]
        if shared or between:
            return [(min(spans[0][0], other[0]), max(spans[0][1], other[1]))]
        spans.append(other)
    return spans


def crossing_s(graph: Graph, weights: Weights, members: list[int]) -> float:
    inside = set(members)
    incoming = sum(
        weights.tensor_s[tensor]
        for op in members
        for tensor in graph.reads_of(op).tolist()
        if graph.tensor_producer[tensor] >= 0 and graph.tensor_producer[tensor] not in inside
    )
    outgoing = sum(
        weights.tensor_s[tensor]
        for op in members
        for tensor in graph.made_by(op)
        if set(graph.users_of(tensor).tolist()) - inside
    )
    return max(incoming, outgoing)
