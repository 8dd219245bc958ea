"""Buffers of modules that are computed twice: running means and the like move once a step.

In place of the running statistics of batch norms, whose training results do not depend on them, the
second call writes to others, which nobody reads. Whatever else the first call was seen to write to
is for the second call what it was for the first, and put back after it. All that may be written to
is copied for the very first call, and what was, for later ones: a buffer that first moves in a
later step is only put back then, which is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hocket.capture.model import CaptureWarning
from hocket.runtime.memory.own_numbers import OwnNumbers

_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATISTICS = _MEAN, _VARIANCE, _COUNT = "running_mean", "running_var", "num_batches_tracked"


class SeenBuffer(NamedTuple):
    """A buffer before a call."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor | None
    """A copy, where one was made."""


class Unmoved:
    """The buffers of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inner = list(dict.fromkeys(each for outer in modules for each in outer.modules()))
        self._norms = [each for each in inner
                       if isinstance(each, _NormBase) and type(each) in _PLAIN_NORMS]  # fmt: skip
        self._watched = [(each, name) for each in inner if type(each) not in _PLAIN_NORMS
                         for name in each._buffers]  # fmt: skip
        # Kernels of norms write to their running means unseen by autograd.
        self._unseen = {place for place in self._watched if isinstance(place[0], _NormBase)}
        self._moved: set[tuple[nn.Module, str]] | None = None
        """None before the first call."""
        self.numbers = OwnNumbers(inner)
        self._spare: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}

    def spares(self) -> list[torch.Tensor]:
        """What is written to in the second call, made where the buffers are by now."""
        for norm in self._norms:
            for name in (_MEAN, _VARIANCE):
                self._spared(norm._buffers[name])
        return list(self._spare.values())

    def before(self) -> list[SeenBuffer]:
        """The watched buffers before a call."""
        found = []
        for module, name in self._watched:
            if (buffer := module._buffers[name]) is not None:
                is_copied = self._moved is None or (module, name) in self._moved
                value = buffer.clone() if is_copied else None
                found.append(SeenBuffer(module, name, buffer, buffer._version, value))
        return found

    def moved(self, before: Sequence[SeenBuffer]) -> list[SeenBuffer]:
        """Those of them that the call has written to or replaced."""
        found = [
            seen
            for seen in before
            if seen.module._buffers[seen.name] is not seen.buffer
            or seen.buffer._version != seen.version
            or (seen.module, seen.name) in self._unseen
        ]
        for seen in found:
            if seen.value is None and seen.buffer._version != seen.version:
                warnings.warn(
                    f"{seen.name} of a {type(seen.module).__name__} has first moved in this step; "
                    "what is computed again finds it moved, from the next step on as it was",
                    CaptureWarning, 2,
                )  # fmt: skip
        places = {(seen.module, seen.name) for seen in found}
        self._moved = places if self._moved is None else self._moved | places
        return found

    @contextmanager
    def held(self, moved: Sequence[SeenBuffer]) -> Iterator[None]:
        """They are as before the first call, and whatever is written to them meanwhile is as if it
        had not been."""
        norms = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        found = [(norm, {name: norm._buffers[name] for name in _STATISTICS}) for norm in norms]
        for norm, own in found:
            spare = {name: self._spared(own[name]) for name in (_MEAN, _VARIANCE)}
            norm._buffers.update({**spare, _COUNT: None})
        now = [seen.module._buffers[seen.name] for seen in moved]
        kept = [(seen.buffer, seen.buffer.clone()) for seen in moved]
        for seen in moved:
            seen.module._buffers[seen.name] = seen.buffer
            if seen.value is not None:
                _write(seen.buffer, seen.value)
        try:
            yield
        finally:
            for norm, own in found:
                norm._buffers.update(own)
            for seen, buffer in zip(moved, now, strict=True):
                seen.module._buffers[seen.name] = buffer
            for buffer, value in kept:
                _write(buffer, value)

    def _spared(self, like: torch.Tensor | None) -> torch.Tensor | None:
        if like is None:
            return None
        key = like.shape, like.dtype, like.device
        if key not in self._spare:
            self._spare[key] = torch.zeros_like(like)
        return self._spare[key]


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)
