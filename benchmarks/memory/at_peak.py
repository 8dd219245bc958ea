"""What PyTorch's allocator holds at the peak of a step within a budget, by where it was asked for.

    PYTHONPATH=src:benchmarks/memory python benchmarks/memory/at_peak.py [NUM_BUDGETS]

A small GPT, as in the pairs of ``h200.py``: for each budget the predicted and the counted peak, and
the largest things that were held then, so that a wrong prediction can be explained.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from budget_case import Case
from gpu_models import Sizes, forward, gpt, word_batch
from gpu_rows import clear

SHOWN = 14


def live_at_peak(events: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """Of allocations and frees in order: what is there when most is, by caller and size."""
    live: dict[int, dict[str, Any]] = {}
    held = peak = 0
    found: list[dict[str, Any]] = []
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            held += event["size"]
            if held > peak:
                peak, found = held, list(live.values())
        elif event["action"] == "free_completed" and event["addr"] in live:
            held -= live.pop(event["addr"])["size"]
    return Counter((_caller(event), event["size"]) for event in found)


def _caller(event: dict[str, Any]) -> str:
    """The innermost frames of this project and of the optimizer."""
    names = [
        f"{frame['filename'].rpartition('/')[2]}:{frame['line']} {frame['name']}"
        for frame in event.get("frames", ())
        if any(part in frame["filename"] for part in ("hocket", "optim", "gpu_models"))
    ]
    return " < ".join(names[:3]) or "?"


def main() -> None:
    """All budgets."""
    warnings.simplefilter("ignore")
    sizes = Sizes(tokens=4096)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for name, width, layers in (("gpt", 512, 6), ("wide gpt", 1024, 2)):
        model = gpt(width, layers, sizes, "cpu")
        case = Case(model, word_batch(sizes), forward, on="auto", device=torch.device("cuda"))
        for budget in case.budgets(count):
            clear()
            kept = case.chosen(budget)
            before = torch.cuda.memory_allocated()
            torch.cuda.memory._record_memory_history(max_entries=300_000, stacks="python")
            try:
                counted = case.counted(kept)
            # The next budget is asked for, too.
            except Exception as error:
                import traceback

                traceback.print_exc()
                print(f"{name} {budget}: {error}", flush=True)
                continue
            (events, *_) = torch.cuda.memory._snapshot()["device_traces"]
            torch.cuda.memory._record_memory_history(enabled=None)
            policies = Counter(
                f"{b.activations}/{b.checkpoint}/{b.parameters}/{b.update}"
                for b in kept.section.blocks
            )
            print(f"{name}: budget {budget:,}, predicted {kept.peak_bytes:,}, counted {counted:,}, "
                  f"there before {before:,}, chunks {kept.section.loss_chunks}, {dict(policies)}",
                  flush=True)  # fmt: skip
            found = live_at_peak(events)
            total = sum(size * number for (_, size), number in found.items())
            print(f"  at the peak: {total:,} in {sum(found.values())}", flush=True)
            largest = sorted(found.items(), key=lambda item: -item[0][1] * item[1])[:SHOWN]
            for (caller, size), number in largest:
                print(f"  {number:4} x {size:>12,}  {caller}", flush=True)


if __name__ == "__main__":
    main()
