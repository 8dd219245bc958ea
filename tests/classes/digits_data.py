"""Digits for the tests: real ones where they are at hand, else those of the example."""

import gzip
from pathlib import Path

import numpy as np
from torch import nn

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared/data/serving/digits_8x8.csv.gz"


def images():
    if not REAL.is_file():
        return _example("images")()
    with gzip.open(REAL, "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    return (rows[:, :64].reshape(-1, 1, 8, 8) / 16).astype(np.float32), rows[:, 64].astype(int)


def net() -> nn.Module:
    return _example("net")()


def _example(name):
    from hocket.capture.zoo.load import find_function

    return find_function(f"{ROOT / 'examples/classes_digits.py'}:{name}")
