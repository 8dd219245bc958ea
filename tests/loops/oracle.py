"""An oracle that knows nothing of the analysis: it runs a loop in plain Python, writes down which
cell each iteration reads and writes, and checks a tiling against that record."""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections import defaultdict

import numpy as np

OWN = np.lib.mixins.NDArrayOperatorsMixin


class Log:
    """Cells touched by the current iteration; ``run`` counts how often the loop was entered.

    An inner loop runs once per iteration of the loops around it. Its runs follow each other, so
    only accesses of one run can race.
    """

    def __init__(self):
        self.current = None
        self.run = 0
        self.reads = defaultdict(set)
        self.writes = defaultdict(set)
        self.exposed = defaultdict(set)

    def read(self, name, ids):
        if self.current is not None:
            for cell in np.atleast_1d(ids).ravel().tolist():
                self.reads[self.current].add((name, cell, self.run))
                if (name, cell, self.run) not in self.writes[self.current]:
                    self.exposed[self.current].add((name, cell, self.run))

    def write(self, name, ids):
        if self.current is not None:
            self.writes[self.current] |= {
                (name, cell, self.run) for cell in np.atleast_1d(ids).ravel().tolist()
            }


class Traced(OWN):
    """An array whose reads and writes are logged, through all of its views."""

    def __init__(self, name, data, ids, log):
        self.name, self.data, self.ids, self.log = name, data, ids, log

    shape = property(lambda self: self.data.shape)
    size = property(lambda self: self.data.size)
    ndim = property(lambda self: self.data.ndim)
    dtype = property(lambda self: self.data.dtype)
    T = property(lambda self: Traced(self.name, self.data.T, self.ids.T, self.log))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        index = _plain(index)
        found, ids = self.data[index], self.ids[index]
        if isinstance(found, np.ndarray) and found.ndim:
            if np.shares_memory(found, self.data):
                return Traced(self.name, found, ids, self.log)
            self.log.read(self.name, ids)
            return found
        self.log.read(self.name, ids)
        return found.item() if isinstance(found, np.generic) else found

    def __setitem__(self, index, value):
        index = _plain(index)
        value = _plain(value)
        self.log.write(self.name, self.ids[index])
        self.data[index] = value

    def __array__(self, dtype=None, copy=None):
        self.log.read(self.name, self.ids)
        return np.array(self.data, dtype=dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        plain = [_plain(value) for value in inputs]
        result = getattr(ufunc, method)(*plain, **kwargs)
        if out is None:
            return result
        out[0][...] = result
        return out[0]

    def __array_function__(self, function, types, args, kwargs):
        return function(*[_plain(arg) for arg in args], **kwargs)

    def fill(self, value):
        self[...] = value

    def reshape(self, *shape):
        return Traced(self.name, self.data.reshape(*shape), self.ids.reshape(*shape), self.log)

    def __getattr__(self, name):
        if name in ("sum", "dot", "mean", "max", "min", "argmax", "argmin", "copy", "prod"):
            return lambda *args: getattr(np.asarray(self), name)(*map(_plain, args))
        raise AttributeError(name)


def _plain(value):
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    return np.asarray(value) if isinstance(value, Traced) else value


class _Marked(ast.NodeTransformer):
    def __init__(self, levels):
        self.nodes = {(level.node.lineno, level.node.col_offset, level.name) for level in levels}
        self.names = [level.name for level in levels]

    def visit_For(self, node):
        self.generic_visit(node)
        key = (node.lineno, node.col_offset, getattr(node.target, "id", None))
        if key in self.nodes:
            last = node.target.id == self.names[-1]
            what = f"({', '.join(self.names)},)" if last else "None"
            node.body.insert(0, ast.parse(f"mark_({what})").body[0])
            if node.target.id == self.names[0]:
                # What comes after the loop, or between two runs of it, is none of its iterations.
                return [node, ast.parse("leave_()").body[0]]
        return node


def trace(source, levels, arguments, space):
    """Run the function in plain Python; the log of cells, and the iterations in order."""
    log = Log()
    order = []

    def mark(iteration):
        log.current = iteration
        if iteration is not None:
            order.append(tuple(int(part) for part in iteration))

    def leave():
        log.current = None
        log.run += 1

    tree = _Marked(levels).visit(copy.deepcopy(source.node))
    tree.decorator_list = []
    module = ast.fix_missing_locations(ast.Module([tree], []))
    names = dict(space)
    names["mark_"] = mark
    names["leave_"] = leave
    exec(compile(module, "<traced>", "exec"), names)
    memory = {}
    traced = []
    for number, value in enumerate(arguments):
        if isinstance(value, np.ndarray):
            key = value.__array_interface__["data"][0]
            name, data = memory.setdefault(key, (f"array{number}", value))
            ids = _cells(value, data)
            traced.append(Traced(name, value, ids, log))
        else:
            traced.append(value)
    names[source.node.name](*traced)
    return log, order


def _cells(value, data):
    return np.arange(value.size).reshape(value.shape)


def check_tiling(option, space, tiling, log, order, hidden):
    """Every iteration once; those that conflict are ordered, as in the loop if it says so."""
    place = _places(option, space, tiling, order)
    before = _happens_before(tiling)
    rank = {iteration: number for number, iteration in enumerate(order)}
    users = defaultdict(list)
    for iteration in order:
        for cell in log.reads[iteration] | log.writes[iteration]:
            if cell[0] not in hidden:
                users[cell].append((iteration, cell in log.writes[iteration]))
    for cell, used in users.items():
        for (one, writes_one), (other, writes_other) in itertools.combinations(used, 2):
            if one == other or not (writes_one or writes_other):
                continue
            first, second = sorted((one, other), key=rank.get)
            (tile_a, pos_a), (tile_b, pos_b) = place[first], place[second]
            if tile_a == tile_b:
                ordered, forward = True, pos_a < pos_b
            else:
                forward = tile_a in before[tile_b]
                ordered = forward or tile_b in before[tile_a]
            assert ordered, f"{option.shape}: {first} and {second} race at {cell}"
            if option.shape.keeps_order:
                assert forward, f"{option.shape}: {first} after {second} at {cell}"


def check_private(names_of, option, log):
    for iteration, cells in log.exposed.items():
        for name, cell, _ in cells:
            assert name not in names_of, f"{iteration} reads {name}[{cell}] of another iteration"


def _happens_before(tiling):
    before = []
    last = {}
    for number, tile in enumerate(tiling.tiles):
        found = set()
        for other in (*tile.after, *([last[tile.worker]] if tile.worker in last else [])):
            assert other < number, "tiles are not in a serial order"
            found |= before[other] | {other}
        before.append(found)
        last[tile.worker] = number
    return before


def _places(option, space, tiling, order):
    place = {}
    if tiling.order:
        for number, tile in enumerate(tiling.tiles):
            for position in range(*tile.bounds):
                key = tuple(int(column[position]) for column in tiling.order)
                assert key not in place
                place[key] = (number, position)
        assert place.keys() == set(order)
        return place
    steps = [each.step for each in [space.outer]]
    inner_step = space.inner_ranges[2] if option.reading.depth == 2 else 1
    for position, iteration in enumerate(order):
        found = []
        for number, tile in enumerate(tiling.tiles):
            low, high = tile.bounds[:2]
            if iteration[0] not in range(low, high, steps[0]):
                continue
            if option.reading.depth == 2:
                sign, outer = (1 if inner_step > 0 else -1), (1 if steps[0] > 0 else -1)
                coordinate = sign * iteration[1] + tiling.skew * outer * iteration[0]
                if not tile.bounds[2] <= coordinate < tile.bounds[3]:
                    continue
            found.append(number)
        assert len(found) == 1, f"{iteration} is in tiles {found}"
        place[iteration] = (found[0], position)
    return place


def random_order(tiling, seed):
    """Tiles in a random order that their workers and ``after`` allow."""
    rng = random.Random(seed)
    queues = defaultdict(list)
    for number, tile in enumerate(tiling.tiles):
        queues[tile.worker].append(number)
    done, result = set(), []
    while any(queues.values()):
        ready = [
            worker
            for worker, queue in queues.items()
            if queue and set(tiling.tiles[queue[0]].after) <= done
        ]
        worker = rng.choice(ready)
        number = queues[worker].pop(0)
        done.add(number)
        result.append(number)
    return result
