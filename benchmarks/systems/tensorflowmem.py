"""TensorFlowMem's single-machine tables: one Titan X of 12 GB, 64 GB of host memory.

Run: python benchmarks/systems/tensorflowmem.py [--quick]

Simulated. The published rows name the largest model of TensorFlow and of TensorFlowMem; each is
captured at both sizes here and planned for the same card, without a plan (plain) and with offload,
recompute and parameters on the host (planned). Models are look-alikes of benchmarks/memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from gpu_models import DeepResNet, Gpt, LongRnn, Sizes

import hocket

HOST_BYTES = 64 * 2**30
RNN_WIDTH = 4096
"""Wide enough that 400 steps fill the card and 800 do not, as published."""


class Case(NamedTuple):
    """A model at one published size."""

    name: str
    published: str
    model: Callable[[], nn.Module]
    batch: tuple[torch.Tensor, torch.Tensor]


def images(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (batch, 3, 224, 224)
    return torch.empty(shape, device="meta"), torch.empty(batch, dtype=torch.long, device="meta")


def sound(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    heard = torch.empty(128, length, RNN_WIDTH, device="meta")
    return heard, torch.empty(128, length, dtype=torch.long, device="meta")


def words() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.empty(64, 256, dtype=torch.long, device="meta")
    return tokens, tokens.clone()


def experts(num_experts: int) -> nn.Module:
    """Twelve mixtures whose experts have four million parameters each."""
    return Gpt(1024, 12, Sizes(sequence=256, vocabulary=32000), num_experts, 2048)


CASES = (
    Case("ResNet-504, batch 16", "TensorFlow's deepest", lambda: DeepResNet(504), images(16)),
    Case("ResNet-1916, batch 16", "TensorFlowMem's deepest", lambda: DeepResNet(1916), images(16)),
    Case("ResNet-235, batch 32", "TensorFlow's deepest", lambda: DeepResNet(235), images(32)),
    Case("ResNet-1001, batch 32", "TensorFlowMem's deepest", lambda: DeepResNet(1001), images(32)),
    Case(
        "RNN of 400 steps, batch 128",
        "4.65 s, 6.03 s (1.30x)",
        lambda: LongRnn(400, RNN_WIDTH),
        sound(400),
    ),
    Case(
        "RNN of 800 steps, batch 128",
        "out of memory, 12.01 s",
        lambda: LongRnn(800, RNN_WIDTH),
        sound(800),
    ),
    Case("12 x 4 experts of 4 M", "TensorFlow's most", lambda: experts(4), words()),
    Case(
        "12 x 48 experts of 4 M", "TensorFlowMem's most, 10x slower", lambda: experts(48), words()
    ),
)
QUICK = ("12 x 4 experts of 4 M", "RNN of 400 steps, batch 128")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two small rows")
    quick = parser.parse_args().quick
    heads = "plain peak | planned peak | planned step / plain | smallest budget"
    print(f"| model | published | {heads} |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        if not quick or case.name in QUICK:
            print(row(case), flush=True)


def row(case: Case) -> str:
    """A line of the table."""
    with torch.device("meta"):
        model = case.model()
    graph = hocket.capture(model, case.batch)
    fitted = hocket.fit(graph, "titanx-box", host_bytes=HOST_BYTES)
    chosen = fitted.chosen
    plain = next(plan for plan in fitted.frontier.plans if plan.memory is None)
    over = " (does not fit)" if plain.peak_bytes > fitted.budget_bytes else ""
    planned = "-" if chosen is None else f"{chosen.peak_bytes / 2**30:.1f} GiB"
    ratio = "does not fit" if chosen is None else f"{chosen.step_s / plain.step_s:.2f}"
    return (
        f"| {case.name} | {case.published} | {plain.peak_bytes / 2**30:.1f} GiB{over} | {planned} "
        f"| {ratio} | {fitted.frontier.smallest.peak_bytes / 2**30:.1f} GiB |"
    )


if __name__ == "__main__":
    main()
