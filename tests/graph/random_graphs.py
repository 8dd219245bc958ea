"""Random graphs as plain lists, built in shuffled order, for property tests of the graph room."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from hocket.graph import Graph, GraphBuilder, Phase, Role

BEFORE = [Role.PARAMETER, Role.OPTIMIZER_STATE, Role.BUFFER, Role.INPUT]
MADE = [Role.ACTIVATION, Role.GRADIENT, Role.OUTPUT, Role.CONTROL]


@dataclass
class PlainGraph:
    """Ops 0.. in a topological order; tensors as (producer, bytes, role, alias of or -1)."""

    phases: list[Phase]
    tensors: list[tuple[int, int, Role, int]]
    reads: list[set[int]]

    def edges(self) -> set[tuple[str, str]]:
        return {
            (f"op{self.tensors[t][0]}", f"op{op}")
            for op, tensors in enumerate(self.reads)
            for t in tensors
            if self.tensors[t][0] >= 0
        }

    def build(self, order: list[int], extra_reads: list[tuple[int, int]] = ()) -> Graph:
        """The graph built with its ops given in the order ``order``."""
        builder = GraphBuilder("random")
        number = {op: builder.op(f"op{op}", "kind", phase=self.phases[op]) for op in order}
        for t, (producer, size, role, alias) in enumerate(self.tensors):
            where = number[producer] if producer >= 0 else -1
            builder.tensor(f"t{t}", size, producer=where, role=role, alias_of=alias)
        for op, tensors in enumerate(self.reads):
            for t in sorted(tensors, reverse=True):
                builder.read(number[op], t)
        for op, t in extra_reads:
            builder.read(number[op], t)
        return builder.build()


@st.composite
def plain_graphs(draw: st.DrawFn, max_ops: int = 12) -> PlainGraph:
    num_ops = draw(st.integers(1, max_ops))
    tensors: list[tuple[int, int, Role, int]] = []
    reads: list[set[int]] = []
    for _ in range(draw(st.integers(0, 3))):
        tensors.append((-1, draw(st.integers(0, 2**40)), draw(st.sampled_from(BEFORE)), -1))
    for op in range(num_ops):
        readable = list(range(len(tensors)))
        mine = set(draw(st.lists(st.sampled_from(readable), max_size=4))) if readable else set()
        reads.append(mine)
        for _ in range(draw(st.integers(0, 2))):
            role = draw(st.sampled_from(MADE))
            size = 0 if role == Role.CONTROL else draw(st.integers(0, 2**40))
            alias = draw(st.sampled_from([-1, *sorted(mine)]))
            tensors.append((op, size, role, alias))
    phases = draw(st.lists(st.sampled_from(list(Phase)), min_size=num_ops, max_size=num_ops))
    return PlainGraph(phases, tensors, reads)
