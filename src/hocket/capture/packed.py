"""Make Hugging Face models build the masks that they build for the real batch.

transformers looks for several sequences packed into one row (by position ids) and for padding, and
reads tensor values to find them. Fake tensors have no values, so it would assume packed rows and
build masks and copies of keys and values that the real step skips. O(1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hocket.capture.fake import batch_tensors

_POSITIONS, _PADDING = "position_ids", "attention_mask"


@contextmanager
def rows_are_whole(batch: Any) -> Iterator[None]:
    """Treat each row as one sequence unless the batch has position ids."""
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


@contextmanager
def masks_as_run(batch: Any) -> Iterator[None]:
    """Make transformers skip the same masks as for the real ``batch``.

    It skips the padding mask of a batch without padding, and the mask of packed sequences if
    nothing is packed. Here the values of the real batch decide; a batch without values counts as
    neither padded nor packed. The trace is therefore valid only for batches with equal
    `mask_facts`.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    is_unpacked, is_unpadded = mask_facts(batch) or (True, True)
    with ExitStack() as patches:
        if is_unpacked:
            _wrap(patches, masking, "find_packed_sequence_indices", _none_if_fake)
        if is_unpadded:
            for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
                _wrap(patches, masking, name, _without_fake_padding)
        yield


def mask_facts(batch: Any) -> tuple[bool, ...]:
    """Whether no row is packed and whether no row is padded; empty if the batch has no masks."""
    named = [
        (name, t)
        for name, t in batch_tensors(batch)
        if t.dim() == 2 and name.endswith((_POSITIONS, _PADDING))
    ]
    if not named or "transformers.masking_utils" not in sys.modules:
        return ()
    return (
        all(_counts_up(t) for name, t in named if name.endswith(_POSITIONS)),
        all(_is_all_ones(t) for name, t in named if name.endswith(_PADDING)),
    )


def _wrap(patches: ExitStack, module: Any, name: str, wrapper: Any) -> None:
    own = getattr(module, name, None)
    if own is not None:
        patches.callback(setattr, module, name, own)
        setattr(module, name, partial(wrapper, own))


def _none_if_fake(find: Any, *args: Any, **kwargs: Any) -> Any:
    rows = find(*args, **kwargs)
    return None if isinstance(rows, FakeTensor) else rows


def _without_fake_padding(ignores: Any, padding: Any, *args: Any, **kwargs: Any) -> Any:
    return ignores(None if isinstance(padding, FakeTensor) else padding, *args, **kwargs)


def _has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _counts_up(positions: torch.Tensor) -> bool:
    return not _has_values(positions) or bool((positions.diff(dim=-1) == 1).all())


def _is_all_ones(mask: torch.Tensor) -> bool:
    return not _has_values(mask) or bool(mask.bool().all())
