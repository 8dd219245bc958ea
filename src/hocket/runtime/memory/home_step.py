"""The update of a block where it is at home on the host: in parts, each with its rounded twin.

Parts are neighbouring parameters, or one large one. What AdamW's one pass over memory can do
(`one_pass`) is done by it; everything else by the person's optimizer on gradients in full, and a
second pass that rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hocket.runtime.memory.blocks import Block
from hocket.runtime.memory.one_pass import is_one_pass, update_rounded
from hocket.runtime.memory.updates import part_of
from hocket.simulate.rewriting.homes import PIECE_BYTES, runs_within

_SMALL = 2**16
"""Parameters of fewer elements are updated together: sharing out each among threads takes long."""


def step_at_home(block: Block, part: torch.optim.Optimizer) -> Iterator[None]:
    """A step of the gradients that wait at home, by the optimizer's part for this block."""
    sizes = [place.num_bytes for place in block.home_layout.places]
    for number, (start, stop) in enumerate(runs_within(sizes, PIECE_BYTES)):
        if number:
            yield
        _step(block, part, slice(start, stop))


def _step(block: Block, part: torch.optim.Optimizer, chosen: slice) -> None:
    places = block.home_layout.places[chosen]
    left = {p.parameter: block.pending[p.parameter] for p in places if p.parameter in block.pending}
    for parameter in _in_one_pass(block, part, chosen):
        del left[parameter]
    if not left:
        return
    twins = [block.twins[parameter] for parameter in left]
    for twin, gradient in zip(twins, left.values(), strict=True):
        twin.grad = gradient.to(twin.dtype)
    own = part if len(left) == len(block.parameters) else part_of(part, {t: t for t in twins})
    own.step()
    for twin in twins:
        twin.grad = None
    block.round(left)


def _in_one_pass(
    block: Block, part: torch.optim.Optimizer, chosen: slice
) -> Iterator[nn.Parameter]:
    """Update what can be updated and rounded at once."""
    assert block.copied is not None
    if block.copied is block.home or not is_one_pass(part):
        return
    groups = {parameter: group for group in part.param_groups for parameter in group["params"]}
    for place in block.copied_layout.places[chosen]:
        parameter, twin = place.parameter, block.twins[place.parameter]
        gradient = block.pending.get(parameter)
        if gradient is None or gradient.numel() < _SMALL:
            continue
        rounded = place.of(block.copied)
        if update_rounded(groups[twin], part.state[twin], twin, gradient, rounded):
            yield parameter
