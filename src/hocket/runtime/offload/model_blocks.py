"""Maps blocks of a memory plan to modules of a model, and makes plans with one policy for all
blocks.

A block consists of the modules that compute its ops, and of the parameters that no other block
uses. Without a traced step, blocks are derived from the module tree alone: each member of an
outermost `nn.ModuleList` or `nn.Sequential` (a transformer layer, a stage of a convolutional net)
is a block, and so is each module with parameters outside of these lists. A member with most of its
parameters in an inner list, such as a list of experts, is split into the members of that list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from hocket.base.errors import UsageError, unknown_name
from hocket.graph.graph import Graph
from hocket.plan.sections.memory import Memory, MemoryBlock
from hocket.runtime.offload.chunked_loss import last_layer, path_of
from hocket.runtime.offload.copy_streams import extent
from hocket.runtime.offload.parameter_blocks import Block
from hocket.simulate.rewriting.blocks import blocks_of
from hocket.simulate.rewriting.chunks import logits_module
from hocket.simulate.rewriting.module_calls import ModuleCall, find_module_calls
from hocket.simulate.rewriting.repeated_calls import outer_modules
from hocket.simulate.rewriting.uses import can_run_twice

SHARED = "(shared)"
"""Name of the block of parameters that are used by several blocks, or by none."""
_MIN_MEMBERS = 3
"""Minimum number of members with parameters in an inner list that splits a block."""


def model_blocks(model: nn.Module, memory: Memory, graph: Graph | None) -> list[Block]:
    """Return the blocks of a plan, followed by a block of shared parameters.

    Parameters are shared if several blocks use them, or no block does. Shared parameters stay on
    the device. They are updated on the host if all blocks that use them have their master copies on
    the host; for parameters that no block uses, all blocks of the plan count.
    """
    _require_disjoint(model)
    known = dict(model.named_modules())
    calls = _module_calls(graph, memory)
    blocks = []
    for index, policy in enumerate(memory.blocks):
        own = [call for call in calls if call.block == index]
        if graph is None:
            paths = [_module_path(policy.name, known)]
            once = [path for path in paths if _draws_in_cudnn(known[path])]
        else:
            paths = [call.module for call in own]
            is_recomputed = policy.activations == "recomputed"
            once = [
                call.module
                for call in own
                if is_recomputed and not can_run_twice(graph, call.start, call.stop)
            ]
        modules = {path: known[path] for path in paths}
        blocks.append(Block(policy, index, modules, paths, uses_rng=_uses_rng(policy, graph),
                            not_recomputable=frozenset(once)))  # fmt: skip
    # Parameters of a module that is called in several blocks are shared.
    owners: Counter[nn.Parameter] = Counter()
    for block in blocks:
        owners.update(_parameters(block))
    # Parameters that a module outside of all blocks also uses cannot be fetched by a block.
    covered = {path for block in blocks for path in block.modules}
    for path, module in known.items():
        if path not in covered and not covered.intersection(outer_modules(path)):
            owners.update(set(module.parameters(recurse=False)) & owners.keys())
    for block in blocks:
        block.parameters = [p for p in _parameters(block) if owners[p] == 1]
    rest = [p for p in model.parameters() if owners[p] != 1]
    policies = [b.policy for b in blocks if any(p in set(rest) for p in _parameters(b))]
    # Parameters that no block uses, such as a class token, follow the policies of all blocks.
    policies = policies or list(memory.blocks)
    is_on_host = bool(policies) and all(policy.is_on_host for policy in policies)
    shared = MemoryBlock(name=SHARED, update="host" if is_on_host else "device")
    # Index -1: the forward pass needs shared parameters first.
    return [*blocks, Block(shared, -1, {}, parameters=rest)]


def _draws_in_cudnn(module: nn.Module) -> bool:
    """True if cuDNN may draw dropout masks of a module, which recompute cannot reproduce."""
    return any(isinstance(each, nn.RNNBase) and each.dropout for each in module.modules())


def _uses_rng(policy: MemoryBlock, graph: Graph | None) -> bool:
    """True if the forward ops of a block draw random numbers, or are unknown."""
    return graph is None or bool((graph.rng_order[policy.start : policy.stop] >= 0).any())


def _require_disjoint(model: nn.Module) -> None:
    """Refuse parameters that overlap in memory, because their separate master copies would
    diverge."""
    named = [(name, p) for name, p in model.named_parameters() if p.numel()]
    by_address = sorted(named, key=lambda each: _byte_range(each[1])[:2])
    for (name, parameter), (other, following) in pairwise(by_address):
        storage, _, stop = _byte_range(parameter)
        other_storage, start, _ = _byte_range(following)
        if storage == other_storage and start < stop:
            raise UsageError(
                f"{name} and {other} are two parameters in the same memory",
                hint="tie them by one parameter: module.weight = other.weight",
            )


def _byte_range(parameter: nn.Parameter) -> tuple[int, int, int]:
    """Return a parameter's storage, its first byte, and the byte after its last one."""
    size, start = parameter.dtype.itemsize, int(parameter.storage_offset())
    stop = start + extent(parameter)
    return parameter.untyped_storage()._cdata, start * size, stop * size


def _parameters(block: Block) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for module in block.modules.values() for p in module.parameters()))


def _module_path(name: str, known: Mapping[str, nn.Module]) -> str:
    if name not in known:
        raise unknown_name("module of a memory plan", name, known)
    if not name:
        raise UsageError(
            "a memory plan with the whole model as one block cannot run",
            hint="plan with blocks that are modules of the model",
        )
    return name


def find_head(
    model: nn.Module, memory: Memory, graph: Graph | None, blocks: Sequence[Block]
) -> nn.Linear | None:
    """Return the layer that computes the logits, or None if the loss is not computed in chunks."""
    if memory.loss_chunks == 1:
        return None
    last = memory.blocks[-1]
    path = "" if graph is None else logits_module(graph, last.start, last.stop)
    head = last_layer(model, path)
    if head is None:
        raise UsageError(
            f"{type(model).__name__} has no last nn.Linear that could compute logits in chunks",
            hint="plan with one chunk (loss_chunks 1)",
        )
    if not any(module is head for block in blocks for module in block.modules.values()):
        raise UsageError(
            f"the loss cannot be computed in chunks: no block of the memory plan has "
            f"{path_of(model, head)} whole",
            hint="plan with loss_chunks 1, or with the last layer and the loss in the last block",
        )
    return head


def _module_calls(graph: Graph | None, memory: Memory) -> Sequence[ModuleCall]:
    """Return the module calls that compute the blocks; none without a traced step."""
    if graph is None or not memory.blocks:
        return ()
    blocks = blocks_of(graph, memory)
    return find_module_calls(graph, blocks.start, blocks.block_of).calls


# ── blocks without a traced step ─────────────────────────────────────────────────────────────────


def uniform(model: nn.Module, budget_bytes: int, **policy: Any) -> Memory:
    """Return a plan for one device with the same policy for all blocks."""
    names = list(block_names(model))
    if not names:
        raise UsageError(
            f"{type(model).__name__} has no modules that a memory plan could cut it by",
            hint="give its layers modules of their own",
        )
    blocks = tuple(MemoryBlock(name=name, **policy) for name in names)
    return Memory(budget_bytes=(budget_bytes,), blocks=blocks)


def block_names(model: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of the blocks inside a module, in the order of its submodules."""
    has_lists = any(_is_list(inner) for inner in model.modules() if inner is not model)
    for name, child in model.named_children():
        place = f"{path}.{name}" if path else name
        is_member = _is_list(model) and bool(path or not has_lists) and not _is_mostly_list(child)
        if is_member or not any(map(_is_list, child.modules())):
            if is_member or _has_parameters(child):
                yield place
        else:
            yield from block_names(child, place)


def _is_mostly_list(module: nn.Module) -> bool:
    """True if most of a module's parameters are in one inner list with several members."""
    own = _num_parameters(module)
    lists = (inner for inner in module.modules() if inner is not module and _is_list(inner))
    return any(
        2 * _num_parameters(inner) > own
        and sum(map(_has_parameters, inner.children())) >= _MIN_MEMBERS
        for inner in lists
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
