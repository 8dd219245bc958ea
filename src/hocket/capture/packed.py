"""Several sequences in one row, which models of Hugging Face look for by the positions in a batch.

Of tensors without numbers they cannot tell, take them for packed, and make masks and copies of keys
and values that a step on numbers does without. A model that makes the positions itself counts them
up along each row: nothing is packed. O(1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from hocket.capture.fake import batch_tensors

_POSITIONS = "position_ids"


@contextmanager
def rows_are_whole(batch: Any) -> Iterator[None]:
    """Rows of tensors without numbers are one sequence each, unless the batch has positions."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None or any(_POSITIONS in name for name, _ in batch_tensors(batch)):
        yield
        return

    def found(*args: Any, **kwargs: Any) -> Any:
        rows = find(*args, **kwargs)
        return None if isinstance(rows, FakeTensor) else rows

    masking.find_packed_sequence_indices = found
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = find
