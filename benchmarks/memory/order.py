"""Peak of a step's transient memory: recorded order, planned order, and the proven bound.

    .venv/bin/python benchmarks/memory/order.py [--keep FOLDER] [--only TEXT] [--markdown]

Steps are captured here (zoo models at several batch sizes, gradients released by their updates;
``step`` rows have AdamW in single ops, ``joint`` rows hold all gradients to the end), and where
step graphs in the format memgraph-v1 lie in ../shared/data/memory they come first. Bytes are MiB
beyond what exists before the step; seconds are processor time of order and proof together, after
compiling. ``--keep`` keeps the captured graphs.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hocket.graph import Graph
from hocket.graph.files import read_graph, write_graph
from hocket.planners.memory import bounded_order
from hocket.planners.memory.hoist import peak_bytes
from hocket.planners.memory.order import release_gradients
from hocket.planners.memory.storages import storages_of

SHARED = Path(__file__).parents[3] / "shared" / "data" / "memory"
MIB = 2**20
CASES = (
    # AdamW in single ops, and the backward pass alone
    "step resnet152 1", "step gpt2 1 128", "step bert-large 1 128", "step branches 64",
    "joint gpt2 8 1024", "joint lstm 32 100", "joint moe-12x32 4 64",
    # fused updates
    "mlp 1", "mlp 256", "resnet50 1", "resnet50 8", "resnet50 32", "resnet101 1", "resnet101 16",
    "resnet152 1", "resnet152 16", "wide-resnet 1", "wide-resnet 8", "inception-v3 2",
    "inception-v3 16", "lstm 1", "lstm 32", "gnmt-4 1", "gnmt-4 32", "gnmt-8 8",
    "bert-large 1 128", "bert-large 8 512", "t5-base 1 128", "t5-base 8 512", "vit-base 1",
    "vit-base 16", "gpt2 1 128", "gpt2 8 1024", "gpt2-medium 1 128", "gpt2-medium 4 1024",
    "gpt2-xl 1 1024", "llama-1b 1 512", "mixtral-small 1 128", "mixtral-small 4 512",
    "moe-12x32 1 64", "resnet1001 1",
)  # fmt: skip


class Row(NamedTuple):
    """What was measured of one graph."""

    name: str
    num_ops: int
    recorded_mib: float
    planned_mib: float
    bound_mib: float
    gap: float
    cpu_s: float
    best_known_mib: float = float("nan")


def captured(case: str) -> Graph:
    """The graph of a case: what is recorded, the model, its batch and length."""
    import torch
    from steps import Branches, plain_step

    from hocket.capture import capture, load_model

    words = case.split()
    form = words.pop(0) if words[0] in ("step", "joint") else ""
    name, batch = words[0], int(words[1])
    seq = int(words[2]) if len(words) > 2 else None
    if name == "branches":
        return plain_step(Branches(), torch.zeros(batch, 256), case)
    model, inputs = load_model(name, batch=batch, seq=seq)
    if form:
        return plain_step(model, inputs, case, updates=form == "step")
    return release_gradients(capture(model, inputs, name=case))


def graphs(keep: Path | None, only: str) -> Iterator[tuple[str, Graph, float]]:
    """All graphs with the best peaks that are known of them."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from planners.memory.step_graphs import read_step_graph

    for path in sorted(SHARED.glob("*.json.gz")):
        if only in path.name:
            graph, known = read_step_graph(path)
            yield graph.name, graph, known["best_known_MiB"]
    for case in CASES:
        if only not in case:
            continue
        path = keep / f"{case.replace(' ', '_')}.json.gz" if keep else None
        if path is not None and path.exists():
            graph = read_graph(path)
        else:
            graph = captured(case)
            if path is not None:
                write_graph(graph, path)
        yield case, graph, float("nan")


def measured(name: str, graph: Graph, best_known_mib: float) -> Row:
    """Order, prove, check one graph."""
    start_s = time.process_time()
    _, found = bounded_order(graph)
    cpu_s = time.process_time() - start_s
    storages = storages_of(graph)
    recorded = peak_bytes(storages, np.arange(graph.num_ops))
    planned, bound = (
        (number - found.start_bytes) / MIB for number in (found.peak_bytes, found.bound_bytes)
    )
    return Row(
        name, graph.num_ops, recorded / MIB, planned, bound, found.gap, cpu_s,
        best_known_mib,
    )  # fmt: skip


def shown(row: Row, is_markdown: bool) -> str:
    """One line of the table."""
    cells = (
        row.name, f"{row.num_ops}", f"{row.recorded_mib:.2f}", f"{row.planned_mib:.2f}",
        f"{row.bound_mib:.2f}", f"{100 * row.gap:.2f} %",
        f"{100 * (row.planned_mib / row.recorded_mib - 1):+.1f} %", f"{row.cpu_s:.2f}",
    )  # fmt: skip
    if is_markdown:
        return f"| {' | '.join(cells)} |"
    return "{:<22} {:>6} {:>10} {:>10} {:>10} {:>8} {:>8} {:>6}".format(*cells)


def main() -> None:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}")
    rows = []
    for name, graph, best_known_mib in graphs(options.keep, options.only):
        if not rows:
            measured(name, graph, best_known_mib)  # compiles
        rows.append(measured(name, graph, best_known_mib))
        print(shown(rows[-1], options.markdown), flush=True)
    within = sum(row.gap <= 0.01 for row in rows)
    worse = [row.name for row in rows if row.planned_mib > row.best_known_mib + 0.005]
    print(
        f"{within} of {len(rows)} within 1 % of the bound; above the best known: {worse or 'none'}"
    )


if __name__ == "__main__":
    main()
