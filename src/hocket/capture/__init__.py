"""A PyTorch model or training step as a Graph; the only planner-side room that imports torch."""

from hocket.capture.execute import Executed, execute, named_tensors
from hocket.capture.model import CaptureWarning, UntraceableError, capture, capture_program
from hocket.capture.program import Call, Program, TensorSpec
from hocket.capture.zoo import ZOO
from hocket.capture.zoo.load import load_model

__all__ = [
    "ZOO",
    "Call",
    "CaptureWarning",
    "Executed",
    "Program",
    "TensorSpec",
    "UntraceableError",
    "capture",
    "capture_program",
    "execute",
    "load_model",
    "named_tensors",
]
