"""Parallel configs of a transformer: a single one (`ParallelConfig`), or millions as arrays.

`ParallelConfigs` holds one array per field, so that costs of all configs are computed at once. The
tuples of schedule names group the pipeline schedules by what they need.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray
from hocket.base.parts import even_parts

Recompute = Literal["none", "selective", "full"]
"""Recomputation in the backward pass: nothing, the inside of attention, or whole layers."""
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs",
    "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
]  # fmt: skip
"""Order of forward and backward passes of pipeline stages; ``interleaved`` with one chunk is
``1f1b``."""

RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
PLAIN: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zb-h1", "zb-h2")
"""Schedules with one chunk per device."""
LOOPED: tuple[ScheduleName, ...] = ("interleaved", "looped-bfs")
"""Schedules with two or more chunks per device, assigned round-robin."""
FOLDED: tuple[ScheduleName, ...] = ("zb-v", "dualpipe-v")
"""Schedules with two chunks per device; the second half runs on the devices in reverse order."""
SPLIT: tuple[ScheduleName, ...] = ("zb-h1", "zb-h2", *FOLDED)
"""Schedules that split the backward pass and delay weight gradients (zero bubble)."""
MAX_ACTIONS = 2_000_000
"""Largest number of stages times microbatches of a schedule."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel config of a transformer on ``num_devices`` devices.

    Ranks are numbered tensor parallel first, then context, data and pipeline, so that the ranks of
    a tensor-parallel group are neighbours. The expert degree distributes experts over data and
    context ranks, and over tensor ranks if it exceeds these; it adds no devices.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    """Model chunks per device: virtual stages are ``pipeline * chunks``."""
    microbatch: int = 1
    """Sequences per microbatch and data-parallel rank."""
    global_batch: int = 1
    """Sequences per step."""
    schedule: ScheduleName = "1f1b"
    recompute: Recompute = "none"
    zero: int = 0
    """ZeRO stage, sharded over data ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 all."""
    sequence_parallel: bool = False
    """True if norms and dropout are split over the tensor-parallel ranks."""
    layers: tuple[int, ...] | None = None
    """Layers of each virtual stage in order; None if evenly split."""
    shares: tuple[int, ...] | None = None
    """Local batch of each data-parallel rank in order; None if equal."""

    @property
    def num_devices(self) -> int:
        """Number of devices in use."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def num_microbatches(self) -> int:
        """Microbatches per pipeline in a step."""
        return self.global_batch // (self.microbatch * self.data)

    @property
    def num_stages(self) -> int:
        """Number of virtual stages."""
        return self.pipeline * self.chunks

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each virtual stage; if uneven, the first stages have one more."""
        return self.layers or even_parts(num_layers, self.num_stages)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each virtual stage: round-robin, or down and up again (V)."""
        down = tuple(range(self.pipeline))
        if self.schedule in FOLDED:
            return down + down[::-1]
        return down * self.chunks


@dataclass(frozen=True, eq=False, kw_only=True)
class ParallelConfigs:
    """Many configs of one model with even stages, as one array per field.

    ``schedule`` and ``recompute`` hold indices into `SCHEDULES` and `RECOMPUTES`.
    """

    tensor: NDArray[np.int32]
    pipeline: NDArray[np.int32]
    data: NDArray[np.int32]
    context: NDArray[np.int32]
    expert: NDArray[np.int32]
    chunks: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    global_batch: NDArray[np.int32]
    schedule: NDArray[np.int8]
    recompute: NDArray[np.int8]
    zero: NDArray[np.int8]
    sequence_parallel: BoolArray

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: int) -> ParallelConfig:
        """One config as a value."""
        values = {f.name: getattr(self, f.name)[index].item() for f in fields(self)}
        values["schedule"] = SCHEDULES[values["schedule"]]
        values["recompute"] = RECOMPUTES[values["recompute"]]
        return ParallelConfig(**values)

    def take(self, indices: NDArray[np.intp]) -> ParallelConfigs:
        """Configs at the given positions."""
        return ParallelConfigs(**{f.name: getattr(self, f.name)[indices] for f in fields(self)})

    @staticmethod
    def of(configs: Iterable[ParallelConfig]) -> ParallelConfigs:
        """Arrays of single configs, without layers per stage and local batches."""
        rows = list(configs)

        def column(name: str, dtype: type[np.generic]) -> Any:
            return np.array([getattr(row, name) for row in rows], dtype=dtype)

        ints = (
            "tensor", "pipeline", "data", "context", "expert", "chunks", "microbatch",
            "global_batch",
        )  # fmt: skip
        return ParallelConfigs(
            **{name: column(name, np.int32) for name in ints},
            schedule=np.array([SCHEDULES.index(row.schedule) for row in rows], dtype=np.int8),
            recompute=np.array([RECOMPUTES.index(row.recompute) for row in rows], dtype=np.int8),
            zero=column("zero", np.int8),
            sequence_parallel=column("sequence_parallel", np.bool_),
        )
