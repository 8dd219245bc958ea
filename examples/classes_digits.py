"""Digits that are drawn here, 8 x 8 pixels with noise, and a small net that is not trained yet.

    hocket split examples/classes_digits.py:net --data examples/classes_digits.py:images \\
        --parts 5 --redundancy 2 --train 200 --retrain 100 -o digits
    hocket serve-classes digits
"""

import numpy as np
from torch import nn

STROKES = (
    "0111 1001 1001 1001 1001 1110", "0010 0110 0010 0010 0010 0111",
    "0110 1001 0001 0010 0100 1111", "1110 0001 0110 0001 0001 1110",
    "0010 0110 1010 1111 0010 0010", "1111 1000 1110 0001 0001 1110",
    "0110 1000 1110 1001 1001 0110", "1111 0001 0010 0010 0100 0100",
    "0110 1001 0110 1001 1001 0110", "0110 1001 1001 0111 0001 0110",
)  # fmt: skip


def images() -> tuple[np.ndarray, np.ndarray]:
    """1,800 images ``[1, 8, 8]`` of the ten digits, each somewhere else and drawn anew."""
    rng = np.random.default_rng(0)
    labels = np.arange(1800) % 10
    pixels = rng.normal(0, 0.25, (1800, 1, 8, 8))
    for index, label in enumerate(labels):
        digit = np.array([[int(mark) for mark in row] for row in STROKES[label].split()], float)
        top, left = rng.integers(0, 3), rng.integers(0, 5)
        ink = rng.uniform(0.6, 1.2, digit.shape)
        pixels[index, 0, top : top + 6, left : left + 4] += digit * ink
    return pixels.astype(np.float32), labels


def net() -> nn.Module:
    """Four convolutions."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
