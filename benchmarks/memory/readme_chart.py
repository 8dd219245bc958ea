"""GPU memory against step time of Qwen3-4B: hocket, gradient checkpointing, FSDP2 offload.

    python benchmarks/memory/readme_chart.py --out DIR [--seconds 470] [--rows EARLIER.jsonl]
    python benchmarks/memory/readme_chart.py --toy --out DIR          (anywhere, a tiny model)
    python benchmarks/memory/readme_chart.py --draw DIR/rows.jsonl --out DIR   (chart, table)

Plain PyTorch and checkpointing take about 25 s each, FSDP2 about 80 s, a budget of hocket about
100 s. The call ends within ``--seconds``: a case that would not end in time is left to the next.

Qwen3-4B from its published config with random weights, 16 x 1024 tokens a step, bf16 autocast over
float32 parameters, AdamW. Each case is a process of its own. hocket's are capped by
``set_per_process_memory_fraction`` at the budget less the CUDA context before anything is
allocated; the others take what they take. Memory is what PyTorch reserves plus the CUDA context.
Rows go to ``DIR/rows.jsonl`` as they come, with those of ``--rows`` first; a case that is measured
there is not repeated. At the end ``DIR/table.md`` and ``DIR/chart.svg`` are written from the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
Row = dict[str, Any]
GIB = 2**30
CASES: tuple[Row, ...] = (
    {"system": "PyTorch", "microbatches": 2},
    {"system": "checkpointing", "microbatches": 1},
    {"system": "FSDP2 offload", "microbatches": 1},
    {"system": "hocket", "budget": "16GiB"},
    {"system": "hocket", "budget": "12GiB"},
    {"system": "hocket", "budget": "32GiB"},
    {"system": "hocket", "budget": "64GiB"},
)
SHORTEST_S = {"PyTorch": 20, "checkpointing": 20, "FSDP2 offload": 50, "hocket": 75}
"""Seconds that a case takes at least: it is not begun with less time left."""
TOY_BUDGETS = {"12GiB": "24MiB", "16GiB": "32MiB", "32GiB": "48MiB", "64GiB": "64MiB"}


# ── one process each ─────────────────────────────────────────────────────────────────────────────


def qwen3_4b(toy: bool, device: str) -> tuple[Any, Row]:
    """Qwen3-4B with random weights on ``device``, and a batch on the host."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
             "vocab_size": 640} if toy else {
        "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
        "vocab_size": 151936}  # fmt: skip
    config = Qwen3Config(
        **sizes, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True
    )
    # Drawn on the GPU, which takes a second: four billion numbers take a host a minute.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(sizes["vocab_size"], (4, 32) if toy else (16, 1024))
    return model.train(), {"input_ids": ids, "labels": ids}


def loss_of(model: Any, batch: Row) -> Any:
    import torch

    with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):
        return model(**batch).loss


def timed(step: Callable[[], object], warm_up: int, steps: int) -> Row:
    """Run steps; the median of the last ones and the seconds of each."""
    import torch

    taken = []
    for _ in range(warm_up + steps):
        started_s = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started_s)
    return {"step_s": statistics.median(taken[warm_up:]), "steps_s": [round(t, 4) for t in taken]}


def card_bytes() -> int:
    """Memory of the card that this process takes at most: reserved bytes and the CUDA context."""
    import torch

    if not torch.cuda.is_available():
        return 64 * 2**20
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    return torch.cuda.max_memory_reserved() + context


def pytorch(system: str, microbatches: int, toy: bool) -> Row:
    """PyTorch's own training, with the library's checkpointing or FSDP2's offload to the host."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_offloaded = system == "FSDP2 offload"
    model, batch = qwen3_4b(toy, "cpu" if is_offloaded else device)
    if system != "PyTorch":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if is_offloaded:
        shard_on_host(model)
    parts = [
        {key: part.to(device) for key, part in zip(batch, tensors, strict=True)}
        for tensors in zip(*(t.chunk(microbatches) for t in batch.values()), strict=True)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for part in parts:
            (loss_of(model, part) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    row = timed(step, *((1, 2) if is_offloaded else (2, 4)))
    return {**row, "card_bytes": card_bytes()}


def shard_on_host(model: Any) -> None:
    """``fully_shard`` of each layer and of the model on one rank, parameters on the host."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_gpu = torch.cuda.is_available()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    options: Row = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def hocket_within(budget: str, toy: bool) -> Row:
    """``hocket.prepare(memory=)`` in a process that has no more memory than the budget."""
    import torch

    import hocket
    from hocket.base.units import parse_bytes

    model, batch = qwen3_4b(toy, "cpu")
    if torch.cuda.is_available():
        torch.ones(64, 64, device="cuda").mm(torch.ones(64, 64, device="cuda")).sum().item()
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction((parse_bytes(budget) - context) / total)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    started_s = time.perf_counter()
    train = hocket.prepare(model, optimizer, batch, forward=loss_of, memory=budget)
    prepare_s = time.perf_counter() - started_s
    # The sixth step may change to a plan that measured steps favour; it is no steady step.
    row = timed(lambda: train.step(batch), 6, 4)
    assert train.memory is not None
    return {**row, "card_bytes": card_bytes(), "prepare_s": prepare_s,
            "predicted_s": train.memory.step_s, "predicted_bytes": train.memory.peak_bytes,
            }  # fmt: skip


def run_case(case: Row) -> Row:
    toy, system = case["toy"], case["system"]
    try:
        if system != "hocket":
            return pytorch(system, case["microbatches"], toy)
        budget = TOY_BUDGETS[case["budget"]] if toy else case["budget"]
        return hocket_within(budget, toy)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300],
                "traceback": traceback.format_exc()[-1500:]}  # fmt: skip


# ── all of them ──────────────────────────────────────────────────────────────────────────────────


def name_of(row: Row) -> str:
    if "budget" in row:
        return f"{row['system']} memory={row['budget']}"
    return f"{row['system']}, {row['microbatches']} microbatches".removesuffix(", 1 microbatches")


def run_cases(rows: list[Row], out: Path, seconds: float, toy: bool) -> None:
    done, stop_s = {name_of(row) for row in rows}, time.perf_counter() + seconds
    for case in CASES:
        began_s = time.perf_counter()
        left_s = stop_s - began_s
        if name_of(case) in done:
            continue
        if left_s < SHORTEST_S[case["system"]] and not toy:
            print(f"{name_of(case):24} left to the next call: {left_s:.0f} s left", flush=True)
            continue
        command = [sys.executable, __file__, "--case", json.dumps({**case, "toy": toy})]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=left_s)
        except subprocess.TimeoutExpired:
            print(f"{name_of(case):24} stopped after {left_s:.0f} s, left to the next", flush=True)
            continue
        printed = [line for line in ended.stdout.splitlines() if line.startswith("ROW ")]
        found = json.loads(printed[0][4:]) if printed else {"error": ended.stderr[-600:]}
        row = {**case, **found, "seconds": round(time.perf_counter() - began_s, 1)}
        rows.append(row)
        with (out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        result = row.get("error") or f"{row['step_s']:.3f} s, {row['card_bytes'] / GIB:.1f} GiB"
        print(f"{name_of(row):24} {result} ({row['seconds']:.0f} s in all)", flush=True)


def table(rows: list[Row]) -> str:
    """The rows as markdown."""
    lines = ["| system | memory of the card, GiB | step, s | predicted step, s | tokens/s |",
             "|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        if "error" in row:
            lines.append(f"| {name_of(row)} | – | {row['error'].splitlines()[0][:60]} | | |")
            continue
        predicted = f"{row['predicted_s']:.2f}" if "predicted_s" in row else ""
        lines.append(
            f"| {name_of(row)} | {row['card_bytes'] / GIB:.1f} | {row['step_s']:.2f} | {predicted}"
            f" | {16 * 1024 / row['step_s']:,.0f} |"
        )
    return "\n".join(lines) + "\n"


COLORS = {"hocket": "#0b7285", "PyTorch": "#868e96", "checkpointing": "#e8590c",
          "FSDP2 offload": "#c2255c"}  # fmt: skip
LABELS = {"hocket": "hocket.prepare(memory=…)", "PyTorch": "PyTorch",
          "checkpointing": "gradient checkpointing",
          "FSDP2 offload": "FSDP2 with CPU offload"}  # fmt: skip


def chart(rows: list[Row]) -> str:
    """Step time over memory as an SVG, both on logarithmic axes; hocket's points are joined."""
    good = [row for row in rows if "error" not in row]
    xs = [row["card_bytes"] / GIB for row in good]
    ys = [row["step_s"] for row in good]
    left, top, width, height = 60, 44, 620, 280
    x_low, x_high = math.log2(min(xs)) - 0.3, math.log2(max(xs)) + 0.6
    y_low, y_high = math.log2(min(ys)) - 0.4, math.log2(max(ys)) + 0.4

    def at(x: float, y: float) -> tuple[float, float]:
        return (left + (math.log2(x) - x_low) / (x_high - x_low) * width,
                top + (y_high - math.log2(y)) / (y_high - y_low) * height)  # fmt: skip

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {top + height + 86}" role="img"'
        ' font-family="system-ui,sans-serif" font-size="12">'
        "<title>Step time against GPU memory, Qwen3-4B on one H200</title>"
        '<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{left}" y="22" font-size="15" font-weight="600">Qwen3-4B on one H200, '
        "16 x 1024 tokens: step time over GPU memory</text>"
    ]
    for power in range(math.ceil(x_low), math.floor(x_high) + 1):
        x, _ = at(2.0**power, 2.0**y_low)
        parts.append(
            f'<path d="M{x:.1f} {top}v{height}" stroke="#e9ecef"/>'
            f'<text x="{x:.1f}" y="{top + height + 16}" text-anchor="middle">{2**power} GiB</text>'
        )
    for power in range(math.ceil(y_low), math.floor(y_high) + 1):
        _, y = at(2.0**x_low, 2.0**power)
        parts.append(
            f'<path d="M{left} {y:.1f}h{width}" stroke="#e9ecef"/>'
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{2.0**power:g} s</text>'
        )
    for index, (system, color) in enumerate(COLORS.items()):
        of_system = sorted(
            (row for row in good if row["system"] == system), key=lambda row: row["card_bytes"]
        )
        points = [at(row["card_bytes"] / GIB, row["step_s"]) for row in of_system]
        if not points:
            continue
        if system == "hocket":
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}"/>')
        for number, ((x, y), row) in enumerate(zip(points, of_system, strict=True)):
            # Neighbours on a line would write over each other's labels.
            label_y = y + 20 if number % 2 else y - 10
            text = f"{row['card_bytes'] / GIB:.1f} GiB, {row['step_s']:.2f} s"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>'
                f'<text x="{x:.1f}" y="{label_y:.1f}" text-anchor="middle">{text}</text>'
            )
        key_x, key_y = left + index % 3 * 220, top + height + 40 + index // 3 * 22
        parts.append(
            f'<circle cx="{key_x}" cy="{key_y - 4}" r="5" fill="{color}"/>'
            f'<text x="{key_x + 12}" y="{key_y}">{LABELS[system]}</text>'
        )
    return "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("readme_chart"))
    parser.add_argument("--seconds", type=float, default=470.0, help="the call ends within it")
    parser.add_argument("--rows", type=Path, help="rows of an earlier call")
    parser.add_argument("--draw", type=Path, help="only draw these rows")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print("ROW " + json.dumps(run_case(json.loads(arguments.case))), flush=True)
        # Interpreter shutdown would free the model piece by piece.
        os._exit(0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    own = arguments.out / "rows.jsonl"
    earlier = [arguments.draw] if arguments.draw else [arguments.rows, own]
    rows = [json.loads(line) for path in earlier if path is not None and path.exists()
            for line in path.read_text().splitlines()]  # fmt: skip
    if not arguments.draw:
        # One file holds all rows, also those of an earlier call.
        own.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run_cases(rows, arguments.out, arguments.seconds, arguments.toy)
    print(table(rows))
    (arguments.out / "table.md").write_text(table(rows))
    (arguments.out / "chart.svg").write_text(chart(rows))


if __name__ == "__main__":
    main()
