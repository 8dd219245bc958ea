"""An image classifier on the digits of scikit-learn; the loss is taken outside of the model.

python examples/train_digits.py --on 2xv100-16g --epochs 3
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR

import hocket


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a step computes: a loss, and how many guesses are right."""
    images, labels = batch
    scores = model(images)
    right = (scores.argmax(1) == labels).float().mean()
    return {"loss": nn.functional.cross_entropy(scores, labels), "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 16, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = StepLR(optimizer, 1, 0.5)
    batches = list(zip(images[:1472].split(64), labels[:1472].split(64), strict=True))
    train = hocket.prepare(model, optimizer, batches[0], on=arguments.on, forward=loss_of)
    for epoch in range(1, arguments.epochs + 1):
        for number in torch.randperm(len(batches)).tolist():
            loss = train.step(batches[number])
        schedule.step()
        train.evaluate((images[1472:], labels[1472:]))
        print(f"epoch {epoch}: loss {loss.item():.4f}, right {train.outputs['right'].item():.1%}")


if __name__ == "__main__":
    main()
