"""Calls and tensors as what processes may say to each other (`hocket.processes.frames`).

Calls of a program travel as the names of their ops and their arguments as tagged JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hocket.base.errors import RunError
from hocket.capture.program import Call, TensorSpec
from hocket.capture.recording import Constant, Cost, Ref, TensorLayout
from hocket.graph.graph import Phase, Role

_NO_COST = Cost("", "", 0, 0.0, 0)


def raw(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor on any device, for a frame."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def from_raw(data: bytearray) -> torch.Tensor:
    """Bytes of a frame as a tensor, not copied."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# ── calls and tensors ────────────────────────────────────────────────────────────────────────────


def encode_call(call: Call, constants: list[torch.Tensor]) -> dict[str, Any]:
    """A call as JSON; tensors that it holds by value are put into ``constants``."""
    return {
        "function": str(call.function),
        "kind": call.cost.kind,
        "args": [_encoded(item, constants) for item in call.args],
        "kwargs": {key: _encoded(item, constants) for key, item in call.kwargs.items()},
        "outputs": list(call.outputs),
        "targets": list(call.targets),
        "written": list(call.written),
    }


def decode_call(data: dict[str, Any], constants: Sequence[torch.Tensor]) -> Call:
    """The call of `encode_call`, as far as running it needs."""
    return Call(
        function=_function(data["function"]),
        args=[_decoded(item, constants) for item in data["args"]],
        kwargs={key: _decoded(item, constants) for key, item in data["kwargs"].items()},
        outputs=tuple(data["outputs"]),
        targets=tuple(data["targets"]),
        written=tuple(data["written"]),
        reads=(),
        phase=Phase.FORWARD,
        module="",
        partner=-1,
        draws=False,
        is_view=False,
        cost=_NO_COST._replace(kind=data["kind"]),
    )


def encode_spec(spec: TensorSpec) -> list[Any]:
    """A tensor's facts as JSON."""
    layout = spec.layout
    plain = layout and [*layout[:3], _name(layout.dtype), layout.lazy]
    return [plain, spec.storage, spec.storage_bytes, int(spec.role), spec.alias_of, spec.producer]


def decode_spec(data: list[Any]) -> TensorSpec:
    """The facts of `encode_spec`."""
    plain, storage, storage_bytes, role, alias_of, producer = data
    layout = None
    if plain is not None:
        shape, stride, offset, dtype, lazy = plain
        layout = TensorLayout(
            tuple(shape), tuple(stride), offset, getattr(torch, dtype), tuple(lazy)
        )
    return TensorSpec(layout, storage, storage_bytes, Role(role), alias_of, producer)


def _function(name: str) -> Any:
    if name.startswith("optimizer."):
        return name
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise RunError(f"this process does not know the op {name!r}") from None
    return found


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _encoded(value: Any, constants: list[torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return {"tensor": value.number}
    if isinstance(value, Constant):
        constants.append(value.tensor)
        return {"constant": len(constants) - 1}
    if isinstance(value, list | tuple):
        return [_encoded(item, constants) for item in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": _name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RunError(f"an op has an argument of type {type(value).__name__!r}, which cannot be sent")


def _decoded(data: Any, constants: Sequence[torch.Tensor]) -> Any:
    if isinstance(data, list):
        return [_decoded(item, constants) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, value),) = data.items()
    if tag == "tensor":
        return Ref(value)
    if tag == "constant":
        return Constant(constants[value])
    if tag == "torch":
        return getattr(torch, value)
    return torch.device(value) if tag == "device" else complex(*value)
