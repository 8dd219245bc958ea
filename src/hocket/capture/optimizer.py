"""Optimizer steps as one fused call per parameter, appended to a recording.

A fused implementation reads parameter, gradient and states once, writes in place and needs no
workspace, so one op per parameter with its bytes is the whole cost.
"""

from __future__ import annotations

from hocket.capture.describe import dtype_index, layout_text
from hocket.capture.recording import Cost, RawCall, Recording, Ref, Source, Value
from hocket.errors import unknown_name
from hocket.graph import Phase, Role

OPTIMIZER_STATES: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""Optimizers that capture knows, and the states that each keeps per parameter."""


def require_optimizer(name: str | None) -> None:
    """Refuse an optimizer that is not known; None means inference."""
    if name is not None and name not in OPTIMIZER_STATES:
        raise unknown_name("optimizer", name, OPTIMIZER_STATES)


def append_optimizer(recording: Recording, optimizer: str) -> None:
    """Add the update of every parameter that has a gradient, in the order of the parameters."""
    parameters = [source for source in recording.sources if source.value in recording.gradients]
    for source in parameters:
        _append_update(recording, optimizer, source)


def _append_update(recording: Recording, optimizer: str, parameter: Source) -> None:
    layout = recording.values[parameter.value].layout
    gradient = recording.gradients[parameter.value]
    states = []
    for state in OPTIMIZER_STATES[optimizer]:
        recording.storage_bytes.append(layout.size_bytes)
        number = len(recording.values)
        own = layout._replace(offset=0)
        recording.values.append(Value(len(recording.storage_bytes) - 1, own))
        recording.producer.append(-1)
        name = f"{parameter.name}.{state}"
        recording.sources.append(Source(name, Role.OPTIMIZER_STATE, number))
        states.append(number)
    read = (parameter.value, gradient, *states)
    # Everything but the gradient is also written.
    touched = layout.size_bytes * (2 * len(read) - 1)
    kind = f"optimizer.{optimizer}"
    cost = Cost(kind, f"{kind}({layout_text(layout)})", dtype_index(layout.dtype), 0.0, touched)
    call = RawCall(
        function=kind,
        args=tuple(Ref(number) for number in read),
        kwargs={},
        reads=read,
        outputs=(),
        writes=(parameter.value,),
        phase=Phase.OPTIMIZER,
        module=parameter.name.rpartition(".")[0],
        partner=-1,
        draws=False,
        is_view=False,
        cost=cost,
    )
    recording.calls.append(call)
