"""The JSON Schema of a plan file, put together from its sections."""

from __future__ import annotations

from typing import Any

from hocket.plan.files import PLAN_SCHEMA
from hocket.plan.problem import OBJECTIVES, TRANSFER_MODES
from hocket.plan.sections import SECTIONS


def json_schema() -> dict[str, Any]:
    """Schema that ``hocket schema plan`` prints."""
    text = {"type": "string"}
    sections = {name: {"type": "object", **kind.schema()} for name, kind in SECTIONS.items()}
    properties = {
        "schema": {"const": PLAN_SCHEMA},
        "generator": text,
        "planner": text,
        "problem": _closed(_problem(), "What was planned, whole: it can be simulated again."),
        "sections": {
            "type": "object",
            "properties": {name: _sealed(section) for name, section in sections.items()},
            "additionalProperties": False,
        },
        "claims": {"type": "object", "description": "What planners state about the plan."},
        "notes": {"type": "object", "additionalProperties": text},
    }
    return {"title": "PlanFile", **_closed(properties, f"A {PLAN_SCHEMA} file.")}


def _problem() -> dict[str, Any]:
    content = {"type": "object"}
    hashed = {"hash": {"type": "string"}, "content": content}
    graph = {"hash": {"type": "string"}, "file": {"type": "string"}, "inline": content}
    return {
        "work": {
            "type": "object",
            "properties": {
                "graph": {"type": "object", "properties": graph, "required": ["hash"]},
                "training": _closed(hashed, "The training of a transformer."),
            },
            "additionalProperties": False,
        },
        "cluster": _closed(hashed, "The cluster, with the keys of a cluster file."),
        "costs": {"type": "object", "description": "What the times of ops were made from."},
        "transfers": {"enum": list(TRANSFER_MODES)},
        "objective": {"enum": list(OBJECTIVES)},
        "contiguous": {"type": "boolean"},
        "spare": {"type": "number", "minimum": 0, "maximum": 1},
        "seed": {"type": "integer"},
    }


def _closed(properties: dict[str, Any], description: str) -> dict[str, Any]:
    """An object that has all of these keys and no others."""
    return _sealed(
        {
            "type": "object",
            "description": description,
            "properties": properties,
            "required": list(properties),
        }
    )


def _sealed(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "additionalProperties": False}
