"""Hugging Face's Trainer with a plan: its loop, schedule, logs and checkpoints; hocket's steps.

python examples/train_trainer.py --on 2xv100-16g --steps 20
"""

import argparse
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hocket


class PlannedTrainer(Trainer):
    """A Trainer whose forward and backward a plan carries."""

    def __init__(self, *arguments: Any, on: str = "auto", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.on, self.planned = on, None

    def training_step(self, model: Any, inputs: Any, *_: Any) -> torch.Tensor:
        """The loss of a batch; its gradients are added to the parameters'."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        if self.planned is None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            self.planned = hocket.prepare(self.model, optimizer, inputs, on=self.on)
        loss = self.planned(inputs)
        (loss / self.args.gradient_accumulation_steps).backward()
        return loss.detach() / self.args.gradient_accumulation_steps


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
        trainer = PlannedTrainer(model, settings, train_dataset=rows, on=arguments.on)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.4f}")


if __name__ == "__main__":
    main()
