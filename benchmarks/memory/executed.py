"""Steps of real size carried out on the processor in memory order: bytes and bits.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/memory/executed.py [MODEL BATCH [LENGTH]]

The recorded step runs once in recorded order and once in memory order, gradients released by their
updates, with every storage counted while it is held. Bytes are MiB beyond what exists before the
step. Needs about six times the bytes of the parameters.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
import torch
from runtime.executed_program import named_tensors
from runtime.whole_step import WholeStep

from hocket.capture import capture_program, load_model
from hocket.capture.zoo.experts import moe
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.planners.memory.order import release_gradients
from hocket.planners.memory.placed import order_for_memory
from hocket.runtime.device_instructions import Setup, split
from hocket.simulate import simulate
from hocket.simulate.engine import instructions_of

MIB = 2**20
CASES = (("resnet152", 1, None), ("gpt2", 1, 128), ("moe-4x8", 1, 64))


def carried_out(problem: Any, plan: Plan, program: Any, values: Any) -> tuple[int, float, bytes]:
    """Peak and loss of one step, and a digest of all parameters after it."""
    graph = problem.graph
    parts = split(graph, instructions_of(problem, plan), order=plan.by_device)
    setup = Setup(graph, program, plan.device_of, parts)
    process = WholeStep(setup, values, [torch.device("cpu")], seed=5)
    record = process.step(1)
    digest = hashlib.sha256()
    results = process.results()
    for number in sorted(program.parameters.values()):
        digest.update(results[number].detach().contiguous().view(torch.uint8).numpy().data)
    return int(record.peak_bytes[0]), float(record.loss), digest.digest()


def measure(name: str, batch: int, seq: int | None) -> None:
    """One line of the table."""
    torch.manual_seed(1)
    model, inputs = built(name, batch, seq)
    model.train()
    graph, program = capture_program(model, inputs, device="cpu")
    graph = release_gradients(graph)
    problem = make_problem(graph, "1xcpu-host")
    plain = Plan(planner="recorded").placing(np.zeros(graph.num_ops, dtype=np.int32))
    ordered = order_for_memory(problem, plain)
    start = int(graph.held_bytes[graph.tensor_producer < 0].sum())
    values = named_tensors(model, inputs)
    rows = []
    for plan in (plain, ordered):
        predicted = int(simulate(problem, plan).peak_bytes[0])
        rows.append((predicted, *carried_out(problem, plan, program, values)))
    (_, before, *first), (predicted, after, *second) = rows
    bound = ordered.claims.peak_bound_bytes[0]
    print(
        f"| {name} {batch}{f' {seq}' if seq else ''} | {graph.num_ops} "
        f"| {(before - start) / MIB:.2f} | {(after - start) / MIB:.2f} "
        f"| {100 * (after - start) / (before - start):.1f} % | {(predicted - start) / MIB:.2f} "
        f"| {(bound - start) / MIB:.2f} | {'same bits' if first == second else 'DIFFERENT'} |",
        flush=True,
    )


def built(name: str, batch: int, seq: int | None) -> tuple[Any, Any]:
    """A model with weights and its batch."""
    if name == "moe-4x8":
        return moe(batch, seq or 64, layers=4, experts=8)
    return load_model(name, batch=batch, seq=seq, device="cpu")


def main() -> None:
    """All cases, or the one that is named."""
    torch.set_num_threads(1)
    print("| step | ops | recorded order | memory order | share | predicted | bound | results |")
    print("|---|---|---|---|---|---|---|---|")
    words = sys.argv[1:]
    given = ((words[0], int(words[1]), int(words[2]) if len(words) > 2 else None),) if words else ()
    for case in given or CASES:
        measure(*case)


if __name__ == "__main__":
    main()
