"""Training under a cap on one GPU: what fits, how fast, and what was predicted.

    PYTHONPATH=src:benchmarks/memory python benchmarks/memory/h200.py --out DIR [--seconds 520]
        [--parts main,pairs,...] [--caps 8] [--toy]

Weights in float32, bfloat16 autocast, fused AdamW, 16,384 tokens a step in sequences of 1,024, a
vocabulary of 50,304 with tied embeddings; replays in float32. The cap is on PyTorch's allocator
(``set_per_process_memory_fraction``). Systems that do not chunk take the step in micro-batches.
Parts come in the order in which they are named, by default all, the most important first; a part
that needs more seconds than are left is left out and says so. ``--toy`` runs everything at sizes
for a processor. Rows are written as they come (``rows.jsonl``).
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# For all systems: without it the allocator's gaps take up to a tenth of a cap.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from budget_case import Case
from gpu_mixes import mix_row, mixed_section
from gpu_models import (
    DEVICE,
    DeepResNet,
    LongRnn,
    Sizes,
    drawn,
    forward,
    gpt,
    plain_forward,
    word_batch,
)
from gpu_rows import GIB, Book, clear, copy_rates, measured, product_rate, update_rates
from gpu_systems import (
    activation_budget,
    adamw,
    checkpointed,
    fsdp_offload,
    ours,
    plain,
    saved_on_cpu,
)

from hocket.planners.memory.frontier import FULL_RECOMPUTE
from hocket.runtime.train.fitting import KeptBudget

RESERVES = (0.3 / 8, 1 / 8)
"""Of a cap, left to the gaps of the allocator; the second where the first is too little."""


@dataclass(frozen=True)
class Run:
    """What a run trains, and where its rows go."""

    book: Book
    sizes: Sizes
    width: int
    layers: int
    caps: tuple[int, ...]
    baseline: tuple[int, range]
    """Width, and depths to find the deepest of, for systems that hold all parameters."""
    small: tuple[int, int, Sizes]
    """Width, depth and batch of a GPT for many budgets and many steps."""
    replays: dict[str, Any]
    case: list[Case] = field(default_factory=list)
    """The plans of the large model, once they are made."""

    def gpt(self, home: str, **changes: Any) -> Callable[[], Any]:
        """How the large model is made."""
        layers = changes.get("layers", self.layers)
        return lambda: gpt(self.width, layers, self.sizes, home)

    @property
    def micro(self) -> int:
        """Parts of a step for systems that do not chunk: one sequence each."""
        return max(1, self.sizes.tokens // self.sizes.sequence)


def under_budget(run: Run, name: str, build: Any, batch: Any, cap: int, loss_of: Any = forward,
                 **how: Any) -> None:  # fmt: skip
    """hocket with a budget a little below the cap."""
    for part in RESERVES:
        notes: dict[str, Any] = {"budget_gib": cap * (1 - part) / GIB}
        make = ours(int(cap * (1 - part)), notes, loss_of)
        row = measured(make, build, batch, cap=cap, **how)
        if "error" not in run.book.add(name, {**row, **notes}):
            break


def rates(run: Run) -> None:
    """What the machine's buses and cores do."""
    size = 2**28 if DEVICE == "cuda" else 2**20
    found = {**copy_rates(size), **update_rates(size // 4, size)}
    if DEVICE == "cuda":
        found["bf16_tflops"] = product_rate()
    run.book.add("rates", found)


def uncapped(run: Run) -> None:
    """The large model with all memory that there is."""
    micro = min(4, run.micro)
    row = measured(plain, run.gpt(DEVICE), word_batch(run.sizes), micro=micro)
    run.book.add("uncapped", row)


def main_model(run: Run) -> None:
    """The large model by hocket under each cap."""
    batch = word_batch(run.sizes)
    for cap in run.caps:
        under_budget(run, f"hocket {cap / GIB:g} GiB", run.gpt("cpu"), batch, cap, explain=True)


def chosen(run: Run) -> None:
    """The large model as it is chosen for each cap, then with given mixes of updates."""
    build, batch = run.gpt("cpu"), word_batch(run.sizes)
    case = Case(build(), batch, forward, on="auto", device=torch.device(DEVICE))
    run.case[:] = [case]
    cluster = case.frontier.problem.cluster
    run.book.add("planned", {"seconds": case.frontier.plan_seconds,
                             "host_update_gbps": cluster.host_update_bps / 1e9})  # fmt: skip
    for cap in run.caps:
        case.model = case.model or build()
        kept = case.chosen(int(cap * (1 - RESERVES[0])))
        row = mix_row(case, build, kept.section, cap)
        run.book.add(f"chosen {cap / GIB:g} GiB", {"predicted_s": kept.step_s, **row})


def mixes(run: Run) -> None:
    """The large model with given mixes of updates."""
    if not run.case:
        chosen(run)
    chunks = 16 if DEVICE == "cuda" else 2
    for share, is_first_here in ((1 / 3, True), (1 / 4, True), (1 / 3, False), (0.0, False)):
        if run.book.left_s < 50 and DEVICE == "cuda":
            break
        count = round(share * run.layers)
        section = mixed_section(run.case[0], count, chunks, is_first_here=is_first_here)
        row = mix_row(run.case[0], run.gpt("cpu"), section, run.caps[0])
        run.book.add("mix", {"visiting": count, "embedding_here": is_first_here, **row})


def pairs(run: Run) -> None:
    """Twenty pairs of model and budget: kept, and as predicted."""
    width, layers, sizes = run.small
    image = torch.randn(8, 3, 56, 56, device=DEVICE), torch.randint(1000, (8,), device=DEVICE)
    models = {
        "gpt": (gpt(width, layers, sizes, "cpu"), word_batch(sizes), forward),
        "wide gpt": (gpt(2 * width, 2, sizes, "cpu"), word_batch(sizes), forward),
        "experts": (
            gpt(width, 3, sizes, "cpu", num_experts=4, hidden=width), word_batch(sizes), forward,
        ),
        "resnet": (
            drawn(DeepResNet(24, 56, run.replays["channels"]), "cpu"), image, plain_forward,
        ),
    }  # fmt: skip
    for name, (model, batch, loss_of) in models.items():
        case = Case(model, batch, loss_of, on="auto", device=torch.device(DEVICE))
        for budget in case.budgets(5):
            clear()
            kept = case.chosen(budget)
            counted = case.counted(kept)
            row = {"budget": budget, "predicted": kept.peak_bytes, "counted": counted}
            run.book.add("pair", {"model": name, **row, "predicted_s": kept.step_s,
                                  "step_s": case.step_s, "kept": counted <= budget})  # fmt: skip


def losses(run: Run) -> None:
    """A hundred steps beside plain PyTorch, with clipping by norm in both, in two types.

    Once with every block recomputed, where no sum is made in another order, once within half of the
    memory: loss in chunks, updates on the host. Beside it: what plain PyTorch itself changes from
    run to run, and by adding up the same samples in two parts.
    """
    width, layers, sizes = run.small
    batch = word_batch(sizes)
    for name, loss_of in (("float32", plain_forward), ("bfloat16 autocast", forward)):
        theirs = plain_losses(gpt(width, layers, sizes, DEVICE), batch, loss_of, 1)
        peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 2**20
        clear()
        row: dict[str, Any] = {"in": name, "steps": 100, "last": theirs[-1]}
        for key, parts in (("plain_again", 1), ("plain_in_two_parts", 2)):
            again = plain_losses(gpt(width, layers, sizes, DEVICE), batch, loss_of, parts)
            row[key] = _worst(again, theirs)
            clear()
        case = Case(gpt(width, layers, sizes, "cpu"), batch, loss_of, on="auto",
                    device=torch.device(DEVICE))  # fmt: skip
        full = case.frontier.find(FULL_RECOMPUTE)
        assert full is not None
        assert full.memory is not None
        plans = {
            "recomputed": KeptBudget(full.memory, 0),
            "within_half": case.chosen(max(peak // 2, case.budgets(2)[0])),
        }
        for key, kept in plans.items():
            model = gpt(width, layers, sizes, "cpu")
            train = case.loop(model, kept, adamw(model), clip_norm=1.0)
            mine = [float(train.step(batch)) for _ in range(100)]
            row[key] = {"worst": _worst(mine, theirs), "chunks": kept.section.loss_chunks,
                        "same_bits": sum(a == b for a, b in zip(mine, theirs, strict=True)),
                        "blocks": Counter(f"{b.activations}/{b.parameters}/{b.update}"
                                          for b in kept.section.blocks)}  # fmt: skip
            del train, model
            clear()
        del case
        run.book.add("losses", row)


def plain_losses(model: Any, batch: Any, loss_of: Any, parts: int) -> list[float]:
    """A hundred steps of plain PyTorch that adds up the gradients of so many parts."""
    optimizer, found = adamw(model, fused=True), []
    for _ in range(100):
        total = 0.0
        for part in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
            loss = loss_of(model, part) / parts
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def _worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def knob(run: Run) -> None:
    """``activation_memory_budget`` of torch.compile: does the depth that eager trains fit."""
    width, depths = run.baseline
    build = lambda: gpt(width, depths[len(depths) // 2], run.sizes, DEVICE)  # noqa: E731
    for share in (0.5, 0.1):
        row = measured(activation_budget(share), build, word_batch(run.sizes), micro=run.micro,
                       cap=run.caps[0], steps=1)  # fmt: skip
        run.book.add(f"activation_memory_budget {share}", row)


def baselines(run: Run) -> None:
    """The deepest model that each system trains under each cap, by halving."""
    width, depths = run.baseline
    systems = {"eager": plain, "checkpointing": checkpointed, "save_on_cpu": saved_on_cpu}
    for cap in run.caps:
        for name, make in systems.items():
            low, high = 0, len(depths)
            while low < high and run.book.left_s > 20:
                middle = (low + high) // 2
                build = lambda: gpt(width, depths[middle], run.sizes, DEVICE)  # noqa: B023, E731
                row = measured(make, build, word_batch(run.sizes), micro=run.micro, cap=cap,
                               steps=0)  # fmt: skip
                run.book.add(name, {"layers": depths[middle], **row})
                low, high = (low, middle) if "error" in row else (middle + 1, high)


def fsdp(run: Run) -> None:
    """FSDP2 and hocket on a third of the large model's layers, same cap."""
    batch, layers = word_batch(run.sizes), max(1, run.layers // 3)
    build = run.gpt("cpu", layers=layers)
    under_budget(run, f"hocket, {layers} layers", build, batch, run.caps[0], steps=1)
    for micro in dict.fromkeys((1, min(4, run.micro))):
        row = measured(fsdp_offload, build, batch, micro=micro, cap=run.caps[0], steps=0)
        run.book.add(f"fsdp2, {layers} layers", row)


def replays(run: Run) -> None:
    """Depth, length and experts of the seed's talk in float32, uncapped and under the last cap."""
    sizes = run.replays
    width = sizes["width"]
    image = lambda rows: (  # noqa: E731
        torch.randn(rows, 3, sizes["image"], sizes["image"], device=DEVICE),
        torch.randint(1000, (rows,), device=DEVICE),
    )
    sound = (torch.randn(sizes["rows"], sizes["length"], width, device=DEVICE),
             torch.randint(29, (sizes["rows"], sizes["length"]), device=DEVICE))  # fmt: skip
    deep = lambda home: drawn(DeepResNet(sizes["depth"], sizes["image"], sizes["channels"]), home)  # noqa: E731
    experts = {"num_experts": sizes["experts"], "hidden": 2 * width}
    cases = {
        "resnet batch 16": (deep, image(16)),
        "resnet batch 32": (deep, image(32)),
        "rnn": (lambda home: drawn(LongRnn(sizes["length"], width), home), sound),
        "experts": (
            lambda home: gpt(width, 12, run.sizes, home, **experts), word_batch(run.sizes),
        ),
    }  # fmt: skip
    for name, (build, batch) in cases.items():
        if run.book.left_s < 60 and DEVICE == "cuda":
            run.book.add(name, {"left_out": f"{run.book.left_s:.0f} s left"})
            continue
        uncapped = measured(lambda *a: plain(*a, loss_of=plain_forward), lambda: build(DEVICE),  # noqa: B023
                            batch, steps=1)  # fmt: skip
        run.book.add(f"{name}, uncapped", uncapped)
        under_budget(run, f"{name}, hocket", lambda: build("cpu"), batch, run.caps[-1],  # noqa: B023
                     plain_forward, steps=1)  # fmt: skip


PARTS: dict[str, tuple[Callable[[Run], None], float]] = {
    "rates": (rates, 10),
    "uncapped": (uncapped, 20),
    "main": (main_model, 80),
    "chosen": (chosen, 90),
    "mixes": (mixes, 50),
    "pairs": (pairs, 15),
    "losses": (losses, 25),
    "knob": (knob, 60),
    "replays": (replays, 60),
    "fsdp": (fsdp, 60),
    "baselines": (baselines, 40),
}
"""And the seconds below which a part is not begun."""


def sizes_of(book: Book, *, is_toy: bool) -> Run:
    """The sizes of a run."""
    if is_toy:
        tiny = Sizes(sequence=16, vocabulary=64, tokens=64)
        replays = {
            "width": 16,
            "channels": 16,
            "image": 28,
            "rows": 4,
            "depth": 12,
            "length": 40,
            "experts": 2,
        }
        return Run(book, tiny, 32, 3, (GIB // 64,), (32, range(1, 4)), (32, 3, tiny), replays)
    replays = {
        "width": 1024, "channels": 1024, "image": 224, "rows": 128, "depth": 1001, "length": 400,
        "experts": 48,
    }  # fmt: skip
    small = Sizes(tokens=4096)
    caps = (8 * GIB, 12 * GIB)
    return Run(book, Sizes(), 3072, 36, caps, (2048, range(2, 14)), (512, 6, small), replays)


def main() -> None:
    """All parts that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--toy", action="store_true", help="a rehearsal on a processor")
    parser.add_argument("--caps", default="", help="GiB, instead of all caps: 8")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    run = sizes_of(Book(options.out, options.seconds), is_toy=options.toy)
    if options.caps:
        run = replace(run, caps=tuple(int(float(cap) * GIB) for cap in options.caps.split(",")))
    for name in options.parts.split(","):
        part, needed_s = PARTS[name]
        if run.book.left_s < needed_s:
            run.book.add(name, {"left_out": f"{run.book.left_s:.0f} s left, {needed_s} needed"})
            continue
        try:
            part(run)
        # The other parts go on.
        except Exception as error:
            run.book.add(name, {"error": f"{type(error).__name__}: {error}"[:600]})
            clear()


if __name__ == "__main__":
    main()
