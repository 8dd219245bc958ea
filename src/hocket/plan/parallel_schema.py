"""The file of a parallel plan as pydantic models: reading checks it, its JSON Schema follows.

The cluster and the costs of the stages stand inside, so that a plan can be shown, simulated and
run again without what it was made from.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hocket.plan.schema import ClusterContent

MAX_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Index = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Degree = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(ge=0, le=1e15)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
Name = Annotated[str, Field(max_length=1000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ExpertsContent(_Strict):
    """A mixture of experts in place of the dense MLP."""

    count: Count
    active: Count
    mlp_width: Count
    shared_width: Index = 0
    dense_layers: Index = 0


class ModelContent(_Strict):
    """The shape of the transformer."""

    name: Name
    hidden: Count
    layers: Degree
    heads: Count
    kv_heads: Count
    head_width: Count
    mlp_width: Count
    mlp: Literal["gelu", "swiglu"]
    vocabulary: Count
    sequence: Count
    tied_embeddings: bool
    learned_positions: bool
    biases: bool
    dropout: bool
    experts: ExpertsContent | None = None
    source: Annotated[str, Field(max_length=10_000)] = ""


class DivisionContent(_Strict):
    """How the training is divided."""

    tensor: Degree
    pipeline: Degree
    data: Degree
    context: Degree
    expert: Degree
    chunks: Degree
    microbatch: Count
    global_batch: Count
    schedule: Literal[
        "gpipe", "1f1b", "interleaved", "looped-bfs",
        "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v",
    ]  # fmt: skip
    recompute: Literal["none", "selective", "full"]
    zero: Annotated[int, Field(ge=0, le=3)]
    sequence_parallel: bool
    layers: list[Index] | None = None


class ScheduleContent(_Strict):
    """What each device of a pipeline does, in order."""

    name: Name
    num_microbatches: Count
    device_of_stage: list[Index]
    """The pipeline rank of each virtual stage."""
    actions: list[str]
    """Per pipeline rank, its actions in order: ``F0.3`` is stage 0 forward with microbatch 3, ``B``
    its backward, ``I`` and ``W`` the gradients of inputs and of weights apart."""


class CostsContent(_Strict):
    """What each virtual stage costs per microbatch, and each pipeline rank per step."""

    forward_s: list[Seconds]
    input_gradient_s: list[Seconds]
    weight_gradient_s: list[Seconds]
    send_s: list[Seconds]
    activation_bytes: list[Bytes]
    weight_gradient_bytes: list[Bytes]
    state_bytes: list[Bytes]
    after_s: list[Seconds]


class ParallelPrediction(_Strict):
    """What was predicted when the plan was made."""

    step_s: Seconds
    peak_bytes: list[Bytes]
    """Of one device of each pipeline rank."""


class ParallelPlanFile(_Strict):
    """A ``hocket.parallel/1`` file."""

    schema_: Annotated[Literal["hocket.parallel/1"], Field(alias="schema")]
    generator: str
    model: ModelContent
    cluster: ClusterContent
    division: DivisionContent
    dtype: Literal["float16", "bfloat16", "float8", "float32"]
    devices: list[list[str]]
    """Names of the devices of each pipeline rank: tensor parallel fastest, then context, data."""
    schedule: ScheduleContent
    costs: CostsContent
    predicted: ParallelPrediction
    notes: dict[str, Any] = Field(default_factory=dict)


def parallel_json_schema() -> dict[str, Any]:
    """The JSON Schema of the file of a parallel plan."""
    return ParallelPlanFile.model_json_schema(by_alias=True)
