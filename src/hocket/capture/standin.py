"""Stand-ins for the blocks of a run that are not recorded.

A block that is left out stays in its list, so that the model counts, slices and indexes its blocks
as ever, but it runs nothing: it gives new tensors like those that the template, the recorded block
before it, has made, and passes gradients on. `splice` checks that nobody noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hocket.capture.blocks import TEMPLATE, BlockRun, NotRepeatable
from hocket.capture.record import Recorder, layout_of
from hocket.capture.recording import BlockVisit
from hocket.graph import Phase

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""What is compared by value; all other things must be the same object."""


def put_stand_ins(model: nn.Module, recorder: Recorder, runs: Sequence[BlockRun]) -> None:
    """Change a copy of a model: watch the blocks before the left-out ones and replace those."""
    for run in runs:
        stand_in = _StandIn(recorder)
        for path in run.paths[TEMPLATE - 1 : TEMPLATE + 1]:
            block: Any = model.get_submodule(path)
            block.forward = partial(stand_in.watch, path, block.forward)
        for path in run.left_out:
            left_out: Any = model.get_submodule(path)
            left_out.forward = partial(stand_in.forward, path)


# ── while the model runs ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Results:
    """What the results of a block are made of, leaf by leaf."""

    structure: Any
    leaves: tuple[tuple[str, Any], ...]
    """('made', number), ('input', number of the argument) or ('fixed', the thing itself)."""
    made: tuple[torch.Tensor, ...]


class _StandIn:
    """Does for the left-out blocks of one run what its template did."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.before: _Results | None = None
        self.template: _Results | None = None
        self.structure: Any = None
        self.start = 0
        """Where the block before the template starts: what is older is the same for all blocks."""
        self.sources: list[int | None] = []
        """For each tensor that the template made, the argument whose place it takes next."""

    def watch(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a recorded block and note what went in and came out."""
        if self.recorder.phase != Phase.FORWARD:
            return forward(*args, **kwargs)
        structure, inputs = _flat((args, kwargs))
        seen = tuple(self._seen(leaf) for leaf in inputs)
        start = len(self.recorder.recording.calls)
        result = forward(*args, **kwargs)
        results = self._results(result, inputs, start)
        made = tuple(self._number(tensor) for tensor in results.made)
        self.recorder.recording.visits[path] = BlockVisit(structure, seen, made)
        self.before, self.template = self.template, results
        self.structure = structure
        if self.before is None:
            self.start = start
        else:
            self._pair(inputs, seen)
        return result

    def forward(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a block that is left out."""
        template = self.template
        if self.recorder.phase != Phase.FORWARD or template is None or self.before is None:
            raise NotRepeatable("a block runs before its template")
        structure, inputs = _flat((args, kwargs))
        if structure != self.structure:
            raise NotRepeatable("blocks are called in different ways")
        seen = tuple(self._seen(leaf) for leaf in inputs)
        made = self._make(template, inputs)
        numbers = tuple(self._number(tensor) for tensor in made)
        self.recorder.recording.visits[path] = BlockVisit(structure, seen, numbers)
        found = {"made": made, "input": inputs}
        leaves = [what if kind == "fixed" else found[kind][what] for kind, what in template.leaves]
        return _built(template.structure, iter(leaves))

    def _make(self, template: _Results, inputs: list[Any]) -> Sequence[torch.Tensor]:
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in template.made):
            return [_like(tensor) for tensor in template.made]
        passed = [None if k is None else inputs[k] for k in self.sources]
        result: Any = _PassOn.apply(template.made, *passed)  # type: ignore[no-untyped-call]
        return tuple(result)

    def _number(self, tensor: torch.Tensor) -> int:
        number = self.recorder.value_of(tensor)
        if number is None:
            raise NotRepeatable("a block uses a tensor that no recorded op made")
        return number

    def _seen(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return self._number(leaf), leaf.requires_grad
        return leaf

    # ── what the template did ────────────────────────────────────────────────────────────────

    def _results(self, result: Any, inputs: list[Any], start: int) -> _Results:
        structure, outputs = _flat(result)
        made: list[torch.Tensor] = []
        leaves: list[tuple[str, Any]] = []
        for leaf in outputs:
            position = _position(leaf, inputs)
            if isinstance(leaf, PLAIN):
                leaves.append(("fixed", leaf))
            elif position is not None:
                leaves.append(("input", position))
            elif not isinstance(leaf, FakeTensor):
                raise NotRepeatable("a block returns more than tensors")
            elif _position(leaf, made) is not None:
                leaves.append(("made", _position(leaf, made)))
            elif self.recorder.is_older(leaf, start):
                leaves.append(("fixed", leaf))
            elif layout_of(leaf) != layout_of(leaf)._replace(offset=0, lazy=(False, False)):
                raise NotRepeatable("a block returns a part of a tensor")
            else:
                leaves.append(("made", len(made)))
                made.append(leaf)
        return _Results(structure, tuple(leaves), tuple(made))

    def _pair(self, inputs: list[Any], seen: tuple[Any, ...]) -> None:
        """Check that two blocks return alike, and find how gradients pass from one to the next."""
        before, template = self.before, self.template
        if before is None or template is None or not _same_results(before, template):
            raise NotRepeatable("blocks return different things")
        numbers = {self._number(tensor): made for made, tensor in enumerate(before.made)}
        if len({self._number(tensor) for tensor in template.made}) < len(template.made):
            raise NotRepeatable("a block returns one value twice")
        self.sources = [None] * len(template.made)
        free = []
        for k, leaf in enumerate(inputs):
            if not isinstance(leaf, FakeTensor) or not leaf.requires_grad:
                continue
            made = numbers.pop(seen[k][0], None)
            if made is not None and _fits(leaf, template.made[made]):
                self.sources[made] = k
            elif not self.recorder.is_older(leaf, self.start):
                free.append(k)
        for made, tensor in enumerate(template.made):
            if self.sources[made] is None and tensor.requires_grad:
                fitting = (k for k in free if _fits(inputs[k], tensor))
                self.sources[made] = next(fitting, None)
                free = [k for k in free if k != self.sources[made]]


class _PassOn(torch.autograd.Function):
    """New tensors like some given ones; gradients go on to the arguments that they replace."""

    @staticmethod
    def forward(ctx: Any, made: tuple[torch.Tensor, ...], *passed: torch.Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.is_passed = [tensor is not None for tensor in passed]
        new = tuple(_like(tensor) for tensor in made)
        constant = [n for n, tensor in zip(new, made, strict=True) if not tensor.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return new

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept = zip(gradients, ctx.is_passed, strict=True)
        return None, *(gradient if is_passed else None for gradient, is_passed in kept)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _fits(given: torch.Tensor, made: torch.Tensor) -> bool:
    return given.shape == made.shape and given.dtype == made.dtype and made.requires_grad


def _position(leaf: Any, others: Sequence[Any]) -> int | None:
    return next((k for k, other in enumerate(others) if other is leaf), None)


def _same_results(a: _Results, b: _Results) -> bool:
    same_leaves = a.structure == b.structure and all(
        x[0] == y[0] and (x[1] is y[1] or (isinstance(x[1], PLAIN) and same_plain(x[1], y[1])))
        for x, y in zip(a.leaves, b.leaves, strict=True)
    )
    return same_leaves and all(
        layout_of(x) == layout_of(y) and x.requires_grad == y.requires_grad
        for x, y in zip(a.made, b.made, strict=True)
    )


def same_plain(a: Any, b: Any) -> bool:
    """True if two plain things are of one type and equal."""
    return type(a) is type(b) and bool(a == b)


def _flat(tree: Any) -> tuple[Any, list[Any]]:
    """How plain containers are nested, and their leaves; all other objects are leaves."""
    leaves: list[Any] = []

    def visit(item: Any) -> Any:
        if type(item) is dict:
            return dict, tuple((key, visit(value)) for key, value in item.items())
        if type(item) in (list, tuple) or (isinstance(item, tuple) and hasattr(item, "_fields")):
            return type(item), tuple(visit(value) for value in item)
        leaves.append(item)
        return None

    return visit(tree), leaves


def _built(structure: Any, leaves: Any) -> Any:
    if structure is None:
        return next(leaves)
    kind, items = structure
    if kind is dict:
        return {key: _built(item, leaves) for key, item in items}
    parts = [_built(item, leaves) for item in items]
    return kind(parts) if kind in (list, tuple) else kind(*parts)
