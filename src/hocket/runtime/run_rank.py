"""The program of one rank of a run: ``python -m hocket.runtime.run_rank``.

It reads the plan, builds its model by itself and trains with the other ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hocket.processes.child import Parent, live

if TYPE_CHECKING:
    import torch

    from hocket.runtime.synthetic_training import SyntheticTraining


def train(parent: Parent) -> None:
    """Train as the parent says and report each step."""
    order = parent.receive()
    if order is None:
        return
    from hocket.base.errors import RunError
    from hocket.runtime.ranks import CommunicationError, lost_another

    # The model may be in a folder that only this program's parent knows.
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
    from hocket.runtime.ranks import join_group, own_device
    from hocket.runtime.strategies.traced import TracedModel

    device = own_device(header)
    training = _training(header, device, lambda: join_group(header, device))
    if isinstance(training.strategy, TracedModel):
        training.strategy.slow_down(header["slowdown"])
    for number in range(1, header["steps"] + 1):
        plain, arrays = training.step(number, parent.move).to_arrays()
        message: dict[str, Any] = {"what": "step", "number": number, "record": plain}
        if number == 1 and isinstance(training.strategy, TracedModel):
            message["transfers"] = [
                list(each) for each in training.strategy.first.setup.split.transfers
            ]
        parent.send(message, arrays)
        if number == header.get("state_after"):
            _send_state(parent, training, header["rank"])


def _training(header: dict[str, Any], device: torch.device, join: Any) -> SyntheticTraining:
    import torch

    from hocket.capture.optimizer import Optimizer
    from hocket.plan.files import plan_from_data
    from hocket.runtime.planned_model import built_by_name
    from hocket.runtime.synthetic_training import SyntheticTraining, transformer_training

    saved, seed = plan_from_data(header["plan"], "the plan of the run"), header["seed"]
    if header["model"] is None:
        join()
        update = Optimizer(**header["update"]) if "update" in header else None
        dtype = getattr(torch, header["dtype"])
        return transformer_training(saved, device, seed=seed, dtype=dtype, update=update)
    model, batch = built_by_name(header["model"], header["options"], seed)
    join()
    return SyntheticTraining(
        saved, model, lambda number: batch, device, loss=header["loss"], seed=seed, is_ranked=True
    )


def _send_state(parent: Parent, training: SyntheticTraining, rank: int) -> None:
    """Report the model's state, which all ranks gather together."""
    state = training.loop.state_dict()["model"]
    if not rank:
        names, values = list(state), [value.double().cpu().numpy() for value in state.values()]
        parent.send({"what": "state", "names": names}, values)


if __name__ == "__main__":
    live(train)
