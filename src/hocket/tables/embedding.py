"""A `torch.nn.Embedding` whose rows are in a table that all machines share.

    users = Embedding(worker["users"], std=0.1)
    optimizer = TableOptimizer([users, items], lr=0.1)
    loss = F.mse_loss((users(u) * items(i)).sum(1), rating)
    loss.backward()
    optimizer.step()               # adds the rows' updates and ends the table's clock

Only rows of the batch are read and sent. A table contains the sum of a row's updates. The initial
value is computed from the seed and the row's number, so that clients need not exchange it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hocket.base.arrays import LongArray
from hocket.base.errors import UsageError
from hocket.tables.worker import Table, Worker

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Embedding(nn.Module):
    """Rows of a table by their numbers, with gradients that `TableOptimizer` applies."""

    def __init__(self, table: Table, *, std: float = 0.01, seed: int = 0) -> None:
        super().__init__()
        self.table, self.std, self.seed = table, std, seed
        self.used: list[tuple[LongArray, Tensor]] = []
        """Rows read since the last step, with the leaf tensors that contain them."""

    @property
    def worker(self) -> Worker:
        """The worker whose clock ends a step."""
        return self.table.worker

    def forward(self, indices: Tensor) -> Tensor:
        """Rows as ``[*indices, width]``, as fresh as the staleness requires."""
        # Each row is read and sent once, however often it occurs in the batch.
        rows, inverse = torch.unique(indices.detach().cpu(), return_inverse=True)
        numbers = rows.numpy()
        leaf = torch.from_numpy(self.table.get(numbers) + self._start(numbers))
        leaf = leaf.to(indices.device)
        if torch.is_grad_enabled() and self.training:
            # The leaf's gradient is that of the rows, summed over the batch.
            leaf.requires_grad_()
            self.used.append((numbers, leaf))
        found: Tensor = nn.functional.embedding(inverse.to(indices.device), leaf)
        return found

    def weight(self) -> Tensor:
        """All rows, as this worker may see them at its clock."""
        rows = np.arange(self.table.spec.num_rows)
        return torch.from_numpy(self.table.get(rows) + self._start(rows))

    def _start(self, rows: LongArray) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Initial rows: uniform with the wanted standard deviation, the same on every machine."""
        width = self.table.spec.width
        place = rows.astype(np.uint64)[:, None] * np.uint64(width) + np.arange(width, dtype="u8")
        with np.errstate(over="ignore"):  # splitmix64 of the place, beginning at the seed
            mixed = (place + np.uint64(1)) * _STEP + np.uint64(self.seed) * _MIX[0]
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
        part = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
        return np.asarray((2.0 * part - 1.0) * 3.0**0.5 * self.std, dtype=np.float32)

    def extra_repr(self) -> str:
        """Arguments shown when the model is printed."""
        spec = self.table.spec
        return f"{spec.num_rows}, {spec.width}, table={spec.name!r}, staleness={spec.staleness:g}"


class TableOptimizer:
    """Sparse SGD for `Embedding`; for adaptive tables the shard takes AdaGrad steps."""

    def __init__(self, embeddings: Sequence[Embedding], lr: float = 0.1) -> None:
        if not embeddings or len({id(each.worker) for each in embeddings}) > 1:
            raise UsageError(
                "an optimizer is for embeddings of one worker", hint="make one per worker"
            )
        if not 0 < lr < float("inf"):
            raise UsageError(f"lr is {lr}", hint="give a step size above 0")
        self.embeddings, self.lr = tuple(embeddings), lr

    def zero_grad(self) -> None:
        """Drop the rows that were read, to skip a batch."""
        for embedding in self.embeddings:
            embedding.used.clear()

    def step(self) -> int:
        """Add the gradients' updates to the tables and end the step; returns the new clock."""
        for embedding in self.embeddings:
            table = embedding.table
            for rows, leaf in embedding.used:
                if leaf.grad is None:
                    continue
                gradient = leaf.grad.detach().cpu().numpy()
                table.inc(rows, gradient if table.spec.is_adaptive else -self.lr * gradient)
            embedding.used.clear()
        return self.embeddings[0].worker.clock()
