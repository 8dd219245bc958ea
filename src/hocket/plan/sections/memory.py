"""The memory section: how a step stays within a memory budget on each device.

The step is split into blocks: ranges of its forward pass in execution order, such as the layers of
a transformer, with their parts of the backward pass and of the update. Each block has three
policies.

``activations``, for tensors that its forward pass makes and its backward pass reads:

- ``kept`` on the device;
- ``offloaded`` to the host as soon as the forward pass has used them, and fetched one block before
  the backward pass reads them;
- ``recomputed``: dropped, and recomputed from the block's input (its checkpoint) when the
  backward pass reaches the block. The checkpoint stays on the device, or is offloaded if
  ``checkpoint`` is ``offloaded``.

``share`` is the fraction of the bytes that is offloaded, in the order in which they are made.

``parameters``: ``resident`` on the device, or ``streamed``: kept on the host, fetched ``prefetch``
blocks before the block's forward pass and again before its backward pass, and dropped after each.
Gradients of streamed parameters are copied to the host as soon as they are complete.

``update``: ``device`` or ``host``, where the optimizer runs and keeps its state. Either way the
update starts as soon as the block's gradients are complete, so that gradients of all blocks never
exist at the same time. A block with streamed parameters and ``update`` on the device also fetches
its optimizer state and writes it back.

`hocket.planners.memory` chooses the policies, and `hocket.simulate.rewriting` turns them into ops
of the graph, which the simulator times. The training step finds the blocks by their names.
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
"""Name of a block whose first op is in no module."""
SMALLEST_MOVED = 1024
"""Least bytes of a storage that is offloaded: copying a smaller one costs more than it saves."""
_MAX_BLOCKS = 1_000_000
_MAX_COUNT = 2**31 - 1
_MAX_CHUNKS = _MAX_PREFETCH = 4096
"""Limit against very long simulations: each chunk adds ops, each prefetched block is searched."""


@dataclass(frozen=True, kw_only=True)
class MemoryBlock:
    """A range of the step and its policies, which the module docstring describes."""

    name: str
    """Path of its module, such as ``transformer.h.3``; of its first module if it has several."""
    start: int = 0
    """First forward op of the block, which ends before op ``stop``; both are 0 without a graph."""
    stop: int = 0
    activations: Activations = "kept"
    share: float = 1.0
    """Fraction of the bytes that is offloaded, in the order in which they are made."""
    checkpoint: Checkpoint = "kept"
    """Where the input of a recomputed block is kept: ``kept`` is on the device."""
    parameters: Parameters = "resident"
    update: Update = "device"

    @property
    def is_on_host(self) -> bool:
        """True if the host keeps the block's parameters or their optimizer state."""
        return self.parameters == "streamed" or self.update == "host"


@dataclass(frozen=True, kw_only=True)
class Memory(Section):
    """Blocks in the order of the forward pass, the memory budget, and settings of the step."""

    budget_bytes: tuple[int, ...]
    """Memory budget of each device of the cluster."""
    blocks: tuple[MemoryBlock, ...]
    loss_chunks: int = 1
    """Number of chunks of the batch for which logits and loss are computed and differentiated one
    after another, so that all logits never exist at the same time."""
    prefetch: int = 1
    """Number of blocks by which fetches of parameters and activations run ahead of their use."""
    async_update: bool = False
    """True if host updates may overlap with the next forward pass. Otherwise they end before the
    step ends, so that code that reads parameters between steps sees the new values."""

    def replay_hindrance(self, graph: Graph) -> str:
        """Return why steps cannot be replayed as one CUDA graph; empty if they can."""
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
                }
                for block in self.blocks
            ],
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Memory:
        """Read the section from plain data; raises `InputFileError`."""
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
        """Check budgets per device, and that blocks have unique names, order and existing ops."""
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
        graph = problem.work
        if isinstance(graph, Graph):
            yield from self._wrong_names(graph)
            yield from self._wrong_ops(graph)
        elif any(block.stop for block in self.blocks):
            yield Violation("memory", "blocks name ops, but there is no graph")

    def _wrong_names(self, graph: Graph) -> Iterator[Violation]:
        """Yield blocks that are named after neither a module nor an op.

        Second and later blocks of one module are named ``module:count``.
        """
        known = {*graph.op_names, WITHOUT_MODULE}
        for module in graph.modules:
            while module and module not in known:
                known.add(module)
                module = module.rpartition(".")[0]
        for block in self.blocks:
            # Later blocks of one module have a count appended.
            first, _, count = block.name.rpartition(":")
            if block.name not in known and not (first in known and count.isdigit()):
                yield Violation("memory", f"block {block.name!r} is no module of {graph.name}")

    def _wrong_ops(self, graph: Graph) -> Iterator[Violation]:
        end = 0
        for block in self.blocks:
            if not end <= block.start <= block.stop <= graph.num_ops:
                # Blocks may leave gaps, but must not overlap.
                yield Violation(
                    "memory",
                    f"block {block.name!r} has ops {block.start} to {block.stop}; blocks follow "
                    f"each other within the {graph.num_ops} ops of the graph",
                )
            end = max(end, block.stop)


def _block(data: object, path: str) -> MemoryBlock:
    keys = ("name", "ops", "share", *_CHOICES)
    entry = fields.record(data, path, required=keys)
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
        **chosen,
    )
