"""Describe the training step of a plan: model, batch, sequence, precision, optimizer."""

from __future__ import annotations

from typing import Any

from hocket.graph.graph import Graph, Role


def step_data(graph: Graph) -> dict[str, Any]:
    """Batch, sequence, precision and optimizer of a captured step as JSON; None if unknown."""
    meta = graph.meta
    own = graph.tensor_producer < 0
    state = int(graph.tensor_bytes[own & (graph.tensor_role == Role.OPTIMIZER_STATE)].sum())
    parameters = meta.get("parameters")
    return {
        "model": meta.get("model", graph.name),
        "batch": meta.get("batch"),
        "sequence": meta.get("seq"),
        "dtype": meta.get("dtype"),
        "amp": meta.get("amp"),
        "optimizer": meta.get("optimizer"),
        "parameters": parameters,
        "state_bytes_per_parameter": round(state / parameters, 2)
        if isinstance(parameters, int) and parameters > 0
        else None,
    }


def step_text(graph: Graph) -> str:
    """The values of `step_data` in one line."""
    step = step_data(graph)
    parts = [str(step["model"])]
    if step["batch"] is not None:
        parts.append(f"batch {step['batch']}")
    if step["sequence"] is not None:
        parts.append(f"sequence {step['sequence']}")
    if step["dtype"] is not None:
        autocast = f"{step['amp']} autocast over " if step["amp"] else ""
        parts.append(f"{autocast}{step['dtype']} parameters")
    if step["optimizer"] is None:
        parts.append("inference")
    else:
        bytes_each = step["state_bytes_per_parameter"]
        state = "" if bytes_each is None else f" ({bytes_each:g} bytes of state per parameter)"
        parts.append(f"{step['optimizer']}{state}")
    return ", ".join(parts)
