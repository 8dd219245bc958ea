"""A training loop that is part of a fleet: it may be stopped, moved and killed, and goes on.

    python examples/fleet_train.py                       # by hand, a plain loop
    hocket fleet submit examples/fleet_train.toml        # in a fleet

The two lines that matter are those with ``lease``.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import hocket


def data(num_rows: int = 512, num_columns: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels that a linear model can learn."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(num_rows, num_columns))
    labels = rows @ random.normal(size=num_columns) > 0.0
    return rows, labels.astype(float)


class Model:
    """Logistic regression by gradient descent with momentum."""

    def __init__(self, num_columns: int) -> None:
        self.step = 0
        self.weights = np.zeros(num_columns)
        self.momentum = np.zeros(num_columns)

    def loss(self, rows: np.ndarray, labels: np.ndarray) -> float:
        """Cross-entropy; finite also where a guess rounds to 0 or 1."""
        scores = rows @ self.weights
        return float(np.mean(np.logaddexp(0.0, scores) - labels * scores))

    def train(self, rows: np.ndarray, labels: np.ndarray) -> float:
        """One step; answers the loss before it."""
        loss = self.loss(rows, labels)
        guesses = 1.0 / (1.0 + np.exp(-rows @ self.weights))
        self.momentum = 0.9 * self.momentum + rows.T @ (guesses - labels) / len(rows)
        self.weights = self.weights - 0.1 * self.momentum
        self.step += 1
        return loss

    def save(self, folder: Path) -> None:
        np.savez(folder / "model.npz", **vars(self))

    def load(self, folder: Path) -> None:
        with np.load(folder / "model.npz", allow_pickle=False) as file:
            self.step = int(file["step"])
            self.weights, self.momentum = file["weights"], file["momentum"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="make steps take time")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()

    rows, labels = data()
    model = Model(rows.shape[1])

    def save(step: int) -> Path:
        return hocket.write_checkpoint(arguments.checkpoints, step, model.save)

    lease = hocket.lease(save=save)
    if lease.checkpoint is not None:
        model.load(Path(lease.checkpoint))
    loss = model.loss(rows, labels)
    for step in lease.steps(model.step, arguments.steps):
        loss = model.train(rows, labels)
        time.sleep(arguments.step_seconds)
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.4f}")
    print(f"done after {model.step} steps: loss {loss:.4f}")


if __name__ == "__main__":
    main()
