"""Buffers of modules that are computed twice: running means and the like move once a step.

In place of the running statistics of batch norms, whose training results do not depend on them, the
second call writes to others, which nobody reads. Whatever else the first call was seen to write to
is put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATISTICS = _MEAN, _VARIANCE, _COUNT = "running_mean", "running_var", "num_batches_tracked"


class Unmoved:
    """The buffers of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inner = list(dict.fromkeys(each for outer in modules for each in outer.modules()))
        self._norms = [each for each in inner
                       if isinstance(each, _NormBase) and type(each) in _PLAIN_NORMS]  # fmt: skip
        self._watched = [(each, name) for each in inner if type(each) not in _PLAIN_NORMS
                         for name in each._buffers]  # fmt: skip
        # Kernels of norms write to their running means unseen by autograd.
        self._moved: set[tuple[nn.Module, str]] = {
            place for place in self._watched if isinstance(place[0], _NormBase)
        }
        self._spare: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}

    def spares(self) -> list[torch.Tensor]:
        """What is written to in the second call, made where the buffers are by now."""
        for norm in self._norms:
            for name in (_MEAN, _VARIANCE):
                self._spared(norm._buffers[name])
        return list(self._spare.values())

    def versions(self) -> list[int]:
        """How often each watched buffer was written to."""
        found = (module._buffers[name] for module, name in self._watched)
        return [-1 if buffer is None else buffer._version for buffer in found]

    def note(self, before: list[int]) -> None:
        """See which ones were written to since these were their versions."""
        if before:
            pairs = zip(self._watched, before, self.versions(), strict=True)
            self._moved |= {place for place, then, now in pairs if then != now}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Whatever is written to them meanwhile is as if it had not been."""
        norms = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        found = [(norm, {name: norm._buffers[name] for name in _STATISTICS}) for norm in norms]
        for norm, own in found:
            spare = {name: self._spared(own[name]) for name in (_MEAN, _VARIANCE)}
            norm._buffers.update({**spare, _COUNT: None})
        places = [module._buffers[name] for module, name in self._moved]
        kept = [(buffer, buffer.clone()) for buffer in places if buffer is not None]
        try:
            yield
        finally:
            for norm, own in found:
                norm._buffers.update(own)
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)

    def _spared(self, like: torch.Tensor | None) -> torch.Tensor | None:
        if like is None:
            return None
        key = like.shape, like.dtype, like.device
        if key not in self._spare:
            self._spare[key] = torch.zeros_like(like)
        return self._spare[key]
