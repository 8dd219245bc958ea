"""Plan files of earlier versions, brought into the form of today's.

Placements were ``hocket.plan/1``, divided trainings ``hocket.parallel/1`` and collectives
``hocket.communication/1``. Only keys are moved here; what they hold is checked where all plans are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hocket.base import fields
from hocket.cost.parallel.coefficients import Coefficients, coefficients_to_dict

_HOW = {"transfers": "shared", "objective": "latency", "contiguous": False, "spare": 0.0, "seed": 0}


def upgraded(data: object) -> object:
    """The content of an earlier file as ``hocket.plan/2``; anything else as it is."""
    schema = data.get("schema") if isinstance(data, Mapping) else None
    reader = _READERS.get(schema) if isinstance(schema, str) else None
    if reader is None or not isinstance(data, Mapping):
        return data
    return {"schema": "hocket.plan/2", **reader(data)}


def _placement(data: Mapping[str, Any]) -> dict[str, Any]:
    required = ("schema", "generator", "planner", "graph", "cluster", "costs", "placement")
    how = [name for name in _HOW if name != "spare"]
    entry = fields.record(
        data, "the file", required=(*required, "transfers"),
        optional=(*how, "order", "notes", "predicted"),
    )  # fmt: skip
    placement = fields.record(entry["placement"], "placement", required=("devices", "device_of"))
    graph = fields.mapping(entry["graph"], "graph")
    sections = {"placement": dict(placement)}
    if entry.get("order") is not None:
        order = fields.mapping(entry["order"], "order")
        sections["order"] = {key: value for key, value in order.items() if value is not None}
    predicted = fields.mapping(entry.get("predicted") or {}, "predicted")
    peaks = fields.mapping(predicted.get("peak_bytes", {}), "predicted.peak_bytes")
    devices = fields.text_column(placement["devices"], "placement.devices")
    return {
        "generator": entry["generator"],
        "planner": entry["planner"],
        "problem": {
            "work": {"graph": {key: value for key, value in graph.items() if value is not None}},
            "cluster": entry["cluster"],
            "costs": entry["costs"],
            **{name: entry.get(name, usual) for name, usual in _HOW.items()},
        },
        "sections": sections,
        "claims": _stated(
            step_s=predicted.get("step_s"),
            peak_bytes=[peaks.get(name, 0) for name in devices] if peaks else None,
        ),
        "notes": _texts(entry.get("notes", {})),
    }


def _parallel(data: Mapping[str, Any]) -> dict[str, Any]:
    from hocket.plan.training import TransformerTraining

    keys = (
        "schema", "generator", "model", "cluster", "division", "dtype", "devices", "schedule",
        "costs", "predicted", "notes",
    )  # fmt: skip
    entry = fields.record(data, "the file", required=keys)
    notes = fields.mapping(entry["notes"], "notes")
    division = fields.mapping(entry["division"], "division")
    model = fields.mapping(entry["model"], "model")
    content = {
        "model": {key: value for key, value in model.items() if value is not None},
        "global_batch": division.get("global_batch"),
        "software": {"name": str(notes.get("software", "")), "dtype": entry["dtype"]},
        "coefficients": coefficients_to_dict(Coefficients()),
    }
    training = TransformerTraining.from_data(content, "the training")
    predicted = fields.mapping(entry["predicted"], "predicted")
    degrees = {"degrees": division, "devices": entry["devices"], "stage_costs": entry["costs"]}
    return {
        "generator": entry["generator"],
        "planner": "parallel",
        "problem": {
            "work": {"training": {"hash": training.content_hash, "content": content}},
            "cluster": entry["cluster"],
            "costs": {},
            **_HOW,
        },
        "sections": {"division": degrees, "schedule": entry["schedule"]},
        "claims": _stated(
            step_s=predicted.get("step_s"),
            peak_bytes=predicted.get("peak_bytes"),
            parts_s=_parts(notes.get("predicted", {})),
        ),
        "notes": _texts(notes),
    }


def _collective(data: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("schema", "generator", "cluster", "communication", "claims")
    entry = fields.record(data, "the file", required=keys)
    return {
        "generator": entry["generator"],
        "planner": "collective",
        "problem": {"work": {}, "cluster": entry["cluster"], "costs": {}, **_HOW},
        "sections": {"communication": entry["communication"]},
        "claims": {"certificate": entry["claims"]},
        "notes": {},
    }


_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "hocket.plan/1": _placement,
    "hocket.parallel/1": _parallel,
    "hocket.communication/1": _collective,
}


def _stated(**claims: Any) -> dict[str, Any]:
    return {name: value for name, value in claims.items() if value is not None}


def _parts(numbers: object) -> dict[str, float]:
    """Parts of the step among the numbers that the search noted."""
    if not isinstance(numbers, Mapping):
        return {}
    return {
        name.removesuffix("_s"): value
        for name, value in numbers.items()
        if isinstance(name, str)
        and name.endswith("_s")
        and name not in ("step_s", "estimate_s", "tokens_per_s")
        and fields.is_number(value)
    }


def _texts(notes: object) -> dict[str, str]:
    """What was noted for people; numbers that planners noted were never read again."""
    table = fields.mapping(notes, "notes")
    return {key: value for key, value in table.items() if isinstance(value, str)}
