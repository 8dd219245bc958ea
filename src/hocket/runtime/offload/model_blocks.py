"""Memory plans with one policy for all blocks of a model, found by its modules alone.

Blocks are the members of the outermost lists of modules (layers of a transformer, stages of a
convolutional net) and whatever modules with parameters are outside of these. A member most of whose
parameters are in a list inside it, such as that of experts, is cut by that list in its turn.
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
from hocket.runtime.offload.expert_groups import can_be_grouped
from hocket.runtime.offload.parameter_blocks import Block
from hocket.simulate.rewriting.blocks import blocks_of
from hocket.simulate.rewriting.calls import outer_modules
from hocket.simulate.rewriting.chunks import logits_module
from hocket.simulate.rewriting.experts import find_experts, in_groups
from hocket.simulate.rewriting.uses import can_run_twice
from hocket.simulate.rewriting.visits import StepVisit, find_visits

# The blocks of a plan as parts of a model: which modules, and which parameters each has alone.

SHARED = "(shared)"
"""Name of the block of parameters that several blocks have, or none."""


def model_blocks(model: nn.Module, memory: Memory, graph: Graph | None) -> list[Block]:
    """The blocks, and last one for parameters that are no block's own.

    Parameters that several blocks share, or none has, stay on the device; they are updated on the
    host, with their state, where all of these blocks (all there are, where none shares any) are or
    have their own parameters at home there. A block that is a run of modules has each of them.
    """
    _require_apart(model)
    known = dict(model.named_modules())
    visits = _visits(graph, memory)
    blocks = []
    for index, policy in enumerate(memory.blocks):
        # Parameters of a module that is called in several blocks are shared.
        own = [visit for visit in visits if visit.block == index]
        paths = _own_module(policy.name, known) if graph is None else [v.module for v in own]
        modules = {path: known[path] for path in paths}
        once = [path for path in paths if graph is None and _drops_by_itself(known[path])]
        once += [v.module for v in own if policy.activations == "recomputed" and graph is not None
                 and not can_run_twice(graph, v.start, v.stop)]  # fmt: skip
        draws = _draws(policy, graph)
        blocks.append(Block(policy, index, modules, paths, draws=draws, once=frozenset(once)))
    owners: Counter[nn.Parameter] = Counter()
    for block in blocks:
        owners.update(_parameters(block))
    # What a module outside of all blocks has as well is brought by none of them.
    covered = {path for block in blocks for path in block.modules}
    for path, module in known.items():
        if path not in covered and not covered.intersection(outer_modules(path)):
            owners.update(set(module.parameters(recurse=False)) & owners.keys())
    for block in blocks:
        block.parameters = [p for p in _parameters(block) if owners[p] == 1]
    rest = [p for p in model.parameters() if owners[p] != 1]
    policies = [b.policy for b in blocks if any(p in set(rest) for p in _parameters(b))]
    # Of what the model's own code alone reads, such as a token of a class, all blocks decide.
    policies = policies or list(memory.blocks)
    is_hosted = bool(policies) and all(policy.is_on_host for policy in policies)
    shared = MemoryBlock(name=SHARED, update="host" if is_hosted else "device")
    # The forward pass begins with them.
    return [*blocks, Block(shared, -1, {}, parameters=rest)]


def _drops_by_itself(module: nn.Module) -> bool:
    """True if cuDNN may draw what a module drops, which cannot be drawn again."""
    return any(isinstance(each, nn.RNNBase) and each.dropout for each in module.modules())


def _draws(policy: MemoryBlock, graph: Graph | None) -> bool:
    """True if the forward ops of a block draw random numbers, where they are known."""
    return graph is None or bool((graph.rng_order[policy.start : policy.stop] >= 0).any())


def group_experts(
    model: nn.Module, blocks: Sequence[Block], memory: Memory, graph: Graph | None
) -> None:
    """Have the blocks know which of their parameters come in groups of experts."""
    if graph is None or all(policy.expert_groups == 1 for policy in memory.blocks):
        return
    experts = find_experts(graph, blocks_of(graph, memory))
    named = dict(model.named_parameters(remove_duplicate=False))
    for root, count in in_groups(experts, memory).items():
        block, parameter = blocks[experts[root].block], named[graph.tensor_names[root]]
        if parameter in set(block.parameters) and can_be_grouped(parameter):
            block.grouped[parameter] = count


def _require_apart(model: nn.Module) -> None:
    """Parameters may lie in one tensor side by side; of two in the same bytes, each would go its
    own way once it has a home of its own."""
    named = [(name, p) for name, p in model.named_parameters() if p.numel()]
    by_place = sorted(named, key=lambda each: _bytes_of(each[1])[:2])
    for (name, parameter), (other, beside) in pairwise(by_place):
        storage, _, stop = _bytes_of(parameter)
        other_storage, start, _ = _bytes_of(beside)
        if storage == other_storage and start < stop:
            raise UsageError(
                f"{name} and {other} are two parameters in the same memory",
                hint="tie them by one parameter: module.weight = other.weight",
            )


def _bytes_of(parameter: nn.Parameter) -> tuple[int, int, int]:
    """Its storage, and its first byte there and the one after its last."""
    size, start = parameter.dtype.itemsize, int(parameter.storage_offset())
    stop = start + extent(parameter)
    return parameter.untyped_storage()._cdata, start * size, stop * size


def _parameters(block: Block) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for module in block.modules.values() for p in module.parameters()))


def _own_module(name: str, known: Mapping[str, nn.Module]) -> Sequence[str]:
    if name not in known:
        raise unknown_name("module of a memory plan", name, known)
    if not name:
        raise UsageError(
            "a memory plan of the whole model as one block cannot be carried out",
            hint="plan with blocks that are modules of the model",
        )
    return (name,)


def find_head(
    model: nn.Module, memory: Memory, graph: Graph | None, blocks: Sequence[Block]
) -> nn.Linear | None:
    """The layer that makes the logits, where the loss goes in chunks: a block must visit it by
    itself."""
    if memory.loss_chunks == 1:
        return None
    last = memory.blocks[-1]
    path = "" if graph is None else logits_module(graph, last.start, last.stop)
    head = last_layer(model, path)
    if not any(module is head for block in blocks for module in block.modules.values()):
        raise UsageError(
            f"the loss cannot be made in chunks: no block of the memory plan has "
            f"{path_of(model, head)} whole",
            hint="plan with loss_chunks 1, or with the last layer and the loss in the last block",
        )
    return head


def _visits(graph: Graph | None, memory: Memory) -> Sequence[StepVisit]:
    """Calls of the modules that carry the blocks out."""
    if graph is None or not memory.blocks:
        return ()
    blocks = blocks_of(graph, memory)
    return find_visits(graph, blocks.start, blocks.block_of).visits


# Memory plans with one policy for all blocks of a model, found by its modules alone.
#
# Blocks are the members of the outermost lists of modules (layers of a transformer, stages of a
# convolutional net) and whatever modules with parameters are outside of these. A member most of
# whose parameters are in a list inside it, such as that of experts, is cut by that list in its
# turn.


_FEWEST = 3
"""Members with parameters that a list inside a block has at least where it is cut by them."""


def uniform(model: nn.Module, budget_bytes: int, **policy: Any) -> Memory:
    """All blocks under one policy, on one device."""
    names = list(block_names(model))
    if not names:
        raise UsageError(
            f"{type(model).__name__} has no modules to keep within a budget",
            hint="give its layers modules of their own",
        )
    blocks = tuple(MemoryBlock(name=name, **policy) for name in names)
    return Memory(budget_bytes=(budget_bytes,), blocks=blocks)


def block_names(model: nn.Module) -> Iterator[str]:
    """Paths of the blocks, in the order of the modules."""
    yield from _under(model, "")


def _under(module: nn.Module, path: str) -> Iterator[str]:
    has_lists = any(_is_list(inner) for inner in module.modules() if inner is not module)
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        is_member = _is_list(module) and bool(path or not has_lists) and not _is_mostly_list(child)
        if is_member or not _has_list(child):
            if is_member or _has_parameters(child):
                yield place
        else:
            yield from _under(child, place)


def _is_mostly_list(module: nn.Module) -> bool:
    """True if most of a module's parameters are in one list inside it, of several members."""
    own = _num_parameters(module)
    lists = (inner for inner in module.modules() if inner is not module and _is_list(inner))
    return any(
        2 * _num_parameters(inner) > own and sum(map(_has_parameters, inner.children())) >= _FEWEST
        for inner in lists
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


def _has_list(module: nn.Module) -> bool:
    return any(_is_list(inner) for inner in module.modules())
