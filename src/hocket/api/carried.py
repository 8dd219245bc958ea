"""The loop that `hocket.prepare` returns: what a person may ask of it beside its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hocket.api.planned import Planned
from hocket.api.refined import planned_again
from hocket.base.config import rank_profile, rank_variables
from hocket.base.errors import UsageError, system_reason
from hocket.cost.profile import Profile, write_profile
from hocket.cost.spans import profile_of_spans
from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.plan.sections import Shares
from hocket.runtime.launch import used_devices
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.carrier import Timings
from hocket.runtime.train.checkpoint import (
    newest_checkpoint,
    read_state,
    write_manifest,
    write_part,
    write_state,
)
from hocket.runtime.train.fitting import KeptBudget
from hocket.runtime.train.loop import TrainingLoop
from hocket.runtime.train.ranked import rank_device
from hocket.runtime.train.shared import share_text
from hocket.service.checkpoint import write_checkpoint
from hocket.view.report import write_report
from hocket.view.trace import write_traces

_PROFILED_STEP = 4
"""The step that is timed: the first ones choose kernels."""


class Training(TrainingLoop):
    """A loop that a plan carries; made by `prepare`."""

    planned: Planned | SavedPlan | None = None
    """The plan that was given, with its problem."""
    plan: Plan
    """The plan that is executed, given or made by `prepare`."""
    predicted_step_s: float | None = None
    """Predicted time of a step on the plan's devices, also where others stand in for them; None for
    bare degrees (`Division`), ``compiled`` steps and models that cannot be traced for a budget."""
    advice: str = ""
    """A shorter plan of several processes that was found for ``on=``; empty where there is none."""

    def step(self, batch: Any, *, timed: bool = False, **options: Any) -> torch.Tensor:
        """See `TrainingLoop.step`; under ``hocket launch --profile`` one early step is timed."""
        place = rank_profile()
        is_asked = bool(place) and self.num_steps + 1 == _PROFILED_STEP and _is_first_rank()
        loss = super().step(batch, timed=timed or is_asked, **options)
        if is_asked and self.timings is not None:
            write_profile(self._measured(), place)
        return loss

    @property
    def memory(self) -> KeptBudget | None:
        """The memory plan that is kept, where there is a budget."""
        return self._carrier.kept if isinstance(self._carrier, Budgeted) else None

    def report(self, page: str | Path, trace: str | Path) -> None:
        """Write the last timed step as a page, and as a trace beside the prediction.

        A step is timed by ``train.step(batch, timed=True)``.
        """
        problem, plan, predicted, measured = self._timed()
        write_traces(trace, problem, plan, {"predicted": predicted, "measured": measured})
        write_report(page, problem, plan, measured)

    def refine(self, profile: str | Path | None = None) -> Planned:
        """Plan again with the times of the last timed step in place of estimates.

        Its ``step_s`` beside ``explain()`` says whether changing is worth it; train on with
        ``prepare(…, plan=…)`` after a checkpoint. The times are also written to the file
        ``profile``, for ``hocket plan --profile``.
        """
        problem, plan, _, _ = self._timed()
        found = self._measured()
        if profile is not None:
            write_profile(found, profile)
        return planned_again(self.planned or SavedPlan(problem, plan), found)

    def _measured(self) -> Profile:
        """Times of ops in the last timed step, under the name of this rank's kind of device."""
        problem, _, _, measured = self._timed()
        found = profile_of_spans(
            problem.graph, problem.cluster, measured.op_device,
            measured.op_end_s - measured.op_start_s,
        )  # fmt: skip
        if self.planned is None or self.planned.plan.get(Shares) is None:
            return found
        devices = {device.name: device for device in self.planned.problem.cluster.devices}
        ranks = used_devices(self.planned.problem, self.planned.plan)
        name = ranks[int(rank_variables().get("RANK", "0"))]
        return replace(found, device_kind=devices[name].kind.name)

    def _timed(self) -> Timings:
        if self.timings is None:
            raise UsageError(
                "no step was timed", hint="time one: train.step(batch, timed=True), in one process"
            )
        return self.timings

    def save(
        self,
        folder: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        sharded: bool = False,
    ) -> Path:
        """Write a checkpoint below ``folder`` and return its path; it is whole or not there.

        ``extra`` is kept beside it: the ``state_dict()`` of a scheduler, an epoch. All ranks call
        it, and the first one writes; with ``sharded`` each rank of a division writes what it has,
        into a folder that all of them see.
        """
        try:
            return self._save(folder, extra or {}, sharded=sharded)
        except (OSError, SafetensorError) as error:
            reason = system_reason(error)
            raise UsageError(
                f"cannot write a checkpoint: {reason}",
                hint="name a folder that you may write to, with room for the model and its state",
                where=str(folder),
            ) from error

    def _save(self, folder: str | Path, extra: Mapping[str, Any], *, sharded: bool) -> Path:
        parts = self.parts() if sharded else None
        if parts is not None:
            return save_parts(folder, self.num_steps, parts, extra, rank_device(rank_variables()))
        state = {**self.state_dict(), "extra": dict(extra)}
        path = Path(folder)
        if _is_first_rank():
            path = write_checkpoint(folder, self.num_steps, lambda at: write_state(at, state))
        if not torch.distributed.is_initialized():
            return path
        return Path(share_text(str(path), 0, rank_device(rank_variables())))

    def load(self, checkpoint: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, of this plan or another; returns its ``extra``.

        Of a folder that `save` was given the last one is taken.
        """
        state = read_state(newest_checkpoint(checkpoint))
        extra: dict[str, Any] = state.pop("extra", {})
        self.load_state_dict(state)
        return extra


def _is_first_rank() -> bool:
    return rank_variables().get("RANK", "0") == "0"


def save_parts(
    folder: str | Path,
    step: int,
    parts: dict[str, Any],
    extra: Mapping[str, Any],
    device: torch.device,
) -> Path:
    """Write a checkpoint of which each rank writes its part; all ranks call it."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def write(place: Path) -> None:
        said = write_part(place, parts, rank)
        listed = [share_text(said, each, device) for each in range(num_ranks)]
        if not rank:
            write_manifest(place, listed, extra)

    if rank:
        write(Path(share_text("", 0, device)))
        return Path(share_text("", 0, device))
    path = write_checkpoint(
        folder, step, lambda place: write(Path(share_text(str(place), 0, device)))
    )
    return Path(share_text(str(path), 0, device))
