"""A PyTorch model or training step as a Graph; the only planner-side room that imports torch."""

from hocket.capture.model import capture, capture_program
from hocket.capture.program import Call, Program, TensorSpec
from hocket.capture.zoo import ZOO
from hocket.capture.zoo.load import load_model

__all__ = ["ZOO", "Call", "Program", "TensorSpec", "capture", "capture_program", "load_model"]
