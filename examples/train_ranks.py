"""One model on two processes; the same script on one process gives the same losses.

python examples/train_ranks.py --plan plan.json      # plans, writes the plan, trains alone
hocket launch plan.json examples/train_ranks.py      # one process per device of the plan
torchrun --nproc-per-node 2 examples/train_ranks.py --plan plan.json
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import hocket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=Path, default=os.environ.get("HOCKET_PLAN", "plan.json"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--save", type=Path, default=None)
    parser.add_argument("--every", type=int, default=1_000_000, help="Steps between checkpoints.")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )
    rows = torch.randn(32, 16)
    batch = (rows, rows.sum(1, keepdim=True).sin())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    if not Path(arguments.plan).exists():
        graph = hocket.capture(model, batch, forward=loss_of, optimizer=optimizer, device="cpu")
        hocket.plan_graph(graph, "2xv100-16g", planners="layer-blocks").save(arguments.plan)
    train = hocket.prepare(
        model, optimizer, batch, plan=arguments.plan, forward=loss_of, clip_norm=1.0, seed=0
    )
    for step in range(1, arguments.steps + 1):
        loss = train.step(batch)
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        if arguments.save is not None and (step % arguments.every == 0 or step == arguments.steps):
            train.save(arguments.save)


if __name__ == "__main__":
    main()
