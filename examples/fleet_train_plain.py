"""The same training without a line for the fleet: it saves now and then, and can resume.

    python examples/fleet_train_plain.py [--resume]
    hocket fleet submit examples/fleet_train_plain.toml

A script like this is stopped by SIGTERM, and from the second attempt on is started with what its
job names under ``resume``. It loses what it did since it saved last.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
from fleet_train import Model, data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="make steps take time")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--checkpoint", type=Path, default=Path("model.npz"))
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()

    rows, labels = data()
    model = Model(rows.shape[1])
    if arguments.resume and arguments.checkpoint.exists():
        with np.load(arguments.checkpoint, allow_pickle=False) as file:
            model.step = int(file["step"])
            model.weights, model.momentum = file["weights"], file["momentum"]
    loss = model.loss(rows, labels)
    while model.step < arguments.steps:
        loss = model.train(rows, labels)
        time.sleep(arguments.step_seconds)
        if model.step % arguments.save_every == 0 or model.step == arguments.steps:
            # Killed while it writes, it must find the old file the next time.
            temporary = arguments.checkpoint.with_suffix(".tmp.npz")
            np.savez(temporary, **vars(model))
            os.replace(temporary, arguments.checkpoint)
    print(f"done after {model.step} steps: loss {loss:.4f}")


if __name__ == "__main__":
    main()
