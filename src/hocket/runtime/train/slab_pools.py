"""Several pieces of memory of one CUDA stream, one of which all that is asked for comes from.

PyTorch's allocator gives each captured graph a pool of its own. Here a capture has several, and
whoever asks is led to the one that is entered; what is dropped goes back to the pool it came from.
So what lies in one of them never takes the place of what lies in another, on one and the same
stream, for which libraries keep their scratch memory once. The graph has the first pool, which is
the entered one when the capture begins and has to be when it ends; the others live as long as this
object.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch


class SlabPools:
    """Pools of a capture, by number."""

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        self._device, self._sizes = device, sizes
        self._index = device.index or 0
        self.ids = [torch.cuda.graph_pool_handle() for _ in sizes]
        self._begun = {0}
        self._entered: int | None = 0

    def enter(self, slab: int) -> None:
        """What any thread asks for from now on comes from this slab."""
        self.leave()
        torch._C._cuda_beginAllocateToPool(self._index, self.ids[slab])
        self._entered = slab
        if slab in self._begun:
            # Every begin counts as one more user.
            torch._C._cuda_releasePool(self._index, self.ids[slab])
            return
        self._begun.add(slab)
        release = weakref.finalize(self, torch._C._cuda_releasePool, self._index, self.ids[slab])
        # The driver may be gone by then, and the memory with it.
        release.atexit = False

    def leave(self) -> None:
        """What is asked for from now on comes from where it does without a capture."""
        if self._entered is not None:
            torch._C._cuda_endAllocateToPool(self._index, self.ids[self._entered])
            self._entered = None

    def reserve(self) -> None:
        """Have all the memory there, each slab's in one piece, from which what is asked for is
        cut."""
        held = []
        for slab, num_bytes in enumerate(self._sizes):
            self.enter(slab)
            if num_bytes:
                held.append(torch.UntypedStorage(num_bytes, device=self._device))  # type: ignore[no-untyped-call]
