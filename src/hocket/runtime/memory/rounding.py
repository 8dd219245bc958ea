"""Parameters that a step only reads rounded: autocast turns them into 16-bit floats before use.

The recorded step shows it: every op that reads the parameter, in forward or backward, is a cast to
one and the same type. Copying the rounded values instead gives the same numbers.
"""

from __future__ import annotations

import torch

from hocket.capture.program import Program
from hocket.graph.graph import Phase
from hocket.simulate.rewriting.casts import CAST


def rounded_parameters(program: Program) -> dict[str, torch.dtype]:
    """The type that each such parameter is read in, by name."""
    found: dict[int, set[torch.dtype | None]] = {t: set() for t in program.parameters.values()}
    for call in program.calls:
        if call.phase == Phase.OPTIMIZER:
            continue
        dtype = call.kwargs.get("dtype") if str(call.function).startswith(CAST) else None
        for tensor in call.reads:
            if tensor in found:
                found[tensor].add(dtype)
    return {
        name: dtype
        for name, tensor in program.parameters.items()
        if len(found[tensor]) == 1 and isinstance(dtype := next(iter(found[tensor])), torch.dtype)
    }
