"""The tensors that one device holds, and the bytes behind them."""

from __future__ import annotations

from typing import Any

import torch


class Held(dict[int, torch.Tensor]):
    """Tensors by number; counts each storage once, however many tensors look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        """Bytes of all storages that are held now."""
        self.peak_bytes = 0
        self._num_tensors: dict[int, int] = {}

    def __setitem__(self, number: int, tensor: torch.Tensor) -> None:
        if number in self:
            del self[number]
        storage = tensor.untyped_storage()
        count = self._num_tensors.get(storage._cdata, 0)
        self._num_tensors[storage._cdata] = count + 1
        if not count:
            self.num_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        super().__setitem__(number, tensor)

    def __delitem__(self, number: int) -> None:
        storage = self[number].untyped_storage()
        count = self._num_tensors.pop(storage._cdata) - 1
        if count:
            self._num_tensors[storage._cdata] = count
        else:
            self.num_bytes -= storage.nbytes()
        super().__delitem__(number)

    def pop(self, number: int, *default: Any) -> Any:
        """Forget a tensor and return it."""
        if default and number not in self:
            return default[0]
        tensor = self[number]
        del self[number]
        return tensor
