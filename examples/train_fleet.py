"""A training that a fleet may stop, move and start again: the loop is that of any other.

python examples/train_fleet.py                                  # by hand
hocket fleet submit examples/train_fleet.toml                   # in a fleet
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import hocket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    rows = torch.randn(64, 16)
    batch = (rows, rows.prod(1, keepdim=True).sign())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    train = hocket.prepare(model, optimizer, batch, on="1xv100-16g", forward=loss_of)
    lease = hocket.lease(save=lambda step: train.save(arguments.checkpoints))
    if lease.checkpoint is not None:
        train.load(lease.checkpoint)
    loss = train.evaluate(batch)
    for step in lease.steps(train.num_steps, arguments.steps):
        loss = train.step(batch)
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    print(f"done after {train.num_steps} steps: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
