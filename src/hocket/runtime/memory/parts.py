"""The blocks of a plan as parts of a model: which modules, and which parameters each has alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from torch import nn

from hocket.base.errors import UsageError, unknown_name
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections.memory import Memory, MemoryBlock
from hocket.runtime.memory.blocks import Block
from hocket.runtime.memory.groups import can_be_grouped
from hocket.runtime.memory.logits import last_layer, path_of
from hocket.simulate.rewriting.blocks import blocks_of as ops_by_block
from hocket.simulate.rewriting.experts import find_experts, in_groups

SHARED = "(shared)"
"""Name of the block of parameters that several blocks have, or none."""


def blocks_of(model: nn.Module, memory: Memory, graph: Graph | None) -> list[Block]:
    """The blocks, and last one for parameters that are no block's own.

    Parameters that several blocks share stay on the device; they are updated on the host, with
    their state, where all of these blocks are or have their own parameters at home there. A block
    that is a run of modules has each of them.
    """
    _require_apart(model)
    known = dict(model.named_modules())
    spans = None if graph is None else _modules_by_ops(model, memory, graph, known)
    blocks = []
    for index, policy in enumerate(memory.blocks):
        # A module that runs in several blocks is in none of them: its parameters are shared.
        paths = _own_module(policy.name, known) if spans is None else spans.get(policy.name, ())
        modules = {path: known[path] for path in paths}
        blocks.append(Block(policy, index, modules, draws=_draws(policy, graph)))
    owners: Counter[nn.Parameter] = Counter()
    for block in blocks:
        owners.update(_parameters(block))
    # What a module outside of all blocks has as well is brought by none of them.
    covered = {path for block in blocks for path in block.modules}
    for path, module in known.items():
        if path not in covered and not covered.intersection(_outer(path)):
            owners.update(set(module.parameters(recurse=False)) & owners.keys())
    for block in blocks:
        block.parameters = [p for p in _parameters(block) if owners[p] == 1]
    rest = [p for p in model.parameters() if owners[p] != 1]
    policies = [b.policy for b in blocks if any(p in set(rest) for p in _parameters(b))]
    at_home = (p.update == "host" or p.parameters == "streamed" for p in policies)
    is_hosted = bool(policies) and all(at_home)
    shared = MemoryBlock(name=SHARED, update="host" if is_hosted else "device")
    # The forward pass begins with them.
    return [*blocks, Block(shared, -1, {}, rest)]


def _draws(policy: MemoryBlock, graph: Graph | None) -> bool:
    """Whether the forward ops of a block draw random numbers, where they are known."""
    return graph is None or bool((graph.rng_order[policy.start : policy.stop] >= 0).any())


def group_experts(
    model: nn.Module, blocks: Sequence[Block], memory: Memory, graph: Graph | None
) -> None:
    """Have the blocks know which of their parameters come in groups of experts."""
    if graph is None or all(policy.expert_groups == 1 for policy in memory.blocks):
        return
    experts = find_experts(graph, ops_by_block(graph, memory))
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
    size = parameter.dtype.itemsize
    start = int(parameter.storage_offset())
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    last = start + sum((length - 1) * stride for length, stride in steps)
    return parameter.untyped_storage()._cdata, start * size, (last + 1) * size


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


def require_block_of(model: nn.Module, head: nn.Module, blocks: Sequence[Block]) -> None:
    """A loss in chunks needs a block that visits the last layer by itself."""
    if not any(module is head for block in blocks for module in block.modules.values()):
        raise UsageError(
            f"the loss cannot be made in chunks: no block of the memory plan has "
            f"{path_of(model, head)} whole",
            hint="plan with loss_chunks 1, or with the last layer and the loss in the last block",
        )


def _modules_by_ops(
    model: nn.Module, memory: Memory, graph: Graph, known: Mapping[str, nn.Module]
) -> dict[str, list[str]]:
    """Per block, the largest modules that are called and all of whose forward ops it has, in
    order. With a loss in chunks the last layer goes by itself, also where it is within others."""
    around = set(_outer(path_of(model, last_layer(model)))) if memory.loss_chunks > 1 else set()
    block_at = [-1] * graph.num_ops
    for index, policy in enumerate(memory.blocks):
        for op in range(policy.start, policy.stop):
            block_at[op] = index
    blocks_under: dict[str, set[int]] = {}
    for op in range(graph.num_ops):
        if graph.op_phase[op] == Phase.FORWARD:
            path = graph.module_of(op)
            while path in known or path == "":
                blocks_under.setdefault(path, set()).add(block_at[op])
                if not path:
                    break
                path = path.rpartition(".")[0]
    found: dict[str, list[str]] = {}
    for path, module in known.items():
        if not path or len(blocks_under.get(path, ())) != 1 or not _is_called(module):
            continue
        if path in around:
            continue
        (index,) = blocks_under[path]
        outer = next((o for o in _outer(path) if _is_called(known[o]) and o not in around), "")
        is_inner = bool(outer) and len(blocks_under.get(outer, ())) == 1
        if index >= 0 and not is_inner:
            found.setdefault(memory.blocks[index].name, []).append(path)
    return found


def _outer(path: str) -> Iterator[str]:
    """Modules around a module, from the inside."""
    while path := path.rpartition(".")[0]:
        yield path


def _is_called(module: nn.Module) -> bool:
    """Whether a module can be called at all: a list of modules cannot, only its members."""
    return type(module).forward is not nn.Module.forward
