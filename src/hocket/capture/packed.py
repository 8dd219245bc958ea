"""Make Hugging Face models build the same masks for fake tensors as for the real batch.

The transformers library reads tensor values to detect padding, and several sequences packed into
one row (by position ids). Fake tensors have no values, so it would assume packed rows and build
masks and copies of keys and values that the real step skips. The functions here patch its checks by
the facts of the real batch. O(1).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from hocket.capture.fake import batch_tensors

_POSITIONS, _PADDING = "position_ids", "attention_mask"


@contextmanager
def rows_are_whole(batch: Any) -> Iterator[None]:
    """Treat each row as one sequence unless the batch has position ids."""
    has_positions = any(_POSITIONS in name for name, _ in batch_tensors(batch))
    with _skipping(is_unpacked=not has_positions, is_unpadded=False):
        yield


@contextmanager
def masks_as_run(batch: Any) -> Iterator[None]:
    """Make transformers skip the same masks as for the real ``batch``.

    The library skips the padding mask of a batch without padding, and the mask of packed sequences
    if no row is packed. Inside the context this depends on the values of the real batch; a batch
    without values counts as neither padded nor packed. The trace is therefore valid only for
    batches with equal `mask_facts`.
    """
    is_unpacked, is_unpadded = mask_facts(batch) or (True, True)
    with _skipping(is_unpacked=is_unpacked, is_unpadded=is_unpadded):
        yield


def mask_facts(batch: Any) -> tuple[bool, ...]:
    """Return (no row is packed, no row is padded); empty if the batch has no masks."""
    named = [
        (name, t)
        for name, t in batch_tensors(batch)
        if t.dim() == 2 and name.endswith((_POSITIONS, _PADDING))
    ]
    if not named or "transformers.masking_utils" not in sys.modules:
        return ()
    known = [(name, t) for name, t in named if not (t.is_meta or isinstance(t, FakeTensor))]
    return (
        all((t.diff(dim=-1) == 1).all() for name, t in known if name.endswith(_POSITIONS)),
        all(t.bool().all() for name, t in known if name.endswith(_PADDING)),
    )


@contextmanager
def _skipping(*, is_unpacked: bool, is_unpadded: bool) -> Iterator[None]:
    """Make transformers skip masks of packed and of padded rows of fake tensors."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    wrappers: dict[str, Any] = {}
    if is_unpacked:
        wrappers["find_packed_sequence_indices"] = _none_if_fake
    if is_unpadded:
        wrappers["_ignore_causal_mask_sdpa"] = _without_fake_padding
        wrappers["_ignore_bidirectional_mask_sdpa"] = _without_fake_padding
    with ExitStack() as patches:
        for name, wrapper in wrappers.items():
            # Private functions, which not every version of transformers has.
            if (own := getattr(masking, name, None)) is not None:
                patches.callback(setattr, masking, name, own)
                setattr(masking, name, partial(wrapper, own))
        yield


def _none_if_fake(find: Any, *args: Any, **kwargs: Any) -> Any:
    rows = find(*args, **kwargs)
    return None if isinstance(rows, FakeTensor) else rows


def _without_fake_padding(ignores: Any, padding: Any, *args: Any, **kwargs: Any) -> Any:
    return ignores(None if isinstance(padding, FakeTensor) else padding, *args, **kwargs)
