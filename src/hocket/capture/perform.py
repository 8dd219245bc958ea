"""Run one recorded call on real tensors: look up its arguments, run it, store its results.

A call is bound to a device once (`BoundCall`) and run once per step. `draw_seed` derives a seed for
each call that draws random numbers, so that results do not depend on device or order of the calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping
from typing import Any

import torch

from hocket.capture.program import Call
from hocket.capture.recording import Constant, Ref, flat_results, map_tree

Tensors = MutableMapping[int, torch.Tensor]


class BoundCall:
    """A call with precomputed argument positions, bound to a device."""

    __slots__ = (
        "args", "function", "kwargs", "named", "nested", "outputs", "refs", "versions",
    )  # fmt: skip

    def __init__(
        self, call: Call, device: torch.device | None = None, function: Any = None
    ) -> None:
        """Bind ``call`` to ``device``; None keeps the recorded device.

        ``function`` replaces the recorded function if given.
        """
        self.function = function or call.function
        args = [map_tree(item, lambda leaf: _placed(leaf, device)) for item in call.args]
        self.kwargs = {
            key: map_tree(item, lambda leaf: _placed(leaf, device))
            for key, item in call.kwargs.items()
        }
        self.args = args
        self.refs = [(at, item.number) for at, item in enumerate(args) if isinstance(item, Ref)]
        self.nested = [at for at, item in enumerate(args) if isinstance(item, list | tuple | dict)
                       and not isinstance(item, Ref) and _has_ref(item)]  # fmt: skip
        self.named = [key for key, item in self.kwargs.items() if _has_ref(item)]
        self.outputs = call.outputs
        self.versions = tuple(zip(call.targets, call.written, strict=True))

    def perform(self, known: Tensors) -> None:
        """Run the call on the tensors in ``known`` and store its results there."""
        args = list(self.args)
        for position, tensor in self.refs:
            args[position] = known[tensor]
        for position in self.nested:
            args[position] = map_tree(args[position], lambda leaf: _given(leaf, known))
        kwargs = self.kwargs
        if self.named:
            found = {k: map_tree(kwargs[k], lambda leaf: _given(leaf, known)) for k in self.named}
            kwargs = {**kwargs, **found}
        results = flat_results(self.function(*args, **kwargs))
        for output, result in zip(self.outputs, results, strict=True):
            if output is not None:
                known[output] = result
        for before, after in self.versions:
            known[after] = known[before]


def draw_seed(seed: int, step: int, draw: int) -> int:
    """Seed of the random draw number ``draw`` in a step."""
    text = f"{seed} {step} {draw}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator of ``device``."""
    generator_of(device).manual_seed(seed)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator from which ops on ``device`` draw."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _placed(leaf: Any, device: torch.device | None) -> Any:
    """Return a leaf of recorded arguments; constants and device arguments become ``device``'s."""
    if isinstance(leaf, Constant):
        return leaf.tensor if device is None else leaf.tensor.to(device)
    return device if isinstance(leaf, torch.device) and device is not None else leaf


def _given(leaf: Any, known: Tensors) -> Any:
    return known[leaf.number] if isinstance(leaf, Ref) else leaf


def _has_ref(tree: Any) -> bool:
    found: list[Any] = []
    map_tree(tree, found.append)
    return any(isinstance(leaf, Ref) for leaf in found)
