"""Where a backward begins, so that it can begin with something else than one.

A part of an accumulated batch counts a share of the loss, and 16-bit floats are scaled up against
underflow; both multiply the first gradient, as autograd would.
"""

from __future__ import annotations

import torch

from hocket.capture.program import Call, Program
from hocket.graph.graph import Phase

Weight = float | torch.Tensor
"""Weight of a loss; a tensor of one element where it is known only on the device."""


def starts_backward(program: Program, call: Call) -> bool:
    """True if a call makes the gradient of the loss itself, which is one."""
    is_first = call.phase == Phase.BACKWARD and call.cost.kind == "aten.ones_like"
    return is_first and bool(program.outputs) and call.reads == (program.outputs[0],)
