"""Hugging Face's Trainer and HocketTrainer on one GPU: step time, reserved memory, losses.

python benchmarks/memory/hf_trainer.py [--budgets 8GiB 5GiB] [--layers 36] [-o rows.json]

A GPT-2 of 774 M parameters, 8 x 1024 tokens, bf16 autocast, the Trainer's own fused AdamW,
gradient clipping at 1. Each row is a process of its own; a budget is also a hard cap of PyTorch's
allocator in it, less the CUDA context. Losses of all rows are compared with those of the Trainer.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

_STEPS, _BATCH, _TOKENS, _CONTEXT_BYTES = 14, 8, 1024, 2**29


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", nargs="*", default=["24GiB", "8GiB", "5GiB"])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.row:
        print("ROW " + json.dumps(run(arguments.row, arguments.layers)))
        return
    rows: list[dict[str, object]] = []
    print(f"{'row':22}{'ms/step':>9}{'predicted':>11}{'reserved GiB':>14}{'start s':>9}{'loss':>9}")
    for name in ("Trainer", "Trainer, checkpointing", *arguments.budgets):
        command = [sys.executable, __file__, "--row", name, "--layers", str(arguments.layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        if not found:
            print(f"{name:22} failed: {done.stderr.strip().splitlines()[-1:]}")
            rows.append({"row": name, "failed": done.stderr[-2000:]})
            continue
        row = {"row": name, **json.loads(found[0][4:])}
        rows.append(row)
        print(
            f"{name:22}{row['step_ms']:9.0f}{row['predicted_ms'] or float('nan'):11.0f}"
            f"{row['reserved_bytes'] / 2**30:14.2f}{row['start_s']:9.1f}{row['losses'][-1]:9.4f}",
            flush=True,
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


def run(name: str, num_layers: int) -> dict[str, object]:
    """Train as the row says and tell times, memory and losses."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from hocket.base.units import parse_bytes
    from hocket.integrations.transformers import HocketTrainer

    class Clock(TrainerCallback):
        """Notes when each step is done."""

        ends_s: list[float] = []  # noqa: RUF012

        def on_step_end(self, *_: object, **__: object) -> None:
            torch.cuda.synchronize()
            self.ends_s.append(time.perf_counter())

    is_plain = name.startswith("Trainer")
    torch.manual_seed(0)
    sizes = {"n_layer": num_layers, "n_embd": 1280, "n_head": 20, "n_positions": _TOKENS}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops))
    ids = torch.randint(50257, (_BATCH * _STEPS, _TOKENS))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    settings = TrainingArguments(
        tempfile.mkdtemp(), max_steps=_STEPS, per_device_train_batch_size=_BATCH, bf16=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, learning_rate=1e-4,
        gradient_checkpointing=name.endswith("checkpointing"), dataloader_pin_memory=False,
    )  # fmt: skip
    started_s = time.perf_counter()
    if is_plain:
        trainer = Trainer(model, settings, train_dataset=rows, callbacks=[Clock()])
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        cap = parse_bytes(name) - _CONTEXT_BYTES
        torch.cuda.set_per_process_memory_fraction(cap / total)
        trainer = HocketTrainer(
            model, settings, train_dataset=rows, callbacks=[Clock()], memory=name
        )
    trainer.train()
    ends_s = Clock.ends_s
    prepared = None if is_plain else trainer.prepared
    return {
        "step_ms": 1e3 * statistics.median(b - a for a, b in pairwise(ends_s[3:])),
        "predicted_ms": None if prepared is None else 1e3 * prepared.predicted_step_s,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "start_s": ends_s[0] - started_s,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


if __name__ == "__main__":
    main()
