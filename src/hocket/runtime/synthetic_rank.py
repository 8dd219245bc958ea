"""The program of one rank of a run: ``python -m hocket.runtime.synthetic_rank``.

It reads the plan, builds its model by itself and trains with the other ranks.
"""

from __future__ import annotations

from hocket.processes.child import Parent, live


def train(parent: Parent) -> None:
    """Train as the parent asks and report each step."""
    order = parent.receive()
    if order is None:
        return
    header = order.header
    from hocket.plan.files import read_plan
    from hocket.runtime.connect import join_group, own_device
    from hocket.runtime.rebuild import built_by_name
    from hocket.runtime.train.synthetic import SyntheticTraining

    device = own_device(header)
    saved = read_plan(header["plan"])
    model, batch = built_by_name(header["model"], header["options"], header["seed"])
    join_group(header, device)
    training = SyntheticTraining(
        saved.problem, saved.plan, model, batch, header["loss"], device, seed=header["seed"]
    )
    for number in range(1, header["steps"] + 1):
        plain, arrays = training.step(number, parent.move).to_arrays()
        parent.send({"what": "step", "number": number, "record": plain}, arrays)


if __name__ == "__main__":
    live(train)
