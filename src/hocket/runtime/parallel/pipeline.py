"""Our schedule in PyTorch's pipeline runtime.

Schedules of one's own go through names with an underscore, which may change with any version:
`require_pipelining` says so instead of failing somewhere inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules

from hocket.base.errors import MissingExtraError
from hocket.runtime.parallel.job import TrainingJob

_NEEDED = ("_PipelineScheduleRuntime._prepare_schedule_with_comms", "_Action.from_str")
_FOLDS_SINCE = (2, 13)
"""Before, a rank with two stages in a row sent activations to itself, and failed."""
_HINT = "hocket is tested with PyTorch 2.13: pip install 'torch==2.13.*'"


def require_pipelining(device_of_stage: Sequence[int]) -> None:
    """Refuse a PyTorch whose pipelines cannot carry out schedules of one's own on such stages."""
    for path in _NEEDED:
        found: Any = schedules
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is None:
            raise MissingExtraError(
                f"PyTorch {torch.__version__} has no torch.distributed.pipelining.schedules.{path}",
                hint=_HINT,
            )
    is_folded = any(first == second for first, second in pairwise(device_of_stage))
    if is_folded and torch_version() < _FOLDS_SINCE:
        raise MissingExtraError(
            f"PyTorch {torch.__version__} cannot run two stages in a row on one device", hint=_HINT
        )


def torch_version() -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


class WatchedStage(PipelineStage):
    """A stage that notes when each action begins and ends."""

    begin: Callable[[], None]
    end: Callable[[], None]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch forward."""
        return self._noted(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Run one microbatch backward, or only the gradient of its input."""
        self._noted(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Compute the gradient of the weights that was put off."""
        self._noted(super().backward_weight_one_chunk, *args, **kwargs)

    def _noted(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.begin()
        result = action(*args, **kwargs)
        self.end()
        return result


class PipelineWatch:
    """Where a rank is in its actions, and when each began and ended."""

    def __init__(self, move: Callable[[int, int], None]) -> None:
        self._move = move
        self._step = 0
        self.begin_s: list[float] = []
        self.end_s: list[float] = []

    def new_step(self, number: int) -> None:
        """Forget the step before."""
        self._step = number
        self.begin_s, self.end_s = [], []
        self._move(number, 0)

    def begin(self) -> None:
        """An action begins."""
        self._move(self._step, len(self.begin_s))
        self.begin_s.append(time.perf_counter())

    def end(self) -> None:
        """It has ended."""
        self.end_s.append(time.perf_counter())


def make_pipeline(
    job: TrainingJob,
    stages: Sequence[WatchedStage],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    watch: PipelineWatch,
) -> Any:
    """PyTorch's runtime for the stages of one rank, with the order of the job."""
    for stage in stages:
        stage.begin, stage.end = watch.begin, watch.end
    runtime: Any = schedules._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), n_microbatches=job.division.num_microbatches, loss_fn=loss
    )
    runtime.pipeline_order = {
        rank: [schedules._Action.from_str(f"{stage}{letter}{microbatch}")
               for stage, letter, microbatch in row]
        for rank, row in enumerate(job.actions)
    }  # fmt: skip
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime


def boundary_shapes(job: TrainingJob, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into a stage and comes out of it for one microbatch, without data."""
    model, division = job.model, job.division
    parts = division.tensor if division.sequence_parallel else 1
    tokens = division.microbatch, model.sequence
    dtype = getattr(torch, job.dtype)
    between = torch.empty(
        tokens[0], tokens[1] // parts, model.hidden, dtype=dtype, device="meta"
    ).requires_grad_()
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    logits = torch.empty(*tokens, model.vocabulary, dtype=dtype, device="meta").requires_grad_()
    is_last = stage == len(job.layers) - 1
    return (ids if stage == 0 else between), (logits if is_last else between)
