"""Baechi's evaluation: Inception-V3, GNMT and the base Transformer on four RTX 2080.

    python benchmarks/systems/baechi.py [--only MODEL] [--planners m-sct,m-etf]

Simulated on the preset ``rtx2080x4``, whose link Baechi's authors fitted. Models, sizes and
optimizers are those of their public programs (`baechi_models.py`); published steps are measured
ones of the real machine. Placement times are CPU seconds after kernels are compiled. TensorFlow's
allocator gets 7.0 of 8 GiB (it keeps no reserve for fragments), PyTorch's what the preset leaves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import baechi_models
import numpy as np

from hocket.graph.generators import generate
from hocket.graph.graph import Graph
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners import PLANNERS
from hocket.planners.bounds import lower_bound
from hocket.planners.candidates import propose

GNMT_EXPERT = {
    "gpu0": ["source", "target", "forwards", "backwards", "attention", "decoder.0"],
    "gpu1": ["encoder.0", "decoder.1"],
    "gpu2": ["encoder.1", "decoder.2"],
    "gpu3": ["encoder.2", "decoder.3", "head"],
}
"""Layer i of encoder and decoder on GPU i, as in the program of Baechi's authors."""
NAMES = ("one-device", "m-topo", "m-etf", "m-sct", "pardnn", "auto")
TENSORFLOW_HEADROOM = 2**30


class Case(NamedTuple):
    """A model with what was published for it, seconds."""

    label: str
    build: Callable[[], Graph]
    expert: str
    """What an expert does: "gnmt" or a planner; one device where a model fits and no split pays."""
    headroom_bytes: int | None
    published: dict[str, float]


def _case(
    label: str, build: Callable[[], Graph], expert: str, headroom: int | None, *steps: float
) -> Case:
    names = ("one-device", "expert", "m-topo", "m-etf", "m-sct")
    return Case(label, build, expert, headroom, dict(zip(names, steps, strict=True)))


def cases() -> Iterator[Case]:
    """Baechi's table; Inception as its PyTorch program, whose model ours is."""
    for batch, *steps in (
        (32, .240, .240, .274, .241, .241), (64, .461, .461, .537, .465, .462),
    ):  # fmt: skip
        build = partial(baechi_models.inception, int(batch))
        yield _case(f"Inception-V3, batch {batch}", build, "one-device", None, *steps)
    for seq, batch, *steps in (
        (40, 128, .251, .214, .265, .224, .212), (40, 256, .474, .376, .481, .354, .369),
        (50, 128, .319, .259, .348, .264, .267), (50, 256, .618, .484, .609, .502, .516),
    ):  # fmt: skip
        build = partial(baechi_models.gnmt, int(batch), int(seq))
        label = f"GNMT, batch {batch}, length {seq}"
        yield _case(label, build, "gnmt", TENSORFLOW_HEADROOM, *steps)
    for batch, *steps in (
        (64, .249, .257, .262, .242, .244), (128, .465, .462, .466, .451, .453),
    ):  # fmt: skip
        build = partial(baechi_models.transformer, int(batch))
        yield _case(f"Transformer, batch {batch}", build, "layer-blocks", None, *steps)


class Row(NamedTuple):
    """Steps and CPU seconds by planner, and the bound on any step."""

    steps: dict[str, float | None]
    cpu_s: dict[str, float]
    bound_s: float


def row(case: Case, names: tuple[str, ...]) -> Row:
    """Every planner on one case."""
    problem = make_problem(case.build(), "rtx2080x4", headroom_bytes=case.headroom_bytes)
    steps: dict[str, float | None] = {}
    cpu_s: dict[str, float] = {}
    for label, name in (("expert", case.expert), *zip(names, names, strict=True)):
        started = time.process_time()
        planner = _gnmt_expert if name == "gnmt" else PLANNERS[name]
        steps[label] = propose(problem, name, planner).step_s
        cpu_s[label] = time.process_time() - started
    return Row(steps, cpu_s, lower_bound(problem).seconds)


def _gnmt_expert(problem: Problem, plan: Plan) -> Plan:
    """Cells where the table says; what joins them with its first input, backward as forward."""
    graph = problem.graph
    number = {
        path: problem.cluster.device_names.index(name)
        for name, paths in GNMT_EXPERT.items()
        for path in paths
    }
    device = np.zeros(graph.num_ops, dtype=np.int32)
    for op in range(graph.num_ops):
        module = graph.modules[graph.op_module[op]] if graph.op_module[op] >= 0 else ""
        known = [at for path, at in number.items() if f"{module}.".startswith(f"{path}.")]
        makers = [
            maker
            for maker in graph.tensor_producer[
                graph.reads[graph.read_ptr[op] : graph.read_ptr[op + 1]]
            ].tolist()
            if maker >= 0
        ]
        if known:
            device[op] = known[0]
        elif graph.partner[op] >= 0:
            device[op] = device[graph.partner[op]]
        elif makers:
            device[op] = device[makers[0]]
    # Updates, and ops that share memory, stay together.
    for group in set(graph.group[graph.group >= 0].tolist()):
        members = np.flatnonzero(graph.group == group)
        device[members] = device[members[0]]
    return plan.having(Placement(device))


def ours() -> str:
    """The figures of the row in docs/systems.md."""
    quick = ("Inception-V3, batch 32", "GNMT, batch 128, length 40", "Transformer, batch 64")
    cells = []
    for case in cases():
        if case.label in quick:
            step_s = row(case, ("m-sct",)).steps["m-sct"]
            assert step_s is not None
            cells.append(f"{case.label} {step_s:.3f} s ({case.published['m-sct']:.3f})")
    return f"simulated, m-SCT (published): {'; '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose label begins so")
    parser.add_argument("--planners", default=",".join(NAMES))
    options = parser.parse_args()
    names = tuple(options.planners.split(","))
    warm = make_problem(generate("gnmt", 500, 0), "rtx2080x4")
    _warm(warm, names)
    columns = ("expert", *names)
    print(f"| seconds per step | {' | '.join(columns)} | m-sct / bound | placement, CPU s |")
    print(f"|---|{'---|' * len(columns)}---|---|")
    for case in cases():
        if case.label.startswith(options.only):
            _print_case(case, row(case, names), columns)


def _warm(problem: Problem, names: tuple[str, ...]) -> None:
    for name in names:
        propose(problem, name, PLANNERS[name])


def _print_case(case: Case, found: Row, columns: tuple[str, ...]) -> None:
    cells = []
    for name in columns:
        step_s, published_s = found.steps[name], case.published.get(name)
        cell = "does not fit" if step_s is None else f"{step_s:.3f}"
        if step_s is not None and published_s is not None:
            cell += f" ({step_s / published_s:.2f})"
        cells.append(cell)
    sct_s = found.steps.get("m-sct")
    ratio = "" if sct_s is None else f"{sct_s / found.bound_s:.2f}"
    slowest = max(seconds for name, seconds in found.cpu_s.items() if name != "auto")
    print(f"| {case.label} | {' | '.join(cells)} | {ratio} | {slowest:.1f} |", flush=True)
    shown = [f"{case.published[n]:.3f}" if n in case.published else "" for n in columns]
    print(f"| published | {' | '.join(shown)} | | |")


if __name__ == "__main__":
    main()
