"""Training under a cap on one GPU: what fits, how fast, and what was predicted.

    PYTHONPATH=src:benchmarks/memory python benchmarks/memory/h200.py --out DIR [--seconds 540]
        [--parts large,"replay rnn",...] [--toy]

Weights in float32, bfloat16 autocast, fused AdamW, 16,384 tokens a step in sequences of 1,024, a
vocabulary of 50,304 with tied embeddings; replays in float32. The cap is on PyTorch's allocator
(``set_per_process_memory_fraction``). Systems that do not chunk take the step in micro-batches.

Parts come in the order of `PHASES`; those of one phase run beside each other: they either time
nothing, or take turns on the GPU and only plan meanwhile. Each is a forked process with a limit of
its own, so that one that fails, hangs or is ended by the host leaves the others as they are.
``--toy`` runs everything at sizes for a processor. Rows are written as they come (``rows.jsonl``),
and at the end what they say as ``table.md``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

# For all systems: without it the allocator's gaps take up to a tenth of a cap.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from gpu_losses import exact_losses, rounded_losses
from gpu_models import DEVICE
from gpu_parts import (
    HOLD_ALL,
    deepest,
    fsdp,
    large,
    largest,
    mixes,
    pairs,
    rates,
    replay,
    uncapped,
    warm,
)
from gpu_rows import GIB, Book
from gpu_run import Run, real_run, toy_run
from gpu_table import write_table

Part = Callable[[Run], None]
REPLAYS = ("resnet batch 16", "resnet batch 32", "rnn", "experts")
PAIRS = ("gpt", "wide gpt", "experts", "expert groups", "resnet", "recurrent", "u-net")


def phases(run: Run) -> Iterator[tuple[float, dict[str, Part]]]:
    """Parts that run beside each other by name, and the seconds that they may take."""
    yield 30, {"rates": rates}
    yield 60, {"uncapped": uncapped, "warm": warm}
    # Models of 60 GB of the host, drawn and settled for each cap.
    yield 220, {"large": large}
    yield 110, {"fsdp": fsdp}
    # No row of these is timed.
    yield 110, {
        "losses exact": exact_losses, "losses rounded": rounded_losses,
        **{f"deepest {system} {number}": partial(deepest, system=system, cap=cap)
           for number, cap in enumerate(run.caps) for system in HOLD_ALL},
    }  # fmt: skip
    yield 100, {f"pairs {name}": partial(pairs, name=name) for name in PAIRS}
    # With few neighbours: many of their ops are short, and wait for the host.
    yield 210, {f"replay {name}": partial(replay, name=name) for name in REPLAYS}
    yield 150, {"largest": largest}
    yield 110, {"mixes": mixes}


def run(run: Run, limit_s: float, parts: dict[str, Part]) -> None:
    """Parts beside each other, each ended when the limit is over."""
    began = time.perf_counter()
    fork = multiprocessing.get_context("fork")
    started = {}
    for name, part in parts.items():
        started[name] = fork.Process(target=_one, args=(run, name, part))
        started[name].start()
    for name, process in started.items():
        process.join(max(0.0, began + limit_s - time.perf_counter()))
        if process.is_alive() and process.pid is not None:
            # With what it started itself, as compilers do.
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            run.book.add(name, {"error": f"ended after {limit_s:.0f} s"})
        elif process.exitcode:
            run.book.add(name, {"error": f"the process ended with code {process.exitcode}"})
    run.book.add("phase", {"parts": list(parts), "took_s": time.perf_counter() - began})


def _one(run: Run, name: str, part: Part) -> None:
    os.setpgid(0, 0)
    try:
        if torch.cuda.is_available() != (DEVICE == "cuda"):
            raise RuntimeError(f"meant for {DEVICE}, but CUDA is there: {DEVICE != 'cuda'}")
        part(run)
    except Exception as error:
        run.book.add(name, {"error": f"{type(error).__name__}: {error}"[:600]})


def main() -> None:
    """All parts that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--parts", default="", help="names, or their first words; else all")
    parser.add_argument("--caps", default="", help="in GiB, of the large model; else all")
    parser.add_argument("--toy", action="store_true", help="a rehearsal on a processor")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    book = Book(options.out, options.seconds)
    run = (toy_run if options.toy else real_run)(book)
    if options.caps:
        chosen = {float(cap) for cap in options.caps.split(",")}
        run = replace(run, caps=tuple(cap for cap in run.caps if cap / GIB in chosen))
    wanted = options.parts.split(",") if options.parts else []
    for limit_s, parts in phases(run):
        parts = {
            name: part
            for name, part in parts.items()
            if not wanted or any(f"{name} ".startswith(f"{word} ") for word in wanted)
        }
        left_s = book.left_s - 5
        if not parts:
            continue
        if left_s < limit_s / 3:
            book.add("left out", {"parts": list(parts), "error": f"{left_s:.0f} s left"})
            continue
        run(run, min(limit_s, left_s), parts)
        write_table(options.out)


if __name__ == "__main__":
    main()
