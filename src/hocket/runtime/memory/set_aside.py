"""A training that has left its model to another one: the device gets its room back meanwhile.

Tensors stay as they are, views of them as well; only their storages are empty until the training
comes back. What is rehearsed, or trained, in between finds as much room as if it were the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hocket.runtime.memory.blocks import Block
from hocket.runtime.memory.copies import CopyEngines


class SetAside:
    """Blocks whose parameters are the person's alone, and room that is given back."""

    def __init__(
        self, blocks: Sequence[Block], rooms: Iterable[torch.Tensor], engines: CopyEngines
    ) -> None:
        """Nothing is under way on the host for these blocks."""
        self._blocks, self._engines = blocks, engines
        for block in blocks:
            for parameter in block.parameters if block.home is not None else ():
                # At home they lie in one tensor; a model's own parameters have each its memory.
                parameter.data = parameter.data.clone()
        # Copies that were asked for ahead may still write.
        engines.synchronize()
        storages = {room.untyped_storage()._cdata: room.untyped_storage() for room in rooms}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._sizes:
            storage.resize_(0)

    def take_back(self) -> None:
        """Have the room again, and the parameters as they are now where their blocks want them."""
        for storage, num_bytes in self._sizes:
            storage.resize_(num_bytes)
        # The computation may still be at work in memory that it has given back.
        self._engines.synchronize()
        for block in self._blocks:
            block.take_home()
            for parameter in block.parameters if block.home is None else ():
                parameter.data = parameter.data.to(self._engines.device)
