"""Placements of a GPT-2 training step on logical devices of one GPU, against the unsplit model.

    PYTHONPATH=src:tests python benchmarks/runtime/gpu.py [--batch 4] [--seq 256] [--steps 6]

Each logical device has its own compute stream and each pair its own transfer stream, so a missing
wait or a tensor freed too early shows as a wrong loss. Prints one line per placement: largest
relative differences of losses and of gradients, and the middle step time.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from typing import Any

import numpy as np
import torch
from runtime.executed_program import named_tensors
from runtime.placements import random_placement
from runtime.plain_reference import reference_steps
from runtime.whole_step import WholeStep

from hocket.capture.model import capture_program
from hocket.capture.zoo.load import load_model
from hocket.runtime.device_instructions import Setup, split

LIMIT = 1e-6


def by_layer(graph: Any, num_devices: int, num_layers: int) -> Any:
    """Blocks of layers on each device; what is before and behind them at the ends."""
    device_of = np.zeros(graph.num_ops, dtype=np.int32)
    for op in range(graph.num_ops):
        module = graph.module_of(op)
        layer = re.search(r"\bh\.([0-9]+)", module)
        if layer:
            device_of[op] = int(layer[1]) * num_devices // num_layers
        elif "wte" not in module and "wpe" not in module and module != "transformer":
            device_of[op] = num_devices - 1
    first: dict[int, int] = {}
    for op in range(graph.num_ops):
        if graph.group[op] >= 0:
            device_of[op] = first.setdefault(int(graph.group[op]), int(device_of[op]))
    return device_of


def eager_s(model: Any, batch: Any, steps: int) -> float:
    """Middle time of a plain training step."""
    update = torch.optim.AdamW(model.parameters(), fused=True)
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        update.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        update.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure(model: Any, batch: Any, args: Any, device: str) -> list[dict[str, Any]]:
    """All placements of a graph captured for ``device``."""
    graph, program = capture_program(model, batch, name="gpt2", device=device)
    on_gpu = [torch.device("cuda:0")]
    values = named_tensors(model, batch)
    placements = {
        "one device": np.zeros(graph.num_ops, dtype=np.int32),
        "one device again": np.zeros(graph.num_ops, dtype=np.int32),
        "2 blocks of layers": by_layer(graph, 2, model.config.n_layer),
        "3 blocks of layers": by_layer(graph, 3, model.config.n_layer),
        "3, ops at random": random_placement(graph, 3, 0),
        "3, ops at random again": random_placement(graph, 3, 1),
    }
    expected: tuple[list[float], dict[int, torch.Tensor]] | None = None
    rows = []
    for label, device_of in placements.items():
        num_devices = int(device_of.max()) + 1
        parts = split(graph, device_of, num_devices)
        setup = Setup(graph, program, device_of, parts)
        process = WholeStep(setup, values, on_gpu * num_devices, seed=3)
        records = [process.step(number) for number in range(1, args.steps + 1)]
        losses = [record.loss for record in records]
        results = process.results()
        gradients = {g: results[g].clone() for g in program.gradients.values()}
        if expected is None:
            expected = losses, gradients
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected[0], strict=True))
        worst = max(
            float((gradients[g] - expected[1][g]).norm() / expected[1][g].norm()) for g in gradients
        )
        rows.append({
            "captured for": device, "placement": label, "transfers": len(parts.transfers),
            "loss error": error, "gradient error": worst, "last loss": losses[-1],
            "step ms": 1e3 * statistics.median(r.step_s for r in records[1:]),
            "busy ms": 1e3 * sum(records[-1].op_end_s[o] - records[-1].op_start_s[o]
                                 for o in records[-1].op_end_s),
            "finite": all(np.isfinite(losses)),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        del process, results
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    # Kernels that add up in any order would hide the errors that are looked for.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model, batch = load_model("gpt2", batch=args.batch, seq=args.seq, device="cpu")
    rows = [
        row for device in ("accelerator", "cuda") for row in measure(model, batch, args, device)
    ]
    model, batch = model.cuda(), {name: tensor.cuda() for name, tensor in batch.items()}
    reference = reference_steps(model, batch, steps=args.steps, seed=3)
    print("plain PyTorch, same seeds: last loss", reference.losses[-1])
    print(f"plain PyTorch: {1e3 * eager_s(model, batch, args.steps):.1f} ms per step")
    wrong = [r for r in rows if r["loss error"] > LIMIT or r["gradient error"] > 10 * LIMIT]
    for row in rows:
        if row["captured for"] == "cuda":
            error = abs(row["last loss"] - reference.losses[-1]) / abs(reference.losses[-1])
            print(f"{row['placement']}: last loss differs from plain PyTorch by {error:.1e}")
    print("wrong:", wrong or "none")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
