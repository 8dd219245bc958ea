"""The program of one replica: ``python -m hocket.runtime.shared.rank``.

It builds the plan's model by itself, trains on its rows, and exchanges gradients with the others.
"""

from __future__ import annotations

from hocket.processes.child import Parent, live


def carry_out(parent: Parent) -> None:
    """Train as the parent asks and report each step."""
    order = parent.hear()
    if order is None:
        return
    header = order.header
    from hocket.runtime.connect import join_group, own_device
    from hocket.runtime.rebuild import built_by_name
    from hocket.runtime.shared.job import ShareJob
    from hocket.runtime.shared.trainer import ReplicaTrainer

    device = own_device(header)
    job = ShareJob.from_dict(header["job"])
    model, batch = built_by_name(job.model, job.options, job.seed)
    join_group(header, device)
    trainer = ReplicaTrainer(
        model, batch, job.loss, job.update, job.rows[header["rank"]],
        num_samples=job.num_samples, seed=job.seed, device=device,
    )  # fmt: skip
    for number in range(1, job.steps + 1):
        plain, arrays = trainer.step(number, parent.move).to_arrays()
        parent.tell({"what": "step", "number": number, "record": plain}, arrays)


if __name__ == "__main__":
    live(carry_out)
