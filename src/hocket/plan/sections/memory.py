"""The memory section: how a step is kept within a number of bytes on each device.

The step is cut into blocks: pieces of its forward pass in the order in which they run, such as the
layers of a transformer, together with their part of the backward pass and of the update. Each block
says three things.

``activations``, what it makes in the forward pass and needs in the backward pass:

- ``kept`` on the device;
- ``offloaded`` to the host as soon as the forward pass has used them, and fetched back one block
  before the backward pass needs them;
- ``recomputed``: dropped, and recomputed from the block's input (its checkpoint) when the
  backward pass comes to it. The checkpoint stays, or goes to the host where ``checkpoint`` is
  ``offloaded``.

``share`` offloads a part of the bytes, in the order in which they are made.

``parameters``: ``resident`` on the device, or ``streamed``: kept on the host, fetched
``prefetch`` blocks before the forward and again before the backward pass of the block, dropped
after each. Gradients of streamed parameters go to the host as soon as they are whole. Where
``expert_groups`` is more than 1, streamed parameters that hold the matrices of many experts, which
are multiplied as a batch, come in so many groups of experts: each comes for its part of a product
and frees its memory for the next one, and its gradient leaves before the next one's is made. The
host updates them.

``update``: where the optimizer changes the parameters and keeps its state, ``device`` or ``host``.
Both follow the block's gradients at once, so that gradients of all blocks never exist together. A
block with streamed parameters and ``update`` on the device fetches and returns its state as well.

`hocket.planners.memory` decides it, `hocket.simulate.rewriting` turns it into ops of the
graph, which the simulator times, and the training step executes it by the names of the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.base.units import MOST_BYTES
from hocket.graph.graph import Graph
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

Activations = Literal["kept", "offloaded", "recomputed"]
Checkpoint = Literal["kept", "offloaded"]
Parameters = Literal["resident", "streamed"]
Update = Literal["device", "host"]
_CHOICES: dict[str, tuple[str, ...]] = {
    "activations": get_args(Activations),
    "checkpoint": get_args(Checkpoint),
    "parameters": get_args(Parameters),
    "update": get_args(Update),
}
WITHOUT_MODULE = "step"
"""The name of a block whose first op is in no module."""
SMALLEST_MOVED = 1024
"""Storages of fewer bytes stay on the device: a copy costs more than they weigh."""
_MAX_BLOCKS = 1_000_000
_MAX_COUNT = 2**31 - 1
_MAX_CHUNKS = _MAX_PREFETCH = 4096
"""Each chunk is ops of the step, and each block ahead is looked at: more would take for ever."""


@dataclass(frozen=True, kw_only=True)
class MemoryBlock:
    """A piece of the step and what is done to hold less of it; see the head of the file."""

    name: str
    """The path of its module, such as ``transformer.h.3``; where it is a run of modules, the path
    of the first one."""
    start: int = 0
    """Its forward ops are ``start`` up to ``stop`` of the graph; both 0 where there is no graph."""
    stop: int = 0
    activations: Activations = "kept"
    share: float = 1.0
    """The part of the bytes that is offloaded, in the order in which they are made."""
    checkpoint: Checkpoint = "kept"
    """Where the input of a recomputed block waits."""
    parameters: Parameters = "resident"
    update: Update = "device"
    expert_groups: int = 1
    """Groups in which batched parameters of experts are streamed and differentiated."""

    @property
    def is_on_host(self) -> bool:
        """True if its parameters, or the state of their optimizer, are kept on the host."""
        return self.parameters == "streamed" or self.update == "host"


@dataclass(frozen=True, kw_only=True)
class Memory(Section):
    """Blocks in the order of the forward pass, and the bytes that are not exceeded."""

    budget_bytes: tuple[int, ...]
    """Per device of the cluster."""
    blocks: tuple[MemoryBlock, ...]
    loss_chunks: int = 1
    """Chunks of the batch in which logits and loss are made and differentiated one after the
    other, so that all logits never exist together."""
    prefetch: int = 1
    """Number of blocks ahead that streamed parameters and offloaded activations are fetched."""
    async_update: bool = False
    """True if updates of host-resident parameters may run into the next forward pass. Else they
    are finished when a step ends, so that whoever reads a parameter between steps sees them."""

    def replay_hindrance(self, graph: Graph) -> str:
        """Why steps cannot be launched as a whole, as one CUDA graph; empty where they can."""
        for block in self.blocks:
            if "offloaded" in (block.activations, block.checkpoint) or block.is_on_host:
                return "the plan moves bytes between the device and its host"
            of_block = graph.rng_order[block.start : block.stop]
            if block.activations == "recomputed" and (of_block >= 0).any():
                return f"{block.name} draws random numbers and is recomputed"
        return ""

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {
            "budget_bytes": list(self.budget_bytes),
            "loss_chunks": self.loss_chunks,
            "prefetch": self.prefetch,
            "async_update": self.async_update,
            "blocks": [
                {
                    "name": block.name,
                    "ops": [block.start, block.stop],
                    "activations": block.activations,
                    "share": block.share,
                    "checkpoint": block.checkpoint,
                    "parameters": block.parameters,
                    "update": block.update,
                    "expert_groups": block.expert_groups,
                }
                for block in self.blocks
            ],
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Memory:
        """The section of such data."""
        entry = fields.record(
            data, "memory", required=("budget_bytes", "blocks", "loss_chunks", "prefetch"),
            optional=("async_update",),
        )  # fmt: skip
        blocks = fields.items(entry["blocks"], "memory.blocks")
        if not blocks:
            raise InputFileError("memory.blocks is empty", hint="expected one block or more")
        if len(blocks) > _MAX_BLOCKS:
            raise InputFileError(f"memory.blocks: more than {_MAX_BLOCKS}")
        path, count = "memory.budget_bytes", problem.cluster.num_devices
        fields.sized(entry["budget_bytes"], path, count, "one number of bytes for each device")
        budgets = fields.int_column(entry["budget_bytes"], path, 0, MOST_BYTES)
        return cls(
            budget_bytes=tuple(budgets.tolist()),
            blocks=tuple(_block(item, f"memory.blocks[{n}]") for n, item in enumerate(blocks)),
            loss_chunks=fields.integer(entry["loss_chunks"], "memory.loss_chunks", 1, _MAX_CHUNKS),
            prefetch=fields.integer(entry["prefetch"], "memory.prefetch", 0, _MAX_PREFETCH),
            async_update=fields.flag(entry.get("async_update", False), "memory.async_update"),
        )

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """A budget per device, blocks with names of their own, in order, of ops that exist."""
        if len(self.budget_bytes) != problem.cluster.num_devices:
            yield Violation(
                "memory",
                f"{len(self.budget_bytes)} budgets for {problem.cluster.num_devices} devices",
            )
        for name, count in Counter(block.name for block in self.blocks).items():
            if count > 1:
                yield Violation("memory", f"{count} blocks have the name {name!r}")
        for block in self.blocks:
            if not 0 <= block.share <= 1:
                yield Violation("memory", f"block {block.name!r} has a share of {block.share:g}")
            is_away = block.parameters == "streamed" and block.update == "host"
            if block.expert_groups > 1 and not is_away:
                yield Violation(
                    "memory",
                    f"block {block.name!r} has its experts in {block.expert_groups} groups, but is "
                    "not streamed and updated on the host",
                )
        graph = problem.work
        if isinstance(graph, Graph):
            yield from self._wrong_names(graph)
            yield from self._wrong_ops(graph)
        elif any(block.stop for block in self.blocks):
            yield Violation("memory", "blocks name ops, but there is no graph")

    def _wrong_names(self, graph: Graph) -> Iterator[Violation]:
        """Names that are neither of modules nor of ops; a count stands behind those of a piece that
        is not the first of its module."""
        known = {*graph.op_names, WITHOUT_MODULE}
        for module in graph.modules:
            while module and module not in known:
                known.add(module)
                module = module.rpartition(".")[0]
        for block in self.blocks:
            first, _, count = block.name.rpartition(":")
            if block.name not in known and not (first in known and count.isdigit()):
                yield Violation("memory", f"block {block.name!r} is no module of {graph.name}")

    def _wrong_ops(self, graph: Graph) -> Iterator[Violation]:
        end = 0
        for block in self.blocks:
            if not end <= block.start <= block.stop <= graph.num_ops:
                yield Violation(
                    "memory",
                    f"block {block.name!r} has ops {block.start} to {block.stop}; blocks follow "
                    f"each other within the {graph.num_ops} ops of the graph",
                )
            end = max(end, block.stop)


def _block(data: object, path: str) -> MemoryBlock:
    keys = ("name", "ops", "share", *_CHOICES)
    entry = fields.record(data, path, required=keys, optional=("expert_groups", "tensors"))
    # Files of earlier versions have an empty list; blocks in part were never executed.
    fields.sized(entry.get("tensors", []), f"{path}.tensors", 0, "blocks are not named in part")
    fields.sized(entry["ops"], f"{path}.ops", 2, "the first op and the one after the last")
    start, stop = fields.int_column(entry["ops"], f"{path}.ops", 0, _MAX_COUNT).tolist()
    chosen: dict[str, Any] = {
        name: fields.choice(entry[name], f"{path}.{name}", known)
        for name, known in _CHOICES.items()
    }
    return MemoryBlock(
        name=fields.text(entry["name"], f"{path}.name"),
        start=start,
        stop=stop,
        share=fields.number(entry["share"], f"{path}.share", 0, 1),
        expert_groups=fields.integer(
            entry.get("expert_groups", 1), f"{path}.expert_groups", 1, _MAX_COUNT
        ),
        **chosen,
    )
