"""What a wait between two rows of one CUDA graph costs: rows of equal kernels, tied in many ways.

    PYTHONPATH=src:benchmarks/waves python benchmarks/waves/tied_rows.py     # --toy: says nothing

Kernels of two rows are captured on one stream, as lanes are, and tied anew: one after the other, in
two rows without waits, and with a wait at every k-th kernel, for the kernel beside it or one that
was over long before, from one row to the other or in turns. µs per kernel of a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from graph_kernels import times_of
from timing import Turns, options_of

from hocket.runtime.train.graph_nodes import Arrow, arrows_of, change

_LENGTH = 256
"""Kernels of a row."""
_SLACK = 8
_EVERY = (1, 4, 16, 64)
Pairs = list[tuple[int, int]]


def ties() -> Iterator[tuple[str, Pairs]]:
    """Names, and which kernel waits for which; those of the second row come after the first's."""
    first = [*range(_LENGTH)]
    second = [*range(_LENGTH, 2 * _LENGTH)]
    rows = [*pairwise(first), *pairwise(second)]
    yield "one row", [*pairwise(first + second)]
    yield "two rows", rows
    for every in _EVERY:
        at = range(_SLACK, _LENGTH, every)
        yield f"wait at every {every}", rows + [(first[i - 1], second[i]) for i in at]
        yield (
            f"wait at every {every}, for {_SLACK} before",
            rows + [(first[i - _SLACK], second[i]) for i in at],
        )
        in_turns = [
            (a[i - _SLACK], b[i])
            for number, i in enumerate(at)
            for a, b in [((first, second), (second, first))[number % 2]]
        ]
        yield f"wait at every {every}, for {_SLACK} before, in turns", rows + in_turns
        tight = [
            (a[i - 1], b[i])
            for number, i in enumerate(at)
            for a, b in [((first, second), (second, first))[number % 2]]
        ]
        yield f"wait at every {every}, in turns", rows + tight


def measure(name: str, call: Callable[[], object], turns: Turns) -> None:
    """One kind of kernel in all ties."""
    call()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(2 * _LENGTH):
            call()
    raw = graph.raw_cuda_graph()
    after = {arrow.src: arrow.dst for arrow in arrows_of(raw)}
    (node,) = set(after) - set(after.values())
    nodes = [node]
    while nodes[-1] in after:
        nodes.append(after[nodes[-1]])
    if len(nodes) != 2 * _LENGTH:
        turns.write(name, "rows", failed=f"{len(nodes)} nodes of {2 * _LENGTH} calls")
        return
    for form, pairs in ties():
        change(raw, arrows_of(raw), [Arrow(nodes[a], nodes[b]) for a, b in dict.fromkeys(pairs)])
        graph.instantiate()
        times = times_of(graph.replay)
        turns.write(
            name, form, step_us=min(times.back_to_back) / _LENGTH,
            ahead_us=min(times.ahead) / _LENGTH, host_us=times.host / _LENGTH,
            waits=len(pairs) - 2 * (_LENGTH - 1),
        )  # fmt: skip


def main() -> int:
    """Short kernels and longer ones that leave most of the device free."""
    options = options_of(__doc__.splitlines()[0]).parse_args()
    turns = Turns(options.turns, options.until)
    if options.toy:
        assert all(len({*pairs}) >= 2 * (_LENGTH - 1) for _, pairs in ties())
        return 0
    small, rows = torch.randn(2**13, device="cuda"), torch.randn(16, 2**13, device="cuda")
    made, shares = torch.empty_like(small), torch.empty_like(rows)
    turns.prepared()
    with turns.turn():
        measure("relu of 32 KiB", lambda: torch.clamp_min(small, 0.0, out=made), turns)
        # No product: kernels that count in one scratch memory wait for each other in two rows.
        softmax = torch.ops.aten._softmax.out
        measure("softmax of 16 x 8192", lambda: softmax(rows, 1, False, out=shares), turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
