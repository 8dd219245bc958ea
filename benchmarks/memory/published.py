"""The chain program against published runs of Checkmate's program under Gurobi, up to 24 hours.

VGG-16, ResNet-50 and MobileNet-V2 on a P100: costs of their nodes were profiled by MONeT; which
node is what follows from the architectures, whose forward nodes come in the order of their modules
and whose backward nodes in reverse. A residual block is a stage of a chain. Its lean ways make
again what norms and activations make, and with it the last convolutions or the first.

How bytes are counted was chosen on VGG-16 (docs/measurements/memory.md): parameters with their
gradients and the batch are there, gradients of activations take the place of what comes in, GiB.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hocket.planners.memory.chain import Chain, schedule_chain

GIB = 2**30
Costs = dict[int, float]
VGG_LAYERS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
VGG_BATCH = 176
PIXELS = 3 * 224 * 224 * 4
NO_WAY = (0, np.inf)


def published(folder: Path) -> int:
    """A table per net."""
    costs = json.loads((folder / "monet_zoo_costs_p100.json").read_text())
    runs = json.loads((folder / "monet_zoo_solver_logs.json").read_text())
    for name, key, log, build, batch, params in NETS:
        table = costs[key]["workspace_compute"]
        chain = build({int(node): values[0] for node, values in table.items()})
        base = float(chain.forward_s.sum() + chain.backward_s.sum())
        there = 2 * params * 4 + batch * PIXELS
        print(f"{name}, batch {batch}, {base:.0f} ms without recompute\n")
        print("| GiB | published ms | ours | time over published | overhead published | ours |"
              " CPU s |\n|---|---|---|---|---|---|---|")  # fmt: skip
        for run in sorted((r for r in runs if log(r["log"])), key=lambda r: -_budget(r["log"])):
            _row(chain, run, base, there)
        print()
    return 0


def _budget(log: str) -> float:
    """The last part of a name that is a number."""
    return next(float(part) for part in reversed(log.split("_")) if part[:1].isdigit())


def _row(chain: Chain, run: dict[str, Any], base: float, there: int) -> None:
    budget, objective = _budget(run["log"]), run["best_objective"]
    started = time.process_time()
    found = schedule_chain(chain, int(budget * GIB) - there, 1000)
    seconds = time.process_time() - started
    ours = "infeasible" if found is None else f"{found.seconds:.0f}"
    if found is None or objective is None:
        theirs = objective and f"{objective / 100:.0f}"
        told = theirs or ("infeasible" if run["infeasible"] else "none found")
        print(f"| {budget:g} | {told} | {ours} | | | | {seconds:.2f} |")
        return
    theirs = objective / 100
    print(
        f"| {budget:g} | {theirs:.0f} | {ours} | {100 * (found.seconds / theirs - 1):+.1f} % | "
        f"{100 * (theirs / base - 1):.1f} % | {100 * (found.seconds / base - 1):.1f} % | "
        f"{seconds:.2f} |"
    )


def vgg16(ms: Costs) -> Chain:
    """Stages of VGG-16: convolution with its activation, pools (with 64-bit indices), classifier.

    The gradient of an activation takes the place of what comes in, as profiled.
    """
    side, channels, node = 224, 3, 0
    outputs: list[int] = []
    kept: list[int] = []
    forward: list[list[int]] = []
    for width in VGG_LAYERS:
        side, channels = (side, width) if width else (side // 2, channels)
        size = VGG_BATCH * channels * side * side * 4
        outputs.append(size)
        kept.append(size if width else 3 * size)
        forward.append([node, node + 1] if width else [node])
        node += len(forward[-1])
    hidden = VGG_BATCH * 4096 * 4
    outputs += [VGG_BATCH * 512 * 49 * 4, hidden, hidden, VGG_BATCH * 1000 * 4]
    kept += [VGG_BATCH * 512 * 49 * 4, 2 * hidden, 2 * hidden, VGG_BATCH * 1000 * 4]
    forward += [[31], [32, 33, 34, 35], [36, 37, 38], [39, 40]]
    backward = [[41, 42], [43, 44, 45, 46], [47, 48, 49, 50, 51], [52]]
    node = 53
    for width in reversed(VGG_LAYERS):
        backward.append(list(range(node, node + (3 if width else 1))))
        node += len(backward[-1])
    output, left = np.array(outputs), np.array(kept)
    before = np.append(0, output[:-1])
    return Chain(
        forward_s=np.array([sum(ms[n] for n in nodes) for nodes in forward]),
        backward_s=np.array([sum(ms[n] for n in nodes) for nodes in backward[::-1]]),
        output=output,
        kept=left,
        gradient=output,
        forward_work=np.zeros_like(output),
        backward_work=np.maximum(left, before) - left - before,
    )


@dataclass
class Stages:
    """Stages of a net of residual blocks, as they are added."""

    ms: Costs
    node: int = 0
    forward: list[float] = field(default_factory=list)
    num_backward: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    ways: list[list[tuple[int, float]]] = field(default_factory=list)

    def add(self, nodes: int, backward: int, output: int, kept: int, *ways: Any) -> None:
        """A stage of so many nodes; ways are bytes that are not kept, and nodes that run again."""
        self.forward.append(sum(self.ms[self.node + n] for n in range(nodes)))
        self.num_backward.append(backward)
        self.output.append(output)
        self.kept.append(kept)
        found = [(kept - less, sum(self.ms[self.node + n] for n in again)) for less, again in ways]
        self.ways.append((found + [NO_WAY] * 3)[:3])
        self.node += nodes

    def chain(self) -> Chain:
        """All of them; the backward nodes follow the forward ones in reverse."""
        at, backward = self.node, []
        for count in reversed(self.num_backward):
            backward.append(sum(self.ms[n] for n in range(at, at + count)))
            at += count
        assert at == len(self.ms), "nodes are left over"
        output, kept = np.array(self.output), np.array(self.kept)
        before = np.append(0, output[:-1])
        ways = np.array(self.ways)
        return Chain(
            forward_s=np.array(self.forward),
            backward_s=np.array(backward[::-1]),
            output=output,
            kept=kept,
            gradient=output,
            forward_work=np.zeros_like(output),
            backward_work=np.maximum(kept, before) - kept - before,
            lean=ways[:, :, 0].T.astype(np.int64),
            lean_s=ways[:, :, 1].T,
        )


def resnet50(ms: Costs) -> Chain:
    """Stem, 16 bottlenecks, classifier."""
    stages, side = Stages(ms), 56
    size = lambda channels, side: 184 * channels * side * side * 4  # noqa: E731
    wide = size(64, 112)
    # The pool keeps 64-bit indices.
    stages.add(4, 5, size(64, 56), 2 * wide + 3 * size(64, 56), (wide, (1, 2)))
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(count):
            first = size(width, side)
            side //= 2 if block == 0 and width > 64 else 1
            second, whole, is_first = size(width, side), size(4 * width, side), block == 0
            last = whole * (2 if is_first else 1)
            cheap = first + second
            stages.add(
                12 if is_first else 10, 16 if is_first else 13, whole,
                2 * first + 2 * second + last + whole,
                (cheap, (1, 2, 4, 5)),
                (cheap + last, (1, 2, 4, 5, 6, 8) if is_first else (1, 2, 4, 5, 6)),
                (cheap + first, (0, 1, 2, 4, 5)),
            )  # fmt: skip
    stages.add(4, 4, 184 * 1000 * 4, 184 * 3048 * 4)
    return stages.chain()


def mobilenet_v2(ms: Costs) -> Chain:
    """Stem, 17 inverted residuals, last convolution, classifier."""
    stages, side, before = Stages(ms), 112, 32
    size = lambda channels, side: 272 * channels * side * side * 4  # noqa: E731
    stages.add(3, 4, size(32, 112), 2 * size(32, 112))
    # Expansion 1: no first convolution.
    inner, out = size(32, 112), size(16, 112)
    stages.add(5, 6, out, 2 * inner + 2 * out, (inner, (1, 2)), (inner + out, (1, 2, 3)))
    before = 16
    for width, count, stride in ((24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2),
                                 (320, 1, 1)):  # fmt: skip
        for block in range(count):
            first = size(6 * before, side)
            side //= stride if block == 0 else 1
            second, out, adds = size(6 * before, side), size(width, side), int(block > 0)
            cheap = first + second
            stages.add(
                8 + adds, 10 + adds, out, 2 * first + 2 * second + 2 * out,
                (cheap, (1, 2, 4, 5)), (cheap + out, (1, 2, 4, 5, 6)),
                (cheap + first, (0, 1, 2, 4, 5)),
            )  # fmt: skip
            before = width
    last = size(1280, 7)
    stages.add(3, 4, last, 2 * last)
    stages.add(5, 5, 272 * 1000 * 4, 272 * 3560 * 4)
    return stages.chain()


Net = tuple[str, str, Callable[[str], bool], Callable[[Costs], Chain], int, int]
NETS: tuple[Net, ...] = (
    ("VGG-16", "vgg16_176_normal", lambda log: log.startswith("checkmate_vgg"), vgg16, 176,
     138_357_544),
    ("ResNet-50", "resnet50_184_normal", lambda log: log.startswith("checkmate_r50"), resnet50,
     184, 25_557_032),
    ("MobileNet-V2", "mobilenet_v2_272_normal", lambda log: "checkmate_mobilenet_normal" in log,
     mobilenet_v2, 272, 3_504_872),
)  # fmt: skip
"""Name, key of its costs, which runs are its own, its chain, batch and parameters."""
