"""The plan file as pydantic models: reading checks against them, the JSON Schema comes from them.

The graph is either named by its file or stands inside; the cluster and the cost settings always
stand inside, so that a plan can be simulated again exactly.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Index = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class GraphReference(_Strict):
    """The graph that the plan is for."""

    hash: str
    """Content hash; a graph with another hash is refused."""
    file: str | None = None
    """Path of the graph file, relative to the plan file."""
    inline: dict[str, Any] | None = None
    """The graph itself, as in a ``hocket.graph/1`` file."""


class ClusterContent(_Strict):
    """The cluster that the plan is for."""

    hash: str
    content: dict[str, Any]
    """The cluster as data, with the keys of a cluster file."""


class PlacementSection(_Strict):
    """Which op runs on which device."""

    devices: list[str]
    """Names of the cluster's devices."""
    device_of: list[Index]
    """For each op of the graph, an index into ``devices``."""


class OrderSection(_Strict):
    """In which order each device runs its ops; one of the two forms."""

    by_device: list[list[Index]] | None = None
    """Per device, its ops in the order in which they run."""
    priority: list[float] | None = None
    """Per op; of the ready ops the one with the smallest value runs first."""


class Prediction(_Strict):
    """What the simulator said when the plan was written."""

    step_s: Annotated[float, Field(ge=0)]
    peak_bytes: dict[str, Index]


class PlanFile(_Strict):
    """A ``hocket.plan/1`` file."""

    schema_: Annotated[Literal["hocket.plan/1"], Field(alias="schema")]
    generator: str
    planner: str
    graph: GraphReference
    cluster: ClusterContent
    costs: dict[str, Any]
    """Profile and calibration that the op times were made from."""
    transfers: Literal["shared", "queued", "parallel"]
    objective: Literal["latency", "throughput"] = "latency"
    contiguous: bool = False
    seed: int = 0
    placement: PlacementSection
    order: OrderSection | None = None
    notes: dict[str, Any] = Field(default_factory=dict)
    predicted: Prediction | None = None


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a plan file."""
    return PlanFile.model_json_schema(by_alias=True)
