"""Trace a PyTorch model or training step into a Graph; the only planning package that imports
torch.

``hocket.capture`` is both this package and its main function: the package object is callable.
"""

# ruff: noqa: E402

import sys
from types import ModuleType
from typing import Any

from hocket.base.extras import require

require("torch", "capturing a model")

from hocket.capture.model import CaptureWarning, capture, capture_program
from hocket.capture.program import Call, Program, TensorSpec
from hocket.capture.trouble import UntraceableError
from hocket.capture.zoo import ZOO
from hocket.capture.zoo.load import load_model

__all__ = [
    "ZOO",
    "Call",
    "CaptureWarning",
    "Program",
    "TensorSpec",
    "UntraceableError",
    "capture",
    "capture_program",
    "load_model",
]


class _Callable(ModuleType):
    """Module type that makes the package callable, because importing it shadows the function's
    name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
