"""Split a batch into the samples of replicas and microbatches, and weight their losses.

Every rank gets the full batch. Samples are split as planned; a batch of another size is split in
the same proportions. The loss of each part is weighted by its number of samples, or by the user's
``count`` of the part. The sum of the weighted losses over ranks is thus the mean over the batch,
and not a mean of means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket.base.errors import UsageError
from hocket.capture.fake import batch_tensors, map_batch
from hocket.runtime.batches import settled

Count = Callable[[Any], float | torch.Tensor]
"""Weight of a part of a batch in the mean loss: by default its number of samples."""


def split_rows(num_rows: int, split: Sequence[int]) -> list[range]:
    """Return the samples of each part, proportional to ``split``, with at least one per part.

    Raises `UsageError` if there are fewer samples than parts.
    """
    if num_rows < len(split):
        raise UsageError(
            f"a batch of {num_rows} samples cannot be split over {len(split)} replicas",
            hint="give larger batches, or drop the last one of an epoch",
        )
    parts, start = [], 0
    for index in range(len(split)):
        # Rounding the cumulative sum, not each part, makes the parts add up to all rows.
        exact = round(num_rows * sum(split[: index + 1]) / sum(split))
        # One sample at least for this part and for each that follows.
        stop = min(max(exact, start + 1), num_rows - (len(split) - index - 1))
        parts.append(range(start, stop))
        start = stop
    return parts


def num_rows(batch: Any) -> int:
    """Return the number of samples of a batch: the size of its tensors' first dimension."""
    for _, tensor in batch_tensors(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    raise UsageError("the batch has no rows that could be split", hint="give tensors of samples")


def take_rows(batch: Any, rows: range) -> Any:
    """Return the samples ``rows`` of a batch; scalar tensors are part of every result."""
    total = num_rows(batch)
    parts: dict[int, torch.Tensor] = {}
    for name, tensor in batch_tensors(batch):
        if tensor.dim() and tensor.shape[0] != total:
            raise UsageError(
                f"{name!r} has {tensor.shape[0]} rows where others have {total}, so it "
                "cannot be split",
                hint="give tensors with one row per sample, or plan one device",
            )
        parts[id(tensor)] = tensor[rows.start : rows.stop] if tensor.dim() else tensor
    return map_batch(batch, parts)


def loss_weights(batch: Any, parts: Sequence[range], count: Count | None) -> list[float]:
    """Return the weight of each part's loss in the loss of the full batch."""
    counts = [
        float(len(rows)) if count is None else float(count(take_rows(batch, rows)))
        for rows in parts
    ]
    total = sum(counts)
    if not total > 0:
        raise UsageError("nothing of the batch counts", hint="check what count= returns")
    return [each / total for each in counts]


def microbatches(
    batch: Any, sizes: Sequence[int], count: Count | None
) -> tuple[list[Any], list[float]]:
    """Split a batch in the proportions of ``sizes``; returns the microbatches and loss weights."""
    rows = num_rows(batch)
    if rows < len(sizes):
        raise UsageError(
            f"{rows} samples cannot be cut into {len(sizes)} microbatches",
            hint="give larger batches, or drop the last one of an epoch",
        )
    parts = split_rows(rows, sizes)
    batches = [settled(take_rows(batch, part)) for part in parts]
    return batches, loss_weights(batch, parts, count)


def has_ignored_labels(batch: Any) -> bool:
    """True if some labels are -100, the default ``ignore_index`` of cross-entropy.

    A mean over tokens then weights samples unequally.
    """
    for name, tensor in batch_tensors(batch):
        is_label = name.rpartition(".")[2] in ("labels", "label", "targets", "target")
        if is_label and tensor.dtype == torch.int64 and bool((tensor == -100).any()):
            return True
    return False
