"""What batch norms of 16-bit floats keep on a processor, where tensors have no memory.

Where weights have 32 bits, PyTorch keeps mean and deviation in 32 bits, and for fake tensors takes
them for 16: a rehearsal would count too little. O(1) per op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NORM = torch.ops.aten.native_batch_norm.default
_SHORT = (torch.bfloat16, torch.float16)


class WideStatistics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has fake batch norms keep as much as real ones do."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the op, and widen what it keeps."""
        result = func(*args, **(kwargs or {}))
        if func is not _NORM or args[1] is None:
            return result
        rows, weight = args[:2]
        if rows.device.type != "cpu" or rows.dtype not in _SHORT or weight.dtype in _SHORT:
            return result
        made, *kept = result
        return made, *(each.to(weight.dtype) for each in kept)
