"""Weights of a loss, which multiply the first gradient of a backward pass.

Microbatches of an accumulated batch weight the loss by their fraction of the batch, and losses of
16-bit models are scaled up against underflow. Both multiply the gradient of the loss, as autograd
would.
"""

from __future__ import annotations

import torch

from hocket.capture.program import Call, Program
from hocket.graph.graph import Phase

Weight = float | torch.Tensor
"""Weight of a loss: a number, or a tensor with one element if it is known only on the device."""


def starts_backward(program: Program, call: Call) -> bool:
    """True if a call creates the gradient of the loss with respect to itself, which is one."""
    is_first = call.phase == Phase.BACKWARD and call.cost.kind == "aten.ones_like"
    return is_first and bool(program.outputs) and call.reads == (program.outputs[0],)
