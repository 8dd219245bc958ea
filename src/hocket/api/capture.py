"""PyTorch models as graphs; imports PyTorch."""

from __future__ import annotations

from hocket.capture import ZOO, CaptureWarning, capture, capture_program, load_model
from hocket.capture.loss import MEAN, OWN, told
from hocket.capture.sizes import capture_sizes, trying_samples

__all__ = [
    "MEAN",
    "OWN",
    "ZOO",
    "CaptureWarning",
    "capture",
    "capture_program",
    "capture_sizes",
    "load_model",
    "told",
    "trying_samples",
]
