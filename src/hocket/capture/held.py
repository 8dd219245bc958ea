"""Find tensors that autograd saves although the backward pass never reads them.

Some derivative formulas save tensors only for second derivatives (the gates of a fused recurrent
cell), and a custom autograd function may save any tensor. Such tensors use memory until their node
has run. Training within a budget uses autograd, so they are counted there; a traced step that is
run op by op does not hold them. Nodes are inspected before the backward pass, which frees saved
tensors. O(nodes + saved tensors).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hocket.capture.program import Program
from hocket.capture.record import Recorder
from hocket.capture.recording import Recording
from hocket.graph import Graph


class SavedByNode(NamedTuple):
    """A storage that an autograd node saved, with the node's sequence number."""

    node: int
    storage: int


def find_saved(recorder: Recorder, loss: torch.Tensor) -> list[SavedByNode]:
    """Tensors that the autograd nodes behind a loss have saved."""
    found: dict[SavedByNode, None] = {}
    # Access to a saved tensor may create a view of it, which must not be recorded.
    with _disable_current_modes():
        for node in _nodes_behind(loss):
            for tensor in _saved_tensors(node):
                storage = recorder.storage_of(tensor)
                if storage is not None:
                    found[SavedByNode(node._sequence_nr(), storage)] = None
    return list(found)


def _nodes_behind(loss: torch.Tensor) -> Iterator[Any]:
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending += [following for following, _ in node.next_functions]


def _saved_tensors(node: Any) -> list[torch.Tensor]:
    leaves, kind = [], cast("Hashable", type(node))
    for name in _saved_names(kind):
        try:
            leaves += tree_leaves(getattr(node, name))
        except RuntimeError:
            # The tensor was changed in place since: the backward pass raises the error.
            continue
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@cache
def _saved_names(kind: Hashable) -> tuple[str, ...]:
    """Names of a node type's attributes that hold saved tensors."""
    return tuple(
        name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"
    )


def note_held(recorder: Recorder, saved: Sequence[SavedByNode]) -> None:
    """Record saved tensors that neither their own node nor any later op reads."""
    recording = recorder.recording
    last_read: dict[int, int] = {}
    for number, call in enumerate(recording.calls):
        for value in call.reads:
            last_read[recording.values[value].storage] = number
    given = {recording.values[source.value].storage for source in recording.sources}
    for node, storage in saved:
        calls = recorder.calls_of.get(node)
        if calls and last_read.get(storage, -1) < calls[0] and storage not in given:
            recording.held.append((calls[-1], storage))


def held_note(recording: Recording, program: Program, graph: Graph) -> dict[str, list[str]]:
    """Return saved but unread tensors as op and tensor names, which survive renumbering."""
    owner = {
        spec.storage: graph.tensor_names[number]
        # Reversed, so that the first tensor of a storage gives its name, not a later view.
        for number, spec in reversed([*enumerate(program.tensors)])
    }
    found: dict[str, list[str]] = {}
    for op, storage in recording.held:
        found.setdefault(graph.op_names[op], []).append(owner[storage])
    return found
