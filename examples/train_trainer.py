"""Hugging Face's Trainer with a plan: its loop, schedule, logs and checkpoints; hocket's steps.

python examples/train_trainer.py --on 2xv100-16g --steps 20
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from hocket.integrations.transformers import HocketTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    row = torch.arange(16) % 7
    rows = [{"input_ids": row + shift, "labels": row + shift} for shift in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=arguments.steps, learning_rate=1e-2, logging_steps=5, report_to=[],
            per_device_train_batch_size=8, use_cpu=not torch.cuda.is_available(),
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = HocketTrainer(model, settings, train_dataset=rows, on=arguments.on)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.4f}")


if __name__ == "__main__":
    main()
