"""A net of MONeT's zoo as a graph and as a chain of stages, by the rules of the published runs.

As MONeT hands a net to Checkmate's program: every node's output is memory of its own, in the
forward pass and in the backward one; convolutions and matrices have two backward nodes, for their
parameters and for their input; norms, activations, pools and what has parameters read their input
in the backward pass (clipped activations their output), the others nothing; parameters with their
gradients and the batch are there all the time; no workspaces; GiB.

A stage of a chain ends where one tensor alone goes on. Its lean ways leave out tensors one after
another, by bytes per millisecond that making them again takes. What is read again far away, as the
skips of a U-Net, is there all the time, so that all other stages are a chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from monet_nets import Net
from recompute_chain import Chain
from recompute_graph import OpGraph

READS_INPUT = frozenset(("conv", "depthwise", "linear", "norm", "relu", "max_pool"))
READS_OUTPUT = frozenset(("relu6",))
TWICE = frozenset(("conv", "linear"))
HEAVY = frozenset(("conv", "depthwise", "linear"))


@dataclass(frozen=True)
class Stage:
    """Nodes ``start`` to ``stop`` and what their backward pass needs."""

    start: int
    stop: int
    kept: tuple[int, ...]
    """Outputs of its own nodes, the last one among them."""


class Way(NamedTuple):
    """A way to keep less of a stage."""

    left: int
    """Bytes."""
    again_ms: float
    ahead: int
    """The most bytes of its own forward."""
    back: int
    """The most bytes backward, gradients included."""


class Zoo:
    """A net with the times of its nodes."""

    def __init__(self, net: Net, timed_ms: list[float]) -> None:
        self.net, self.timed_ms = net, timed_ms
        self.count = len(net.nodes)
        self.origin = [v if node.again is None else node.again for v, node in enumerate(net.nodes)]
        own = [v for v in range(self.count) if self.origin[v] == v]
        self.backward = [
            v for v in reversed(own) for _ in range(2 if net.nodes[v].kind in TWICE else 1)
        ]
        if len(own) + 1 + len(self.backward) != len(timed_ms):
            raise ValueError(f"{len(own) + 1 + len(self.backward)} nodes, {len(timed_ms)} timed")
        place = {v: at for at, v in enumerate(own)}
        self.ms = [timed_ms[place[self.origin[v]]] for v in range(self.count)]
        self.backward_ms = timed_ms[len(own) + 1 :]
        self.readers: list[list[int]] = [[] for _ in net.nodes]
        for number, node in enumerate(net.nodes):
            for read in node.inputs:
                self.readers[read].append(number)
        self.held = np.array([node.size for node in net.nodes])
        self.held[net.skips] = 0
        self.fixed = 8 * net.num_params + net.image_bytes
        """Bytes of parameters, their gradients and the batch."""
        self.there = self.fixed + sum(net.nodes[skip].size for skip in net.skips)
        """Bytes beside the chain."""
        self.stages = self._stages()
        self.before, self.beside = self._gradients()

    def _saved(self, number: int) -> tuple[int, ...]:
        """What the backward pass of a node reads of the forward pass."""
        node = self.net.nodes[number]
        if node.kind in READS_OUTPUT:
            return (number,)
        return node.inputs if node.kind in READS_INPUT else ()

    def _stages(self) -> list[Stage]:
        saved = {read for number in self.backward for read in self._saved(number)}
        stages, start = [], 0
        for number in range(self.count):
            crossing = {
                before
                for before in range(number + 1)
                if any(reader > number for reader in self.readers[before])
            }
            kinds = {node.kind for node in self.net.nodes[start : number + 1]}
            is_cut = crossing - set(self.net.skips) <= {number} and kinds & HEAVY
            if is_cut or number == self.count - 1:
                kept = [v for v in range(start, number + 1) if v in saved or v == number]
                stages.append(Stage(start, number + 1, tuple(kept)))
                start = number + 1
        return stages

    def ways(self, stage: Stage) -> list[Way]:
        """Ways to keep less, each tensor left out by bytes per millisecond that it then takes."""
        left, found = set(stage.kept), list[Way]()
        last_ms = 0.0
        while True:
            tried = [
                (self._backward_pass(stage, left - {v}, holds=True)[0], v)
                for v in left
                if v != stage.stop - 1 and self.held[v]
            ]
            if not tried:
                return found
            last_ms, out = min(tried, key=lambda way: ((way[0] - last_ms) / self.held[way[1]], way))
            left = left - {out}
            ahead = self._forward_bytes(stage, left)
            for holds in (True, False):
                again_ms, back = self._backward_pass(stage, left, holds=holds)
                found.append(Way(self._bytes(left), again_ms, ahead, back))

    def _bytes(self, tensors: Iterable[int]) -> int:
        return int(sum(self.held[v] for v in tensors))

    def _forward_bytes(self, stage: Stage, kept: Collection[int]) -> int:
        """The most that a stage holds of its own while it runs forward."""
        live, most = set[int](), 0
        for number in range(stage.start, stage.stop):
            live.add(number)
            most = max(most, self._bytes(live))
            live = {
                v for v in live
                if v in kept or any(number < r < stage.stop for r in self.readers[v])
            }  # fmt: skip
        return most

    def _again(self, stage: Stage, wanted: Iterable[int], there: Collection[int]) -> list[int]:
        """What has to run for tensors of a stage, in order; its input is there."""
        needed, pending = set[int](), list(wanted)
        while pending:
            at = pending.pop()
            if at in needed or at in there or at < stage.start or not self.held[at]:
                continue
            needed.add(at)
            pending += self.net.nodes[at].inputs
        return sorted(needed)

    def _backward_pass(self, stage: Stage, left: set[int], *, holds: bool) -> tuple[float, int]:
        """Milliseconds of what is made again, and the most that is held, gradients and own.

        What is missing is made when it is read; what is made on the way stays until it is read
        itself where the pass ``holds`` it, or is made once more.
        """
        places = [at for at, v in enumerate(self.backward) if stage.start <= v < stage.stop]
        # Of two nodes the first one makes the gradients of parameters.
        reads = [
            [v for v in self._saved(self.backward[at]) if v >= stage.start]
            if at == self.backward.index(self.backward[at]) else []
            for at in places
        ]  # fmt: skip
        used = [
            {u for v in (*self._again(stage, wanted, left), *wanted)
             for u in (v, *self.net.nodes[v].inputs) if u in left}
            for wanted in reads
        ]  # fmt: skip
        live, again_ms, most = set(left), 0.0, 0
        for place, at in enumerate(places):
            later = {v for wanted in reads[place + 1 :] for v in wanted}
            needed = set().union(*used[place + 1 :]) | (later if holds else later & left)
            run = self._again(stage, reads[place], live)
            again_ms += sum(self.ms[v] for v in run)
            for step, made in enumerate(run):
                live.add(made)
                most = max(most, self._bytes(live) + self.before[at])
                wanted = {u for v in run[step + 1 :] for u in self.net.nodes[v].inputs}
                live &= needed | wanted | {*reads[place], *left}
            most = max(most, self._bytes(live) + self.beside[at])
            live &= needed
        return again_ms, most

    def _gradients(self) -> tuple[list[int], list[int]]:
        """Bytes of gradients when each backward node begins, and with its own."""
        last_of = {v: at for at, v in enumerate(self.backward)}
        waiting = [0] * len(self.backward)
        """By the place of the node that reads them last."""
        before, beside = [], []
        for at, v in enumerate(self.backward):
            before.append(sum(waiting[at:]))
            # Of two nodes the second one makes the gradient of the input.
            if at == last_of[v]:
                inputs = [self.origin[read] for read in self.net.nodes[v].inputs]
                until = max((last_of[u] for u in inputs), default=at)
                waiting[until] += sum(self.net.nodes[u].size for u in inputs)
            beside.append(sum(waiting[at:]))
        return before, beside

    def graph(self) -> OpGraph:
        """All nodes, where none makes another one again."""
        nodes = self.net.nodes
        reads = [list(node.inputs) for node in nodes] + [[self.count - 1]]
        size = [node.size for node in nodes] + [nodes[-1].size]
        first_of = {v: at for at, v in reversed(list(enumerate(self.backward)))}
        last_of = {v: at for at, v in enumerate(self.backward)}
        for at, v in enumerate(self.backward):
            above = [self.count + 1 + last_of[reader] for reader in self.readers[v]]
            above += [self.count] if v == self.count - 1 else []
            reads.append([*(self._saved(v) if at == first_of[v] else ()), *above])
            size.append(sum(nodes[u].size for u in nodes[v].inputs) if at == last_of[v] else 0)
        return OpGraph.of(np.array(self.timed_ms), np.array(size), reads)

    def chain(self) -> Chain:
        """All stages."""
        num_stages = len(self.stages)
        stage_of = [
            s for s, stage in enumerate(self.stages) for _ in range(stage.start, stage.stop)
        ]
        backward_s, gradient = np.zeros(num_stages), np.zeros(num_stages, dtype=np.int64)
        for at in reversed(range(len(self.backward))):
            stage = stage_of[self.backward[at]]
            backward_s[stage] += self.backward_ms[at]
            gradient[stage] = self.before[at]
        kept = np.array([self._bytes(stage.kept) for stage in self.stages])
        back = [self._backward_pass(s, set(s.kept), holds=True)[1] for s in self.stages]
        ways = [self.ways(stage) for stage in self.stages]
        alone = np.array([
            [self._backward_pass(stage, set(), holds=holds) for stage in self.stages]
            for holds in (True, False)
        ])  # fmt: skip
        num_ways = max(len(way) for way in ways)
        full = [(way + [Way(0, np.inf, 0, 0)] * num_ways)[:num_ways] for way in ways]
        left, again_ms, ahead, lean_back = np.array(full).transpose(2, 1, 0)
        return Chain(
            forward_s=np.array([sum(self.ms[s.start : s.stop]) for s in self.stages]),
            backward_s=backward_s,
            output_bytes=np.array([self.held[stage.stop - 1] for stage in self.stages]),
            kept_bytes=kept,
            gradient_bytes=gradient,
            forward_work_bytes=np.array([self._forward_bytes(s, s.kept) for s in self.stages])
            - kept,
            backward_work_bytes=np.array(back) - gradient - np.append(0, gradient[:-1]) - kept,
            lean_bytes=left.astype(np.int64),
            lean_s=again_ms,
            lean_ahead_bytes=ahead.astype(np.int64),
            lean_back_bytes=lean_back.astype(np.int64),
            alone_s=alone[:, :, 0],
            alone_back_bytes=alone[:, :, 1].astype(np.int64),
            passing_bytes=np.array([self._forward_bytes(s, {s.stop - 1}) for s in self.stages]),
        )
