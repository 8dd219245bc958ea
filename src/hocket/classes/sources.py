"""Load the user's net and data, named as ``file.py:function``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.trouble import own_code
from hocket.capture.zoo.load import find_function
from hocket.classes.data import Splits, splits_from


def load_net(spec: str, seed: int) -> nn.Module:
    """Call the user's function that returns a net; random weights depend on the seed alone."""
    torch.manual_seed(seed)
    net = _called(spec)
    if isinstance(net, tuple):
        net = net[0]
    if not isinstance(net, nn.Module):
        raise UsageError(
            f"gave {type(net).__name__}, not a torch.nn.Module", hint="return the net", where=spec
        )
    # Parameters that are frozen for inference must be trainable here.
    return net.eval().requires_grad_(True)


def load_data(spec: str, seed: int) -> Splits:
    """Call the user's function that returns data, and split the data."""
    return splits_from(_called(spec), spec, seed)


def _called(spec: str) -> Any:
    if ":" not in spec:
        raise UsageError(f"{spec!r} names no function", hint="write file.py:function")
    function = find_function(spec)
    hint = "it is called without arguments; check that it runs outside hocket"
    with own_code(f"{spec!r} fails", hint):
        return function()


def state_arrays(net: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """State dict of a net as numpy arrays."""
    return {name: value.detach().cpu().numpy() for name, value in net.state_dict().items()}


def load_arrays(net: nn.Module, arrays: Any) -> None:
    """Load arrays into a net with the same state dict keys and shapes."""
    net.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
