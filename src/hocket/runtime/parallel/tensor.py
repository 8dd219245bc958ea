"""Tensor parallelism of one part of a stage: matrices by columns, then by rows.

Between blocks activations are plain tensors: whole on every rank, or this rank's stretch of the
sequence where sequence parallelism is on. Weights are cut out of what each rank has drawn, without
communication.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hocket.runtime.parallel.model import Embedding, TransformerBlock

_SEQUENCE = Shard(1)


def divide_over_tensor_ranks(
    module: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool
) -> nn.Module:
    """Divide an embedding, a block or a head in place."""
    if isinstance(module, Embedding):
        plan = _EMBEDDING
        if sequence_parallel:
            # Positions are added to the whole sequence, which is split after that.
            parallelize_module(module, mesh, _SPLIT, src_data_rank=None)
    else:
        plan = (
            _block(sequence_parallel)
            if isinstance(module, TransformerBlock)
            else _head(sequence_parallel)
        )
    plan = {name: style for name, style in plan.items() if _has(module, name)}
    return parallelize_module(module, mesh, plan, src_data_rank=None)


_EMBEDDING: dict[str, ParallelStyle] = {
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
}
_SPLIT = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=_SEQUENCE)


def _block(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    between = _SEQUENCE if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        gather = PrepareModuleInput(input_layouts=_SEQUENCE, desired_input_layouts=Replicate())
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        plan |= {"attention": gather, "mlp": gather}
    return plan


def _head(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    between = _SEQUENCE if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "logits": ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    }
    return plan | ({"norm": SequenceParallel()} if sequence_parallel else {})


def _has(module: nn.Module, name: str) -> bool:
    first, _, rest = name.partition(".")
    inner = getattr(module, first, None)
    return inner is not None and (not rest or _has(inner, rest))
