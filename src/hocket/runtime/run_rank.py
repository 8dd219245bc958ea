"""One rank of ``hocket run`` in a process of its own: ``python -m hocket.runtime.run_rank``.

The rank receives the plan from its parent process, builds the model, trains with the other ranks,
and reports each step to the parent.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hocket.processes.child import Parent, live

if TYPE_CHECKING:
    import torch

    from hocket.runtime.synthetic_training import SyntheticTraining


def train(parent: Parent) -> None:
    """Train as the parent requests, and report each step to it."""
    order = parent.receive()
    if order is None:
        return
    from hocket.base.errors import RunError
    from hocket.runtime.ranks import CommunicationError, lost_another

    # The model may be in a folder that only the parent has in its import path.
    sys.path += [path for path in order.header["import_paths"] if path not in sys.path]
    try:
        _train(parent, order.header)
    except RunError:
        raise
    except Exception as error:
        if lost_another(error):
            raise CommunicationError(f"lost another rank: {error}") from error
        raise


def _train(parent: Parent, header: dict[str, Any]) -> None:
    from hocket.runtime.ranks import own_device
    from hocket.runtime.strategies.traced import TracedModel

    training = _training(header, own_device(header))
    for number in range(1, header["steps"] + 1):
        parent.move(number)
        message = {"what": "step", "number": number, "record": training.step(number).to_data()}
        if number == 1 and isinstance(training.strategy, TracedModel):
            message["transfers"] = training.strategy.first.setup.split.transfers
        parent.send(message)
        if number == header.get("state_after"):
            _send_state(parent, training, header["rank"])


def _training(header: dict[str, Any], device: torch.device) -> SyntheticTraining:
    import torch

    from hocket.capture.optimizer import Optimizer
    from hocket.plan.files import plan_from_data
    from hocket.runtime.planned_model import built_by_name
    from hocket.runtime.ranks import join_group
    from hocket.runtime.synthetic_training import (
        SyntheticModel,
        SyntheticTraining,
        transformer_training,
    )

    saved, seed = plan_from_data(header["plan"], "the plan of the run"), header["seed"]
    if header["model"] is None:
        join_group(header, device)
        update = Optimizer(**header["update"]) if "update" in header else None
        dtype = getattr(torch, header["dtype"])
        return transformer_training(saved, device, seed=seed, dtype=dtype, update=update)
    model, batch = built_by_name(header["model"], header["options"], seed)
    join_group(header, device)
    synthetic = SyntheticModel(model, lambda number: batch, header["loss"])
    return SyntheticTraining(saved, synthetic, device, seed=seed, is_ranked=True)


def _send_state(parent: Parent, training: SyntheticTraining, rank: int) -> None:
    """Report the model's state, which all ranks gather together."""
    state = training.loop.state_dict()["model"]
    if not rank:
        values = [value.double().cpu().numpy() for value in state.values()]
        parent.send({"what": "state", "names": list(state)}, values)


if __name__ == "__main__":
    live(train)
