"""P3's figures: ResNet-50, VGG-19 and a Sockeye-like translator on four P100.

    python benchmarks/systems/p3.py            # the table, simulated
    sudo python benchmarks/communication/priority.py --mbit 200   # VGG-19 / 32 over shaped links

Simulated: gradients sent in slices by priority against wait-free backpropagation (whole layers in
the order of the backward pass, a barrier at the end of a step), float32, an all-reduce over one
network port of each machine. P3 reports gains of up to 25 % (ResNet-50), 66 % (VGG-19) and 38 %
(Sockeye) over MXNet's parameter server, whose baseline does the same as wait-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hocket.capture import capture
from hocket.capture.zoo.recurrent import gnmt
from hocket.capture.zoo.vision import resnet
from hocket.graph.graph import Graph
from hocket.plan.make import make_problem
from hocket.planners.communication.priority import choose_propagation, layers_of
from hocket.simulate.gradients import GradientChannel, LayerWork

MACHINES = 4
GBITS = (1, 2, 4, 6, 8, 10, 15, 20, 30)
BATCH = 32
SLICE_S, LATENCY_S = 20e-6, 50e-6
"""Of each slice, and until all machines have its sum: TCP within a rack."""
_VGG19 = (64, 64, 0, 128, 128, 0, *(256,) * 4, 0, *(512,) * 4, 0, *(512,) * 4, 0)
"""Channels of VGG-19's convolutions; 0 halves the image."""


class VGG19(nn.Module):
    """Simonyan and Zisserman's net of 19 layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels in _VGG19:
            if channels:
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
                before = channels
            else:
                layers.append(nn.MaxPool2d(2))
        dense = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
        self.layers = nn.Sequential(*layers, *dense, nn.ReLU(), nn.Linear(4096, 1000))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        return functional.cross_entropy(self.layers(images), labels)


def vgg19() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """VGG-19 with a batch."""
    images = torch.empty(BATCH, 3, 224, 224)
    return VGG19(), {"images": images, "labels": torch.zeros(BATCH, dtype=torch.int64)}


def sockeye() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A translator whose first layers, the embeddings, hold most parameters."""
    model, batch = gnmt(2, 64, 30, vocabulary=20_000, width=512)
    return model, batch


class Case(NamedTuple):
    """A model, and the largest gain that was published for it."""

    name: str
    build: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]
    published: str


CASES = (
    Case("ResNet-50", lambda: resnet(50, BATCH), "25 %"),
    Case("VGG-19", vgg19, "66 %"),
    Case("Sockeye-like", sockeye, "38 %"),
)


def layers(case: Case) -> list[LayerWork]:
    """Times and gradient sizes of the layers on a P100, launched from a graph as MXNet does."""
    with torch.device("meta"):
        model, batch = case.build()
    graph: Graph = capture(model, batch, optimizer="sgd", name=case.name)
    return layers_of(graph, make_problem(graph, "1xp100-16g").costs.op_s[0])


def gain(work: list[LayerWork], gbit: float) -> float:
    """Wait-free step over the one by priority at so many Gbit/s per machine."""
    # A sum sends and receives each gradient (n - 1) / n times in both of its halves.
    rate_bps = gbit * 1e9 / 8 / (2 * (MACHINES - 1) / MACHINES)
    return choose_propagation(work, GradientChannel(rate_bps, SLICE_S, LATENCY_S)).gain()


def ours() -> str:
    """The figures of the row in docs/systems.md."""
    cells = []
    for case in CASES:
        work = layers(case)
        best, gbit = max((gain(work, gbit), gbit) for gbit in GBITS)
        cells.append(f"{case.name} +{100 * (best - 1):.0f} % at {gbit} Gbit/s")
    return f"simulated, 4 machines: {', '.join(cells)}"


def main() -> None:
    heads = " | ".join(f"{gbit} Gbit/s" for gbit in GBITS)
    print(f"| model | published, most | {heads} |")
    print(f"|---|---|{'---|' * len(GBITS)}")
    for case in CASES:
        work = layers(case)
        cells = " | ".join(f"{gain(work, gbit):.2f}" for gbit in GBITS)
        print(f"| {case.name} | {case.published} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
