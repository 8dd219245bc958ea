"""What `hocket fit` foresees of a plan's peak against the rehearsed one, which is the trained one.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/memory/foreseen.py [--only TEXT]

Every plan of the frontier of each model is simulated, as `hocket fit` does, and rehearsed on
tensors without memory, as `hocket run` does before it trains; on a processor what is then counted
is the rehearsed peak to the byte (`pairs.py`). The models are those of
``tests/runtime/foreseen_models.py`` and the zoo at toy size. Exit code 6 where a plan is foreseen
to hold much less than it does.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from budget_case import Case
from pairs import ZOO
from runtime.foreseen_models import FORESEEN
from runtime.small_zoo import SMALL_ZOO

from hocket.capture import CaptureWarning
from hocket.hardware.detect import detect_cpu

NEAR, LEAST = 0.02, 0.95
"""What counts as foreseen, and the least part of the rehearsed peak that may be."""


def row(name: str, case: Case, started: float) -> tuple[int, int, float]:
    """All plans of a model; returns their number, how many are near, and the lowest ratio."""
    told = sorted(
        (plan.peak_bytes / case.dry_run(plan.memory), plan.name)
        for plan in case.frontier.plans
        if plan.memory is not None
    )
    near = sum(abs(ratio - 1) <= NEAR for ratio, _ in told)
    print(
        f"| {name} | {case.graph.num_ops:,} | {case.frontier.uses.blocks.num_blocks} | {len(told)} "
        f"| {near} | {told[0][0]:.3f} ({told[0][1]}) | {told[-1][0]:.3f} ({told[-1][1]}) | "
        f"{time.process_time() - started:.0f} |",
        flush=True,
    )
    return len(told), near, told[0][0]


def main() -> int:
    """A line per model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore", CaptureWarning)
    torch.set_num_threads(1)
    builds: dict[str, Callable[[], tuple]] = dict(FORESEEN)
    builds |= {name: lambda build=SMALL_ZOO[name]: (*build(), None) for name in ZOO}
    cluster = detect_cpu()
    print("| model | ops | blocks | plans | within 2 % | lowest | highest | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name, build in builds.items():
        if options.only in name:
            torch.manual_seed(0)
            started = time.process_time()
            rows.append(row(name, Case(*build(), on=cluster), started))
    total, near = sum(each[0] for each in rows), sum(each[1] for each in rows)
    lowest = min(each[2] for each in rows)
    print(f"{near} of {total} plans within 2 %, the lowest at {lowest:.3f}")
    return 6 if lowest < LEAST else 0


if __name__ == "__main__":
    raise SystemExit(main())
