"""ParDNN under tight memory, beside Baechi's planners: a wide ResNet on four small cards.

Run: python benchmarks/systems/pardnn.py

Simulated. Cards are V100s whose memory is cut to the stated size. ParDNN's own evaluation (batch
scaling, checkpointing, Char-CRN, E3D) is not reproduced; planning times of large graphs are in
benchmarks/placement/speed.py.
"""

from __future__ import annotations

from dataclasses import replace

from hocket.api import make_problem
from hocket.capture import capture, load_model
from hocket.planners.candidates import propose
from hocket.planners.registry import BASE

PLANNERS = ("m-topo", "m-etf", "m-sct", "pardnn")
MEMORY_GIB = (5.0, 3.5)


def steps(gib: float) -> dict[str, str]:
    """Step of each planner where a card has so much memory."""
    graph = capture(*load_model("wide-resnet", batch=32))
    cluster = make_problem(graph, "4xv100-16g").cluster
    cut = [replace(device, memory_bytes=int(gib * 2**30)) for device in cluster.devices]
    problem = make_problem(graph, replace(cluster, devices=tuple(cut)), headroom_bytes=0)
    return {name: step_ms(propose(problem, name, BASE[name]).step_s) for name in PLANNERS}


def ours() -> str:
    """The figures of the row in docs/systems.md."""
    found = steps(3.5)
    others = f"m-TOPO {found['m-topo']}, m-ETF {found['m-etf']}".replace(" ms", "")
    return f"simulated: wide ResNet on 4 cards of 3.5 GiB {found['pardnn']} ({others})"


def main() -> None:
    print(f"| memory of each card | {' | '.join(PLANNERS)} |")
    print(f"|---|{'---|' * len(PLANNERS)}")
    for gib in MEMORY_GIB:
        print(f"| {gib} GiB | {' | '.join(steps(gib).values())} |", flush=True)


def step_ms(step_s: float | None) -> str:
    return "does not fit" if step_s is None else f"{1e3 * step_s:.0f} ms"


if __name__ == "__main__":
    main()
