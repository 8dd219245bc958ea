"""The program of one rank of parallel jobs: ``python -m hocket.runtime.parallel.rank``.

It carries out its jobs one after another with the same other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.processes.child import Parent, live
from hocket.runtime.lost import lost_another

if TYPE_CHECKING:
    import torch

    from hocket.runtime.parallel.job import TrainingJob
    from hocket.runtime.parallel.trainer import RankStep, Trainer
    from hocket.runtime.record import StepRecord


def run(parent: Parent) -> None:
    """Run all jobs that the parent asks for and report each step."""
    order = parent.receive()
    if order is None:
        return
    header = order.header
    from hocket.runtime.connect import join_group, own_device
    from hocket.runtime.parallel.job import TrainingJob

    device = own_device(header)
    join_group(header, device)
    try:
        for index, job in enumerate(header["jobs"]):
            _run_job(index, TrainingJob.from_dict(job), device, parent)
    except RuntimeError as error:
        if lost_another(error):
            from hocket.runtime.ranks import CommunicationError

            raise CommunicationError(f"lost another rank: {error}") from error
        # PyTorch's pipelines say only which stage failed, and why in the cause.
        raise error.__cause__ or error from None


def _run_job(index: int, job: TrainingJob, device: torch.device, parent: Parent) -> None:
    from hocket.runtime.parallel.trainer import Trainer
    from hocket.runtime.wire import raw

    trainer = Trainer(job, device, parent.move)
    for number in range(1, job.steps + 1):
        record = _record(trainer, trainer.step(number))
        if number == 1 and job.wants_gradients:
            gradients = trainer.gradients()
            header = {"what": "gradients", "job": index, "names": list(gradients)}
            parent.send(header, [raw(value) for value in gradients.values()])
        plain, arrays = record.to_arrays()
        step = {"what": "step", "job": index, "number": number, "record": plain}
        parent.send(step, arrays)


def _record(trainer: Trainer, step: RankStep) -> StepRecord:
    """A step as runs write it down: actions by their number in the schedule."""
    import torch.distributed as dist

    from hocket.runtime.record import StepRecord

    record = StepRecord(start_s=step.start_s, end_s=step.end_s, loss=step.loss)
    if step.peak_bytes:
        record.peak_bytes[dist.get_rank()] = step.peak_bytes
    if not trainer.data_rank and not trainer.tensor_rank:
        first = sum(len(row) for row in trainer.job.actions[: trainer.pipeline_rank])
        record.op_start_s.update(enumerate(step.action_start_s, first))
        record.op_end_s.update(enumerate(step.action_end_s, first))
    return record


if __name__ == "__main__":
    live(run)
