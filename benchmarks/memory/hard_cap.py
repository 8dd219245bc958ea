"""Budgets under a hard cap: does training keep what a card of that size has, and how fast is it?

    python benchmarks/memory/hard_cap.py --out DIR --seconds 460     (on a GPU)
    python benchmarks/memory/hard_cap.py --toy --out DIR             (anywhere, small)

For each model a reference process trains eagerly and, where the library has it, with activation
checkpointing. Then `hocket.prepare(memory=)` trains within a quarter of the eager memory and within
that of checkpointing. Its process is capped by `torch.cuda.set_per_process_memory_fraction` at the
budget less the CUDA context, before anything is allocated; where it runs out of memory, it is tried
again at 1.03 budgets. Rows are appended to ``DIR/rows.jsonl`` and kept, so that it can be stopped
and started again. ``--profile`` adds what the streams of one step do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

Row = dict[str, Any]
GIB = 2**30
WARM_UP, STEPS = 14, 8
"""The first steps correct the choice of a plan."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gpt_xl(toy: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 3, "n_embd": 64, "n_head": 2} if toy else {
        "n_layer": 48, "n_embd": 1600, "n_head": 25}  # fmt: skip
    config = GPT2Config(**size, vocab_size=640 if toy else 50304, n_positions=1024,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(config), words(640 if toy else 50304, *((2, 32) if toy else (4, 1024)))


def gemma2(toy: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    size = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128} if toy else {
        "num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 4096}  # fmt: skip
    config = Gemma2Config(**size, vocab_size=640 if toy else 64000, num_attention_heads=8,
                          num_key_value_heads=4, head_dim=16 if toy else 128)  # fmt: skip
    return Gemma2ForCausalLM(config), words(640 if toy else 64000, *((2, 32) if toy else (4, 1024)))


def qwen3(toy: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128} if toy else {
        "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072}  # fmt: skip
    config = Qwen3Config(**size, vocab_size=640 if toy else 151936, num_attention_heads=16,
                         num_key_value_heads=8, head_dim=16 if toy else 128,
                         tie_word_embeddings=True)  # fmt: skip
    return Qwen3ForCausalLM(config), words(640 if toy else 151936, *((2, 32) if toy else (4, 2048)))


def convnext(toy: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    size = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 32, 64]} if toy else {
        "depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]}  # fmt: skip
    model = ConvNextForImageClassification(ConvNextConfig(**size, num_labels=1000))
    batch, side = (2, 64) if toy else (64, 224)
    return model, {"pixel_values": torch.randn(batch, 3, side, side),
                   "labels": torch.randint(1000, (batch,))}  # fmt: skip


MODELS: dict[str, Callable[[bool], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "gemma2-like 4x1024": gemma2,
    "gpt-xl 4x1024": gpt_xl,
    "qwen3-0.6b 4x2048": qwen3,
    "convnext-base 64": convnext,
}


def words(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        loss: torch.Tensor = model(**batch).loss
    return loss


def built(name: str, toy: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model on the host; numbers do not matter here, so that most are not drawn."""
    saved = {each: getattr(nn.init, each) for each in ("normal_", "trunc_normal_", "uniform_",
                                                        "kaiming_uniform_")}  # fmt: skip
    try:
        for each in () if toy else saved:
            setattr(nn.init, each, lambda tensor, *_, **__: tensor.data.fill_(0.01))
        model, batch = MODELS[name](toy)
    finally:
        for each, function in saved.items():
            setattr(nn.init, each, function)
    return model.train(), batch


# ── one process each ─────────────────────────────────────────────────────────────────────────────


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object]) -> float:
    taken = []
    for number in range(WARM_UP + STEPS):
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        if number >= WARM_UP:
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def held() -> Row:
    if DEVICE != "cuda":
        return {"allocated": 10 * 2**20, "reserved": 10 * 2**20, "context": 0}
    free, total = torch.cuda.mem_get_info()
    return {"allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "context": total - free - torch.cuda.memory_reserved()}  # fmt: skip


def reference(name: str, toy: bool, checkpoints: bool) -> Row:
    """Plain PyTorch, with the library's own checkpointing or without."""
    model, batch = built(name, toy)
    if checkpoints:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    model.to(DEVICE)
    batch = {key: value.to(DEVICE) for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step_s = timed(step)
    return {"step_s": step_s, **held()}


def within(name: str, toy: bool, budget: int, cap: float, async_update: bool, profile: str) -> Row:
    """Training within a budget, in a process that has no more."""
    import hocket

    model, batch = built(name, toy)
    if DEVICE == "cuda":
        torch.ones(64, 64, device=DEVICE).mm(torch.ones(64, 64, device=DEVICE)).sum().item()
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((cap * budget - context) / total)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    started = time.perf_counter()
    train = hocket.prepare(model, optimizer, batch, forward=loss_of, memory=budget,
                           async_update=async_update)  # fmt: skip
    row: Row = {"prepare_s": time.perf_counter() - started}
    kept = train.memory
    assert kept is not None
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row |= {"first_predicted_s": kept.step_s}
    row["step_s"] = timed(lambda: train.step(batch))
    kept = train.memory
    assert kept is not None
    ways = Counter(
        f"{b.activations}/{b.checkpoint}/{b.parameters}/{b.update}" for b in kept.section.blocks
    )
    row |= {"predicted_s": kept.step_s, "predicted_card": kept.peak_bytes,
            "predicted_allocated": kept.allocated_bytes, "blocks": ways,
            "loss_chunks": kept.section.loss_chunks, "replays": train.replays}  # fmt: skip
    row |= held()
    row["retries"] = torch.cuda.memory_stats().get("num_alloc_retries") if DEVICE == "cuda" else 0
    if profile:
        row["profile"] = profiled(lambda: train.step(batch), profile)
    return row


def profiled(step: Callable[[], object], path: str) -> Row:
    """Seconds in which streams work, and what the host spends its time on."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if DEVICE == "cuda" else []
    with torch.profiler.profile(activities=activities) as found:
        started = time.perf_counter()
        step()
        asked_s = time.perf_counter() - started
        synchronize()
        step_s = time.perf_counter() - started
    spans, names = defaultdict(list), Counter()
    for event in found.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            is_copy = "Memcpy" in event.name or "Memset" in event.name
            kind = event.name.split(" (")[0] if is_copy else "kernels"
            spans[kind].append((event.time_range.start, event.time_range.end))
        else:
            names[event.name] += event.self_cpu_time_total
    found.export_chrome_trace(path)
    return {"step_s": step_s, "asked_s": asked_s,
            "busy_s": {kind: union(each) / 1e6 for kind, each in spans.items()},
            "counts": {kind: len(each) for kind, each in spans.items()},
            "host_s": {name: us / 1e6 for name, us in names.most_common(20)}}  # fmt: skip


def union(spans: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


# ── all of them ──────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("hard_cap"))
    parser.add_argument("--seconds", type=float, default=460.0, help="no case starts after it")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--case", default="", help="(internal) one case as JSON")
    arguments = parser.parse_args()
    if arguments.case:
        print("ROW " + json.dumps(one_case(json.loads(arguments.case))), flush=True)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    run_all(arguments)


def one_case(case: Row) -> Row:
    try:
        if case["what"] == "hocket":
            keys = ("name", "toy", "budget", "cap", "async_update", "profile")
            return within(**{key: case[key] for key in keys})
        return reference(case["name"], case["toy"], case["what"] == "checkpointing")
    except torch.OutOfMemoryError as error:
        return {"error": "out of memory: " + str(error)[:300]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:400],
                "traceback": traceback.format_exc()[-1500:]}  # fmt: skip


def run_all(arguments: argparse.Namespace) -> None:
    path, started = arguments.out / "rows.jsonl", time.perf_counter()
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = {row["case"]: row for row in rows}

    def run(case: str, **of_case: Any) -> Row | None:
        if case in found:
            return found[case]
        if time.perf_counter() - started > arguments.seconds:
            return None
        text = json.dumps({"toy": arguments.toy, **of_case})
        command = [sys.executable, __file__, "--case", text]
        begun = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            printed = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
            tail = done.stderr[-800:]
        except subprocess.TimeoutExpired:
            printed, tail = [], "longer than 240 s"
        row = json.loads(printed[0][4:]) if printed else {"error": tail}
        row = {"case": case, **of_case, **row, "seconds": time.perf_counter() - begun}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        found[case] = row
        print(line_of(row), flush=True)
        return row

    for name in (each for each in MODELS if arguments.only in each):
        eager = run(f"{name} eager", name=name, what="eager")
        if eager is None or "error" in eager:
            continue
        plain = run(f"{name} checkpointing", name=name, what="checkpointing")
        budgets = {"quarter": (eager["reserved"] + eager["context"]) // 4}
        if plain is not None and "error" not in plain:
            budgets["as checkpointing"] = plain["reserved"] + plain["context"]
        for called, budget in budgets.items():
            for cap in (1.0, 1.03):
                trace = str(arguments.out / f"{name} {called}.json".replace(" ", "_"))
                row = run(f"{name} {called} {cap}", name=name, what="hocket", budget=budget,
                          cap=cap, async_update=True, profile=trace if arguments.profile else "",
                          )  # fmt: skip
                if row is None or "error" not in row:
                    break


def line_of(row: Row) -> str:
    if "error" in row:
        return f"{row['case']}: {row['error'][:300]} ({row['seconds']:.0f} s)"
    sizes = {key: f"{value / GIB:.3f}" for key, value in row.items() if isinstance(value, int)}
    text = (f"{row['case']}: {row['step_s'] * 1e3:.1f} ms, allocated {sizes['allocated']}, "
            f"reserved {sizes['reserved']}, context {sizes['context']} GiB")  # fmt: skip
    if row["what"] == "hocket":
        text += (
            f"; budget {sizes['budget']}, predicted {(row['predicted_s'] or 0) * 1e3:.1f} ms, "
            f"{sizes['predicted_allocated']} and {sizes['predicted_card']} GiB; prepare "
            f"{row['prepare_s']:.1f} s, {row['retries']} retries, {row['blocks']}"
        )
    return f"{text} ({row['seconds']:.0f} s)"


if __name__ == "__main__":
    with warnings.catch_warnings() if "--case" in sys.argv else nullcontext():
        main()
